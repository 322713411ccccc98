"""Named dimensions and shapes.

Invariant: a shape holds every dimension name at most once, whatever the sizes; nothing in the
library refers to a dimension by its position.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .errors import DimensionError


class Dimension:
    """A named dimension of a tensor: ``Dimension("batch", 64)``. Equality includes the size."""

    __slots__ = ("name", "size", "_hash")

    def __init__(self, name: str, size: int):
        if not isinstance(name, str) or not name or not name.replace("_", "a").isalnum():
            raise DimensionError(f"Dimension: {name!r} is no name. Use letters, digits and underscores.")
        if isinstance(size, bool) or int(size) != size or size < 1:
            raise DimensionError(f"Dimension: {name} has size {size!r}. Sizes are whole numbers of at least 1.")
        self.name, self.size = name, int(size)
        self._hash = hash((name, self.size))

    def __eq__(self, other):
        return isinstance(other, Dimension) and self.name == other.name and self.size == other.size

    def __hash__(self):
        return self._hash

    def __repr__(self):
        return f"{self.name}={self.size}"


class Shape:
    """An ordered list of dimensions with distinct names.

    The order is for printing and for files; operations go by name.
    """

    __slots__ = ("dims", "names", "_by_name")

    def __init__(self, dims: Iterable[Dimension] = ()):
        self.dims = tuple(dims)
        for dim in self.dims:
            if not isinstance(dim, Dimension):
                raise DimensionError(f"Shape: {dim!r} is no Dimension. Write mm.Dimension(name, size).")
        self._by_name = {dim.name: dim for dim in self.dims}
        self.names = tuple(self._by_name)
        if len(self._by_name) != len(self.dims):
            doubled = next(d.name for i, d in enumerate(self.dims) if d.name in {e.name for e in self.dims[:i]})
            raise DimensionError(f"Shape: {list(self.dims)} holds {doubled!r} twice. Rename one of the two.")

    def __iter__(self) -> Iterator[Dimension]:
        return iter(self.dims)

    def __len__(self):
        return len(self.dims)

    def __contains__(self, dim) -> bool:
        if isinstance(dim, Dimension):
            return self._by_name.get(dim.name) == dim
        return dim in self._by_name

    def __eq__(self, other):
        return isinstance(other, Shape) and self.dims == other.dims

    def __hash__(self):
        return hash(self.dims)

    def __repr__(self):
        return "[" + ", ".join(map(repr, self.dims)) + "]"

    def get(self, name: str) -> Dimension | None:
        """Return the dimension called ``name``, or None."""
        return self._by_name.get(name)

    def size_of(self, name: str) -> int:
        """Return the global size of the dimension called ``name``."""
        return self._by_name[name].size

    @property
    def size(self) -> int:
        """The number of elements of the whole tensor."""
        n = 1
        for dim in self.dims:
            n *= dim.size
        return n

    @property
    def sizes(self) -> tuple[int, ...]:
        """The global sizes, in order."""
        return tuple(dim.size for dim in self.dims)

    def without(self, names: Iterable[str]) -> Shape:
        """Return the shape less the named dimensions."""
        names = set(names)
        return Shape(dim for dim in self.dims if dim.name not in names)


def as_shape(dims) -> Shape:
    """Turn a Shape, one Dimension or a sequence of Dimensions into a Shape."""
    if isinstance(dims, Shape):
        return dims
    if isinstance(dims, Dimension):
        return Shape((dims,))
    return Shape(dims)


def require(shape: Shape, dim: Dimension | str, operation: str) -> Dimension:
    """Return the dimension of ``shape`` that ``dim`` names, or raise a DimensionError."""
    name = dim.name if isinstance(dim, Dimension) else dim
    found = shape.get(name)
    if found is None:
        raise DimensionError(f"{operation}: there is no dimension {name!r} in {shape}. Use one of these.")
    if isinstance(dim, Dimension) and found != dim:
        raise DimensionError(f"{operation}: {dim} does not fit {found} of {shape}. Same-named dimensions must agree in size.")
    return found

"""Read one strict YAML file, its includes and its overrides into a ``Config``.

Invariant: a Config that is returned is legal as a whole; otherwise one ConfigError lists every fault of
every file read, each with file, line, key and, for a wrong name, the nearest right one.

Scalars follow YAML 1.2's core schema: ``1e-3`` is a number, ``no`` is text. A key stands once in a mapping.
``include: other.yaml`` (or a list of files), relative to the file or one of the package's own, puts those files underneath. What is on top wins key by
key, with two exceptions: a section whose ``name`` changes (optimizer, schedule) is replaced whole, and a form
of the batch (``tokens_per_batch``, ...) takes the place of any other form underneath. ``null`` means the default.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import yaml

from .config_schema import ACTIVATIONS, BATCH_FORMS, Config, Section
from .errors import ConfigError, MeshMpiError, nearest
from .layout import STORAGE_CLASSES, Rules
from .mesh import Mesh

__all__ = ["Config", "find", "load", "loads", "parse", "to_builtins", "to_yaml"]

_SHIPPED = Path(__file__).parent / "configs"
_SCALARS = (
    (re.compile(r"|~|null|Null|NULL"), lambda text: None),
    (re.compile(r"true|True|TRUE"), lambda text: True),
    (re.compile(r"false|False|FALSE"), lambda text: False),
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda text: float(text.replace(".", ""))),
)

MAX_NODES = 100_000  # of all files of a configuration together
SHOWN_CHARACTERS = 200


class _Faults(list):
    """The messages so far; ``unread`` once some text could not be read, after which nothing counts as missing. ``n_nodes`` read so far."""

    unread = False
    n_nodes = 0

    def cannot_read(self, message: str) -> None:
        """Add a message about text that could not be read."""
        self.append(message)
        self.unread = True


class _Entry:
    """A value (scalar, list, or mapping of entries) and where it was written."""

    __slots__ = ("value", "where")

    def __init__(self, value, where: str):
        self.value, self.where = value, where


def load(path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in the YAML file ``path`` with ``key=value`` overrides on top.

    A relative path that does not exist here is looked up among the files that come with the package
    (``runs/quickstart.yaml`` or ``configs/runs/quickstart.yaml``). Raises ConfigError with every fault found.
    """
    faults = _Faults()
    tree = _read(find(path), faults, ())
    for text in overrides:
        _merge(tree.value, _override(text, faults))
    return _build(tree, faults)


def loads(text: str, source: str, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in YAML ``text``, which messages call ``source``, without includes, with ``key=value`` overrides on top.

    Raises ConfigError with every fault found.
    """
    faults = _Faults()
    tree = _compose(text, source, faults)
    if not isinstance(tree.value, dict):
        raise ConfigError(f"config: {source} holds no configuration. Give one that does, a mapping of keys to values.")
    for override in overrides:
        _merge(tree.value, _override(override, faults))
    return _build(tree, faults)


def parse(mapping: Mapping) -> Config:
    """Return the configuration in a plain mapping, as YAML would give it. Raises ConfigError with every fault found."""
    return _build(_entries(mapping, "mapping"), _Faults())


def to_builtins(config: Config) -> dict:
    """Return a configuration as plain mappings, every default with it."""
    return msgspec.to_builtins(config)


def to_yaml(config: Config) -> str:
    """Return a configuration as YAML, every default written out, such that ``load`` gives it back."""
    return yaml.dump(to_builtins(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def find(path) -> Path:
    """Return the file that ``path`` names here or among the package's own; ConfigError lists those if there is none."""
    path = Path(path)
    for candidate in (path, *_shipped(path)):
        if _is_file(candidate):
            return candidate
    raise ConfigError(f"config: there is no file {str(path)!r}. Give the path of a YAML file, or one that comes with the package: {', '.join(_known())}.")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # too long a name, a folder that may not be read
        return False


def _shipped(path) -> list[Path]:
    """Return where a relative path may lie among the files that come with the package."""
    return [] if Path(path).is_absolute() else [_SHIPPED / path, _SHIPPED.parent / path]


def _known() -> list[str]:
    return sorted(str(p.relative_to(_SHIPPED)) for p in _SHIPPED.rglob("*.yaml"))


# Reading: text -> entries


def _read(path: Path, faults: _Faults, trail: tuple[Path, ...]) -> _Entry:
    """Return the mapping in a file on top of its includes."""
    if path.resolve() in trail:
        faults.cannot_read(f"{path}: the file includes itself: {' -> '.join(p.name for p in (*trail, path))}. Break the circle.")
        return _Entry({}, str(path))
    try:
        text = path.read_text(encoding="utf-8")
        tree = _compose(text, str(path), faults)
    except (OSError, UnicodeDecodeError) as error:
        faults.cannot_read(f"{path}: cannot be read: {error}. Give a YAML file in UTF-8.")
        return _Entry({}, str(path))
    if not isinstance(tree.value, dict):
        if tree.value is not None:
            faults.cannot_read(f"{tree.where}: the file holds {_shown(tree)}. Write a mapping of keys to values.")
        return _Entry({}, str(path))
    tree.where = str(path)
    include = tree.value.pop("include", None)
    names = [] if include is None else include.value if isinstance(include.value, list) else [_plain(include)]
    under = _Entry({}, str(path))
    for name in names:
        if not isinstance(name, str):
            faults.cannot_read(f"{include.where}: include holds {_shown(name)}. Write the path of a YAML file, relative to this one, or a list of paths.")
            continue
        included = next((f for f in (path.parent / name, *_shipped(name)) if _is_file(f)), None)
        if included is None:
            faults.cannot_read(f"{include.where}: include names {name!r}, and there is no file {str(path.parent / name)!r}. Write a path relative to this file, "
                               f"or one of the package's own: {', '.join(_known())}.")
        else:
            _merge(under.value, _read(included, faults, (*trail, path.resolve())).value)
    _merge(under.value, tree.value)
    return under


def _override(text: str, faults: _Faults) -> dict[str, _Entry]:
    """Return the mapping of a dotted ``key=value``."""
    key, equals, value = text.partition("=")
    where = f"override {text!r}"
    if not equals or not all(key.strip().split(".")):
        faults.append(f"{where}: is no key=value. Write for example train.steps=100.")
        return {}
    entry = _compose(value, where, faults)
    if isinstance(entry.value, dict) and not value.lstrip().startswith(("{", "&", "!")):
        entry = _Entry(value, where)  # layout=batch: is a text that went wrong, not a mapping
    entry.where = where
    for word in reversed(key.strip().split(".")):
        entry = _Entry({word: entry}, where)
    return entry.value


def _compose(text: str, source: str, faults: _Faults) -> _Entry:
    """Return the one YAML document in ``text`` as entries; a syntax error is a fault and an empty document."""
    lines = not source.startswith("override")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark and lines else ""
        faults.cannot_read(f"{source}{line}: no YAML: {getattr(error, 'problem', None) or error}. Correct the syntax.")
        return _Entry(None, source)
    return _Entry(None, source) if node is None else _construct(node, source, lines, faults, ())


def _construct(node, source: str, lines: bool, faults: _Faults, above: tuple) -> _Entry:
    """Turn a YAML node into entries, refusing doubled keys and circular aliases."""
    where = f"{source}:{node.start_mark.line + 1}" if lines else source
    faults.n_nodes += 1
    if faults.n_nodes > MAX_NODES:  # aliases of aliases: a few lines may stand for any number of values
        if faults.n_nodes == MAX_NODES + 1:
            faults.cannot_read(f"{where}: more than {MAX_NODES} values, aliases written out. Use fewer aliases.")
        return _Entry(None, where)
    if isinstance(node, yaml.ScalarNode):
        return _Entry(_resolve(node.value) if node.style is None else node.value, where)
    if id(node) in above:
        faults.append(f"{where}: an alias holds itself. Write the value out.")
        return _Entry(None, where)
    above = (*above, id(node))
    if isinstance(node, yaml.SequenceNode):
        return _Entry([_plain(_construct(item, source, lines, faults, above)) for item in node.value], where)
    mapping: dict[str, _Entry] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            faults.append(f"{where}: a key is a list or a mapping. Keys are words.")
            continue
        key = key_node.value
        entry = _construct(value_node, source, lines, faults, above)
        entry.where = f"{source}:{key_node.start_mark.line + 1}" if lines else source
        if key in mapping:
            faults.append(f"{entry.where}: key {key!r} stands here and at {mapping[key].where}. Keep one of the two.")
        mapping[key] = entry
    return _Entry(mapping, where)


def _resolve(text: str):
    """Return the value of a plain scalar by YAML 1.2's core schema."""
    return next((convert(text) for pattern, convert in _SCALARS if pattern.fullmatch(text)), text)


def _entries(value, where: str) -> _Entry:
    if isinstance(value, Mapping):
        return _Entry({str(k): _entries(v, f"{where} key {k!r}") for k, v in value.items()}, where)
    return _Entry(list(value) if isinstance(value, tuple) else value, where)


def _shown(value) -> str:
    """Return a value as a message shows it, at most SHOWN_CHARACTERS long."""
    text = repr(_plain(value) if isinstance(value, _Entry) else value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS - 3]}..."


def _plain(entry: _Entry):
    return {k: _plain(v) for k, v in entry.value.items()} if isinstance(entry.value, dict) else entry.value


def _merge(under: dict[str, _Entry], over: dict[str, _Entry]) -> None:
    """Put the entries of ``over`` on top of ``under``, in place, by the rules at the top of this file."""
    if any(key in BATCH_FORMS and entry.value is not None for key, entry in over.items()):
        for form in BATCH_FORMS:
            under.pop(form, None)
    for key, entry in over.items():
        old = under.get(key)
        if old is None or not isinstance(old.value, dict) or not isinstance(entry.value, dict):
            under[key] = entry
        elif "name" in entry.value and "name" in old.value and entry.value["name"].value != old.value["name"].value:
            under[key] = entry
        else:
            _merge(old.value, entry.value)


# Checking: entries -> Config


def _build(tree: _Entry, faults: _Faults) -> Config:
    checked = _section(Config, tree, "", faults)
    if not faults:
        config = msgspec.convert(checked, Config)
        _together(config, tree, faults)
        if not faults:
            return config
    raise ConfigError(f"config: {faults[0]}" if len(faults) == 1 else f"config: {len(faults)} faults.\n  " + "\n  ".join(faults))


def _section(cls: type[Section], tree: _Entry, path: str, faults: _Faults) -> dict:
    """Check the entries of one section by its class; return them as plain values."""
    hints, fields = typing.get_type_hints(cls, include_extras=True), msgspec.structs.fields(cls)
    tag = cls.__struct_config__.tag_field
    known = [field.name for field in fields] + ([tag] if tag else [])
    for key, entry in tree.value.items():
        if key not in known:
            faults.append(f"{entry.where}: unknown key {path + key!r}.{nearest(key, known, path)}")
    plain = {tag: cls.__struct_config__.tag} if tag else {}
    for field in fields:
        entry, kind = tree.value.get(field.name), hints[field.name]
        if entry is None or (entry.value is None and not _accepts(kind, None)):
            if field.required and not faults.unread:
                faults.append(f"{tree.where if entry is None else entry.where}: {path}{field.name} is missing. Give {_describe(kind)}.")
        else:
            plain[field.name] = _value(kind, entry, path + field.name, faults)
    return plain


def _value(kind, entry: _Entry, path: str, faults: _Faults):
    """Check one value against its type: a section, one of several named sections, or a leaf."""
    sections = [k for k in (typing.get_args(kind) or (kind,)) if isinstance(k, type) and issubclass(k, Section)]
    if not sections:
        value = _plain(entry)
        if not _accepts(kind, value):
            faults.append(f"{entry.where}: {path} is {_shown(value)}. Give {_describe(kind)}.{_hint(kind, value)}")
        return value
    if not isinstance(entry.value, dict):
        faults.append(f"{entry.where}: {path} is {_shown(entry)}. Write a mapping of keys to values.")
        return None
    if len(sections) == 1:
        return _section(sections[0], entry, path + ".", faults)
    by_name = {s.__struct_config__.tag: s for s in sections}
    name = entry.value.get("name")
    chosen = by_name.get(name.value) if name is not None and isinstance(name.value, str) else None
    if chosen is None:
        found = "missing" if name is None else _shown(name)
        hint = _hint(typing.Literal[tuple(by_name)], name.value) if name is not None else ""
        faults.append(f"{(name or entry).where}: {path}.name is {found}. Give one of {', '.join(by_name)}.{hint}")
        return None
    return _section(chosen, entry, path + ".", faults)


def _accepts(kind, value) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return not isinstance(value, float) or math.isfinite(value)


def _describe(kind) -> str:
    """Return a type in words: "a whole number of at least 1"."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else _describe(arg) for arg in args)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, args))
    if origin is dict:
        return "a mapping of text to text"
    if origin is typing.Annotated:
        bounds = [f"{words} {value}" for words, value in (("of at least", args[1].ge), ("above", args[1].gt), ("up to", args[1].le),
                                                          ("below", args[1].lt)) if value is not None]
        return " ".join([_describe(args[0]), *bounds])
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(kind, "a mapping of keys to values")


def _hint(kind, value) -> str:
    known = [str(a) for a in typing.get_args(kind)] if typing.get_origin(kind) is typing.Literal else []
    hint = nearest(str(value), known)
    return hint if hint.startswith(" Did") else ""


def _together(config: Config, tree: _Entry, faults: _Faults) -> None:
    """Check what several values must satisfy together."""
    def at(key: str, *keys: str) -> str:
        entry = tree.value.get(key, tree)
        return at_inner(entry, keys).where

    def at_inner(entry: _Entry, keys: tuple[str, ...]) -> _Entry:
        return at_inner(entry.value.get(keys[0], entry), keys[1:]) if keys and isinstance(entry.value, dict) else entry

    for word in config.model.activations:
        if word not in ACTIVATIONS:
            faults.append(f"{at('model', 'activation')}: model.activation names {word!r}.{nearest(word, ACTIVATIONS)}")
    mesh = _attempt(lambda: Mesh(config.mesh_shape), at("mesh_shape"), faults)
    for name, text, where in [("layout", config.layout, at("layout")),
                              *((f"storage.{k}", v, at("storage", k)) for k, v in config.storage.items())]:
        rules = _attempt(lambda text=text: Rules(text), where, faults)
        if mesh is not None and rules is not None:
            faults.extend(f"{where}: {fault}" for fault in rules.faults(mesh, None, name))
    for key in config.storage:
        if key not in STORAGE_CLASSES:
            faults.append(f"{at('storage', key)}: storage has no class {key!r}.{nearest(key, STORAGE_CLASSES)}")
    given = [form for form in BATCH_FORMS if getattr(config, form) is not None]
    if len(given) != 1:
        found = " and ".join(f"{form} ({at(form)})" for form in given) or "none of them"
        faults.append(f"{tree.where}: the batch is given by {found}. Give exactly one of {', '.join(BATCH_FORMS)}.")
    elif not faults:
        if _attempt(lambda: config.n_sequences, at(given[0]), faults):
            _attempt(lambda: config.n_microbatches, at("train", "microbatches"), faults)


def _attempt(make, where: str, faults: _Faults):
    """Return ``make()``, or None with a fault at ``where``."""
    try:
        return make()
    except MeshMpiError as error:
        faults.append(f"{where}: {error}")
        return None


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that this module's reader would take for something else."""


_Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar(
    "tag:yaml.org,2002:str", text, style=None if _resolve(text) == text else '"'))

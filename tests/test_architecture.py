"""The shape of the tree, as docs/architecture.md section 3 says it: layers, doors, cycles, sizes and docstrings."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from mpi_runner import ROOT, import_path

LAYERS = {
    "errors": 0, "kernels": 0,
    "dims": 1, "mesh": 1, "layout": 1, "keys": 1, "config": 1, "config_schema": 1, "log": 1, "configs": 1,
    "graph": 2, "spmd": 2,
    "ops": 3,
    "compiler": 4,
    "runtime": 5,
    "layers": 6, "optimize": 6, "checkpoint": 6, "data": 6, "planner": 6,
    "transformer": 7,
    "training": 8,
    "jobs": 9,
    "": 10,  # mesh_mpi/__init__.py, the public door
}
SINGLE_FILES = 1  # the layer whose members are files and may use one another
DOORS = {"mpi4py": ("runtime",), "threadpoolctl": ("runtime",), "cupy": ("kernels.gpu",), "cupyx": ("kernels.gpu",),
         "cupy_backends": ("kernels.gpu",), "h5py": ("checkpoint", "data"), "yaml": ("config",), "msgspec": ("config", "config_schema"), "tqdm": ("training.progress",),
         "matplotlib": ("training.curves",), "tensorboard": ("training.events",)}
ANYWHERE = {"numpy"}
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
MAX_LINES, MAX_FUNCTION_LINES = 400, 59
LONGER_FILES: dict[str, int] = {}  # path: lines it may have for now; only ever shrinks
CONTRACT = ("Shape", "Comm", "Grad", "Raises")


@cache
def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name below mesh_mpi ("" for the package itself)."""
    found, waiting = {}, [ROOT / "mesh_mpi"]
    while waiting:
        for path in sorted(waiting.pop().iterdir()):  # follows the links to kernels, jobs and configs
            if path.is_dir() and path.name != "__pycache__":
                waiting.append(path)
            elif path.suffix == ".py":
                parts = path.relative_to(ROOT / "mesh_mpi").with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(name: str) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(modules()[name].read_text(encoding="utf-8"))


@cache
def imports(name: str) -> list[tuple[str, int]]:
    """Return what a module imports, also inside functions, as absolute dotted names with line numbers.

    ``from x import y`` is x.y where that is a module of ours, else x.
    """
    path, found = modules()[name], []
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    package = [part for part in ["mesh_mpi", *package] if part]
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[:len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{source}.{alias.name}".removeprefix("mesh_mpi.")
                found.append((f"mesh_mpi.{inner}" if source.split(".")[0] == "mesh_mpi" and inner in modules() else source, node.lineno))
    return found


def own_imports(name: str) -> list[tuple[str, int]]:
    """Return the modules of the package that a module imports, by their names below mesh_mpi."""
    return [(target.removeprefix("mesh_mpi").removeprefix("."), line) for target, line in imports(name) if target.split(".")[0] == "mesh_mpi"]


def part(name: str) -> str:
    """Return the part of the tree a module belongs to: the first word of its name."""
    return name.split(".")[0]


def relative(name: str) -> str:
    """Return a module's path for messages."""
    return str(modules()[name].relative_to(ROOT))


def show(faults: list[str]) -> None:
    """Fail with every fault, one a line."""
    if faults:
        pytest.fail(f"{len(faults)} faults:\n  " + "\n  ".join(faults), pytrace=False)


def test_every_module_has_a_layer():
    show([f"{relative(name)}: give {part(name)!r} a layer in docs/architecture.md section 3 and in this file"
          for name in modules() if part(name) not in LAYERS])


def upward(name: str, target: str) -> str | None:
    """Return why ``name`` must not import ``target``, or None if it may."""
    here, there = part(name), part(target)
    if here == there:
        return None
    mine, its = LAYERS.get(here, 0), LAYERS.get(there, 10)
    if here == "kernels":
        return "kernels know nothing of the rest"
    if there == "kernels" and not target.startswith("kernels.contract") and mine < LAYERS["runtime"]:
        return "below runtime, only kernels.contract may be imported"
    if there == "kernels" and mine < LAYERS["graph"]:
        return "kernels.contract may be imported from layer 2 up"
    if its > mine:
        return f"layer {mine} imports layer {its}"
    if its == mine and mine != SINGLE_FILES:
        return f"{here} and {there} are siblings in layer {mine}"
    return None


def test_imports_point_down_only_and_siblings_do_not_import_one_another():
    show([f"{relative(name)}:{line}: imports mesh_mpi.{target}: {why}"
          for name in modules() for target, line in own_imports(name) if (why := upward(name, target))])


def cycles(edges: dict[str, list[str]]) -> list[list[str]]:
    """Return the groups of more than one node that reach one another (Tarjan's algorithm, without recursion)."""
    order, low, stack, found = {}, {}, [], []
    for root in edges:
        work = [(root, iter(edges[root]))] if root not in order else []
        while work:
            node, rest = work[-1]
            if node not in order:
                order[node] = low[node] = len(order)
                stack.append(node)
            for target in rest:
                if target not in order:
                    work.append((target, iter(edges.get(target, []))))
                    break
                if target in stack:
                    low[node] = min(low[node], order[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    group = stack[stack.index(node):]
                    del stack[stack.index(node):]
                    if len(group) > 1:
                        found.append(sorted(group))
    return found


def test_no_modules_import_one_another_in_a_circle():
    edges = {name: [target for target, _ in own_imports(name) if target in modules() and target != name] for name in modules()}
    show([" <-> ".join(group) for group in cycles(edges)])


def test_the_search_for_circles_finds_them():
    assert cycles({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]}) == [["a", "b", "c"]]
    assert cycles({"a": ["b", "c"], "b": ["c"], "c": []}) == []
    assert sorted(cycles({"a": ["b"], "b": ["a", "c"], "c": ["d"], "d": ["c"]})) == [["a", "b"], ["c", "d"]]


def test_each_third_party_has_one_door():
    faults = []
    for name in modules():
        for target, line in imports(name):
            top = target.split(".")[0]
            if top in ANYWHERE or top == "mesh_mpi" or top in sys.stdlib_module_names:
                continue
            doors = DOORS.get(top)
            if doors is None:
                faults.append(f"{relative(name)}:{line}: imports {top}, which is no dependency of this package")
            elif not any(name == door or name.startswith(door + ".") for door in doors):
                faults.append(f"{relative(name)}:{line}: imports {top}, whose door is {' and '.join(doors)}")
    show(faults)


def test_files_keep_to_the_ceiling():
    faults = []
    paths = [*modules().values(), *sorted((ROOT / "tests").glob("**/*.py"))]
    for path in paths:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        allowed = LONGER_FILES.get(str(path.relative_to(ROOT)), MAX_LINES)
        if lines > allowed:
            faults.append(f"{path.relative_to(ROOT)}: {lines} lines, {allowed} allowed")
        elif lines <= MAX_LINES < allowed:
            faults.append(f"{path.relative_to(ROOT)}: has {lines} lines now; take it off the list of exceptions")
    show(faults)


def test_functions_are_short():
    show([f"{relative(name)}:{node.lineno}: {node.name} has {length} lines, {MAX_FUNCTION_LINES} allowed"
          for name in modules() for node in ast.walk(tree(name))
          if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (length := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES])


def test_no_module_is_named_after_nothing():
    show([f"{relative(name)}: name it after what it does" for name in modules() if FORBIDDEN_NAMES & set(name.split("."))])


def public(body) -> list:
    """Return the public functions and classes among statements."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node for node in body if isinstance(node, kinds) and not node.name.startswith("_")]


def test_modules_and_public_functions_classes_and_methods_have_docstrings():
    faults = [f"{relative(name)}: the module has no docstring" for name in modules() if not ast.get_docstring(tree(name))]
    for name in modules():
        for node in public(tree(name).body):
            methods = [(f"{node.name}.", m) for m in public(node.body)] if isinstance(node, ast.ClassDef) else []
            faults += [f"{relative(name)}:{n.lineno}: {prefix}{n.name} has no docstring" for prefix, n in [("", node), *methods] if not ast.get_docstring(n)]
    show(faults)


def test_the_docstring_of_an_operation_is_its_contract():
    """An operation is a public function of ops/ that returns a Tensor."""
    faults = []
    for name in modules():
        for node in public(tree(name).body) if part(name) == "ops" else []:
            if isinstance(node, ast.FunctionDef) and node.returns is not None and "Tensor" in ast.unparse(node.returns).replace("LocalTensor", ""):
                lines = [line.split(None, 1)[0] for line in (ast.get_docstring(node) or "").splitlines() if line.strip()]
                missing = [word for word in CONTRACT if word not in lines]
                if missing:
                    faults.append(f"{relative(name)}:{node.lineno}: {node.name} does not say {', '.join(missing)}")
    show(faults)


def test_importing_the_package_starts_no_mpi_and_loads_no_gpu_library():
    code = "import sys, mesh_mpi; print([n for n in ('mpi4py.MPI', 'cupy', 'h5py') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, **import_path()})
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize("folder", ["kernels", "jobs", "configs"])
def test_the_linked_packages_refuse_to_be_imported_under_any_other_name(folder):
    for place in (ROOT, ROOT / "mesh_mpi"):
        if (place / folder).exists():  # an unpacked sdist has the folders inside the package only
            done = subprocess.run([sys.executable, "-c", f"import {folder}"], capture_output=True, text=True, timeout=60, cwd=place)
            assert done.returncode == 1 and "ImportError" in done.stderr and f"mesh_mpi.{folder}" in done.stderr, done.stderr
    link = ROOT / "mesh_mpi" / folder
    assert not link.is_symlink() or str(link.readlink()) == f"../{folder}"

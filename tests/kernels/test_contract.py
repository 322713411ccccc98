"""What holds for the contracts as a whole."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

import mesh_mpi.kernels as kernels
from mesh_mpi.kernels import contract
from mesh_mpi.kernels.cpu import KERNELS

FOLDER = Path(kernels.__file__).resolve().parent


def test_every_contract_has_a_kernel_and_every_kernel_a_contract():
    assert set(contract.KERNELS) == set(KERNELS)
    for name, one in contract.KERNELS.items():
        assert one.name == name and one.doc and one.version and one.error_eps >= 0


def test_the_package_refuses_to_be_imported_under_another_name():
    spec = importlib.util.spec_from_file_location("kernels", FOLDER / "__init__.py")
    with pytest.raises(ImportError, match="exists only as 'mesh_mpi.kernels'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _imports(path):
    """Top-level names that a file imports absolutely."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


def test_contracts_import_the_standard_library_only_and_kernels_numpy_besides():
    contracts = [FOLDER / "__init__.py", FOLDER / "contract.py", *(FOLDER / "contracts").glob("*.py")]
    cpu = list((FOLDER / "cpu").glob("*.py"))
    assert len(contracts) > 5 and len(cpu) > 10
    for path in contracts:
        assert set(_imports(path)) <= sys.stdlib_module_names, path
    for path in cpu:
        assert set(_imports(path)) <= sys.stdlib_module_names | {"numpy"}, path


def test_an_unknown_dtype_is_named():
    with pytest.raises(ValueError, match="'complex64'"):
        contract.itemsize("complex64")


def test_scratch_that_is_too_small_is_refused():
    import numpy as np

    x = np.zeros((4, 8), np.float32)
    with pytest.raises(ValueError, match="softmax: scratch of 8 bytes"):
        KERNELS["softmax"]((x,), (x.copy(),), np.zeros(8, np.uint8))


def test_an_output_may_alias_an_input_only_if_no_later_step_reads_it():
    one = contract.KERNELS["elementwise"]
    params = {
        "steps": (("add", (("i", 0), ("i", 1)), ("o", 0)), ("mul", (("o", 0), ("i", 1)), ("o", 1))),
        "temp_dtypes": (), "in_dtypes": ("float32", "float32"), "out_dtypes": ("float32", "float64"),
    }  # fmt: skip
    assert one.may_alias(params, 0, 0)
    assert not one.may_alias(params, 0, 1)  # read by the second step
    assert not one.may_alias(params, 1, 1)  # another dtype


def test_flops_of_causal_attention_count_what_is_visible():
    shapes = [(2, 4, 3, 8)] * 3
    outs = [(2, 4, 3, 8), (2, 3, 4)]
    every = contract.KERNELS["attention"].flops(outs, shapes, {"causal": False})
    causal = contract.KERNELS["attention"].flops(outs, shapes, {"causal": True, "query_offset": 0})
    assert every == 2 * 3 * 16 * (4 * 8 + 5) and causal * 16 == every * 10

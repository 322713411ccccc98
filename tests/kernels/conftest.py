"""Running one kernel as the runtime does, and checking what every kernel promises while at it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from mesh_mpi.kernels import contract
from mesh_mpi.kernels.cpu import KERNELS

MAX_CALL_BYTES = 64 * 1024


def _aligned_bytes(n: int) -> np.ndarray:
    raw = np.empty(n + 64, np.uint8)
    first = -raw.ctypes.data % 64
    return raw[first : first + n]


def _run_kernel(name, outs, ins, **params):
    """Bind and call; then call again under tracemalloc, and put back what the first call left in the outputs."""
    outs, ins = tuple(outs), tuple(ins)
    shapes = [out.shape for out in outs], [x.shape for x in ins]
    size = contract.KERNELS[name].scratch_bytes(*shapes, outs[0].dtype, params)
    # All bits set is NaN in every float: nothing may be read before it is written, or kept from call to call.
    scratch = _aligned_bytes(size) if size else None
    poison = (lambda: scratch.fill(0xFF)) if size else (lambda: None)
    poison()
    call = KERNELS[name](outs, ins, scratch, **params)
    poison()
    call()
    results = [out.copy() for out in outs]
    poison()
    call()
    tracemalloc.start()
    try:
        call()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    for out, result in zip(outs, results, strict=True):
        out[...] = result
    assert peak < MAX_CALL_BYTES, f"{name} allocated {peak} bytes in a call"


def _check_close(found, expected, n_eps=64.0):
    """The largest difference, relative to the largest expected magnitude, is at most n_eps eps of found's dtype."""
    expected = np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    if not found.size:
        return
    eps = np.finfo(found.dtype).eps
    same_inf = np.isinf(expected) & (found == expected)
    difference = np.where(same_inf, 0, found.astype(np.float64) - np.where(same_inf, 0, expected))
    error = np.abs(difference).max() / max(np.abs(np.where(same_inf, 0, expected)).max(), 1e-30)
    assert error <= n_eps * eps, f"error {error:.2e} is {error / eps:.1f} eps"


@pytest.fixture
def kernel():
    return _run_kernel


@pytest.fixture
def close():
    return _check_close


@pytest.fixture
def rng():
    return np.random.default_rng(20240229)


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return np.dtype(request.param)

"""What a machine can do and what a step asks of it, in floating-point operations.

Invariant: both sides of every fraction are measured or counted by the formulas here; nothing is taken off for causality.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence


def product_parameters(config) -> int:
    """Return the number of parameters that stand in matrix products: projections, feed-forward and softmax."""
    model = config.model
    attention = 4 * model.d_model * model.heads * model.d_kv
    feed_forward = (len(model.activations) + 1) * model.d_model * model.d_ff
    return model.layers * (attention + feed_forward) + model.padded_vocab_size * model.d_model


def flops(config) -> int:
    """Return the floating-point operations of one step: 6 * product parameters * tokens + 12 * layers * batch * length**2 * heads * d_kv."""
    model = config.model
    scores = 12 * model.layers * config.n_sequences * model.length**2 * model.heads * model.d_kv
    return 6 * product_parameters(config) * config.n_tokens + scores


def product_rate(maxima: Callable[[Sequence[float]], list[float]], size: int = 2048, repeats: int = 5) -> float:
    """Return the GF/s of the slowest rank at float32 products of ``size`` x ``size``, all ranks at once: the median of ``repeats``."""
    import numpy as np

    a = np.full((size, size), 0.5, np.float32)
    c = np.empty_like(a)
    np.matmul(a, a, out=c)
    maxima([0.0])  # all ranks start together
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        np.matmul(a, a, out=c)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / maxima([statistics.median(times)])[0] / 1e9

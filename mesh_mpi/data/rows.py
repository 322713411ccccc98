"""What a row of targets and segments means to a model.

Invariant: inputs never cross the border of a segment, and padding (segment 0) has input, target and position 0.

Suffixes of arrays: R rows, P positions.
"""

from __future__ import annotations

import numpy as np

FEEDS = ("inputs", "targets", "segments", "positions")


def shifted_right(targets_RP: np.ndarray, segments_RP: np.ndarray | None = None) -> np.ndarray:
    """Return the inputs that predict ``targets_RP``: each the target before it; 0 first, and first in each segment.

    Whole numbers [..., position], inputs of the targets' type.
    """
    inputs = np.zeros_like(targets_RP)
    inputs[..., 1:] = targets_RP[..., :-1]
    if segments_RP is not None:
        inputs[..., 1:][segments_RP[..., 1:] != segments_RP[..., :-1]] = 0
    return inputs


def positions_in(segments_RP: np.ndarray) -> np.ndarray:
    """Return each position's index within its segment, int32, 0 in padding; segments are whole numbers [row, position]."""
    index = np.arange(segments_RP.shape[1], dtype=np.int32)
    starts = np.zeros(segments_RP.shape, np.int32)
    np.multiply(segments_RP[:, 1:] != segments_RP[:, :-1], index[1:], out=starts[:, 1:])
    result = index - np.maximum.accumulate(starts, axis=1)
    result[segments_RP == 0] = 0
    return result


def feeds_of(targets_RP: np.ndarray, segments_RP: np.ndarray, positions: slice) -> dict[str, np.ndarray]:
    """Return inputs, targets, segments and positions, int32 [row, position], of ``positions`` of rows that are given from position 0 on."""
    cut = (slice(None), positions)
    arrays = (shifted_right(targets_RP, segments_RP), targets_RP, segments_RP, positions_in(segments_RP))
    return {name: np.ascontiguousarray(array[cut], np.int32) for name, array in zip(FEEDS, arrays)}

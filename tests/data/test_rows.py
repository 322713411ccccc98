"""What rows mean: shifted inputs, positions, and the vocabulary of bytes."""

import numpy as np
import pytest

from mesh_mpi.data.rows import feeds_of, positions_in, shifted_right
from mesh_mpi.data.vocabulary import ByteVocabulary, make_vocabulary
from mesh_mpi.errors import DataError

TARGETS, SEGMENTS = np.array([[3, 8, 1, 5, 1, 0]], np.uint16), np.array([[1, 1, 1, 2, 2, 0]], np.uint8)


def test_inputs_are_the_targets_shifted_right():
    assert shifted_right(TARGETS).tolist() == [[0, 3, 8, 1, 5, 1]]
    assert shifted_right(TARGETS[0]).tolist() == [0, 3, 8, 1, 5, 1]


def test_inputs_start_anew_in_each_segment():
    assert shifted_right(TARGETS, SEGMENTS).tolist() == [[0, 3, 8, 0, 5, 0]]


def test_positions_count_within_segments_and_are_zero_in_padding():
    assert positions_in(SEGMENTS).tolist() == [[0, 1, 2, 0, 1, 0]]
    assert positions_in(np.array([[1, 2, 2, 2, 3, 4], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])).tolist() == [
        [0, 0, 1, 2, 0, 0], [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]


def test_a_slice_of_the_positions_is_cut_from_the_whole():
    whole = feeds_of(TARGETS, SEGMENTS, slice(0, 6))
    part = feeds_of(TARGETS[:, :5], SEGMENTS[:, :5], slice(2, 5))
    assert all(np.array_equal(part[name], whole[name][:, 2:5]) and part[name].dtype == np.int32 for name in whole)


def test_bytes_are_encoded_and_decoded_to_the_byte():
    vocabulary, every = ByteVocabulary(), bytes(range(256))
    ids = vocabulary.encode(every)
    assert ids.dtype == np.uint16 and ids.tolist() == list(range(2, 258)) and vocabulary.size == 258
    assert vocabulary.decode(ids) == every
    assert vocabulary.decode([0, 70, 0, 71, 1, 72, 0]) == b"DE"
    assert vocabulary.decode([]) == b""


def test_ids_and_vocabularies_that_do_not_exist_are_refused():
    with pytest.raises(DataError, match="from 3 to 258 in a vocabulary of 258"):
        ByteVocabulary().decode([3, 258])
    with pytest.raises(DataError, match="Did you mean 'bytes'"):
        make_vocabulary("byte")

"""Which rows a step holds, how large a batch is and in how many pieces it is taken."""

from __future__ import annotations

import numpy as np
import pytest

from mesh_mpi.config import parse
from mesh_mpi.errors import ConfigError, ShapeError
from mesh_mpi.training.batches import ByteBatches, SyntheticBatches, permuted, read_bytes, unigram_entropy

DATA = np.random.default_rng(0).integers(0, 256, 1003).astype(np.uint8)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 100, 1025])
def test_a_permutation_takes_each_index_somewhere_else(n):
    for key in (0, 1, 2**64 - 1):
        assert sorted(permuted(np.arange(n), n, key)) == list(range(n))


def test_permutations_depend_on_the_key_and_hide_the_order():
    a, b = permuted(np.arange(1000), 1000, 1), permuted(np.arange(1000), 1000, 2)
    assert (a == b).mean() < 0.01 and abs(np.corrcoef(a, np.arange(1000))[0, 1]) < 0.1


def test_a_permutation_is_a_fixed_function():
    assert list(permuted(np.arange(8), 100, 12345)) == [12, 19, 89, 75, 85, 1, 61, 35]


def test_each_byte_comes_at_most_once_in_an_epoch_and_every_epoch_has_its_own_order():
    batches = ByteBatches(DATA, 10, 4, seed=3)
    assert batches.n_windows == 100
    epochs = [np.concatenate([batches.starts(s, slice(0, 4)) for s in range(25 * e + 1, 25 * e + 26)]) for e in (0, 1)]
    for starts in epochs:
        assert sorted(starts) == list(range(0, 1000, 10))
    assert (epochs[0] != epochs[1]).any()
    assert (ByteBatches(DATA, 10, 4, seed=4).starts(1, slice(0, 4)) != epochs[0][:4]).any()


def test_targets_are_the_next_bytes():
    feeds = ByteBatches(DATA, 10, 4, seed=3).feeds(7)
    whole = slice(0, 4), slice(0, 10)
    inputs, targets = feeds["inputs"](whole), feeds["targets"](whole)
    assert inputs.dtype == np.int32 and inputs.shape == (4, 10)
    assert (inputs[:, 1:] == targets[:, :-1]).all()


@pytest.mark.parametrize("batches", [ByteBatches(DATA, 10, 8, 3), SyntheticBatches(50, 10, 8, 3)], ids=["bytes", "synthetic"])
def test_a_rank_makes_the_rows_of_its_slice(batches):
    for name, give in batches.feeds(14).items():  # the bytes' step 14 crosses an epoch
        whole = give((slice(0, 8), slice(0, 10)))
        assert (give((slice(2, 6), slice(5, 10))) == whole[2:6, 5:]).all(), name


def test_synthetic_symbols_fill_the_vocabulary_evenly():
    x = SyntheticBatches(16, 100, 100, 0).feeds(1)["inputs"]((slice(0, 100), slice(0, 100)))
    counts = np.bincount(x.ravel(), minlength=16)
    assert len(counts) == 16 and abs(counts / 625 - 1).max() < 0.2


def test_data_must_hold_a_window(tmp_path):
    with pytest.raises(ShapeError, match="at least 1004 bytes"):
        ByteBatches(DATA, 1003, 1, 0)
    (tmp_path / "text").write_bytes(b"text")
    assert bytes(read_bytes(tmp_path / "text")) == b"text"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_bytes(tmp_path / "nothing")


def test_the_entropy_of_frequencies_is_in_nats():
    assert unigram_entropy(np.arange(256, dtype=np.uint8)) == pytest.approx(np.log(256))
    assert unigram_entropy(np.array([7, 7, 7], np.uint8)) == 0
    assert unigram_entropy(np.array([0, 0, 0, 1], np.uint8)) == pytest.approx(-0.75 * np.log(0.75) - 0.25 * np.log(0.25))


def batch(mesh_shape="batch:16", **keys):
    """A configuration of sequences of 512 with the batch split over the axis ``batch``, if there is one."""
    model = {"d_model": 8, "d_ff": 8, "heads": 1, "d_kv": 8, "layers": 1, "vocab_size": 8, "length": 512}
    return parse({"model": model, "mesh_shape": mesh_shape, "layout": "batch:batch" if mesh_shape else "", **keys})


@pytest.mark.parametrize(("n", "mesh_shape", "tokens", "pieces"), [
    (32, "batch:4", 2048, 2), (32, "batch:4", 1024, 4), (24, "batch:4", 2048, 2), (7, "", 2048, 7), (8, "", 1, 8), (8, "", 10_000, 1)])
def test_microbatches_hold_at_most_so_many_tokens(n, mesh_shape, tokens, pieces):
    config = batch(mesh_shape, sequences_per_batch=n, train={"tokens_per_microbatch_per_replica": tokens})
    assert config.n_microbatches == pieces


def test_microbatches_are_given_in_one_way():
    assert batch(sequences_per_batch=32, train={"microbatches": 2}).n_microbatches == 2
    with pytest.raises(ConfigError, match="microbatches is 2 and tokens_per_microbatch_per_replica 1024"):
        batch(sequences_per_batch=32, train={"microbatches": 2, "tokens_per_microbatch_per_replica": 1024})
    with pytest.raises(ConfigError, match="7 sequences"):
        batch("batch:4", sequences_per_batch=7, train={"tokens_per_microbatch_per_replica": 1024})


@pytest.mark.parametrize(("form", "value", "n"), [
    ("sequences_per_batch", 64, 64), ("tokens_per_batch", 65_536, 128), ("sequences_per_replica", 4, 64), ("tokens_per_replica", 2048, 64)])
def test_the_four_forms_of_the_batch(form, value, n):
    assert batch(**{form: value}).n_sequences == n

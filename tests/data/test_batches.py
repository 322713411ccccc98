"""Batches: a function of seed, step and row, on any mesh, read ahead or not."""

import json
import sys
import threading
import time

import numpy as np
import pytest
from mpi_runner import import_path, run_group, run_ranks

import mesh_mpi as mm
from mesh_mpi.config import parse
from mesh_mpi.data.batches import Batches
from mesh_mpi.data.prefetch import Prefetch
from mesh_mpi.data.prepare import bundled_rows, prepare
from mesh_mpi.data.rows import FEEDS
from mesh_mpi.errors import DataError, ShapeError

LENGTH, N = 32, 12
ALL = (slice(0, N), slice(0, LENGTH))


@pytest.fixture(scope="module")
def tokens():
    """Part of the bundled text: rows in memory, of a number that no batch divides."""
    return bundled_rows("bundled:sotu", LENGTH, "valid")


def feed(batches: Batches, step: int, slices=ALL) -> dict:
    return {name: call(slices).copy() for name, call in batches.feeds(step).items()}


def same(a: dict, b: dict) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in FEEDS)


def alive() -> list:
    return [thread for thread in threading.enumerate() if thread.name == "mesh_mpi prefetch"]


def test_the_feeds_of_any_slices_agree_with_the_whole(tokens):
    draw = np.random.default_rng(0)
    for step in (1, 2, 80, 81):
        whole = feed(Batches(tokens, N, 7), step)
        batches = Batches(tokens, N, 7)
        for _ in range(20):
            r, p = np.sort(draw.choice(N + 1, 2, False)), np.sort(draw.choice(LENGTH + 1, 2, False))
            part = feed(batches, step, (slice(*r), slice(*p)))
            assert all(np.array_equal(part[name], whole[name][slice(*r), slice(*p)]) for name in FEEDS)


def test_a_row_depends_on_seed_and_place_and_on_no_batch(tokens):
    steps = [feed(Batches(tokens, N, 7), step) for step in (1, 2, 3)]
    large = Batches(tokens, 3 * N, 7)
    large = feed(large, 1, (slice(0, 3 * N), slice(0, LENGTH)))
    assert all(np.array_equal(np.concatenate([s[name] for s in steps]), large[name]) for name in FEEDS)
    assert not same(steps[0], feed(Batches(tokens, N, 8), 1))


def test_an_epoch_holds_every_row_once_and_the_next_follows_within_a_batch(tokens):
    batches = Batches(tokens, N, 1)
    n = tokens.n_rows
    assert n % N
    rows = np.concatenate([batches.rows(step, slice(0, N)) for step in range(1, 2 * n // N + 1)])
    assert sorted(rows[:n].tolist()) == list(range(n)) and len(set(rows[n:].tolist())) == len(rows) - n
    assert batches.rows_consumed(5) == 60 and batches.epochs(5) == 60 / n
    in_order = Batches(tokens, N, 1, shuffle=False)
    assert in_order.rows(n // N + 1, slice(0, N)).tolist() == [(n // N * N + i) % n for i in range(N)]


@pytest.mark.parametrize("n", [1, 12, 955, 956, 957, 2000])
def test_once_gives_every_row_once_and_then_padding_whatever_the_batch(tokens, n):
    batches = Batches(tokens, n, 1, once=True)
    rows = np.concatenate([batches.rows(step, slice(0, n)) for step in range(1, batches.n_steps + 2)])
    assert rows[rows >= 0].tolist() == list(range(tokens.n_rows)) and (rows[tokens.n_rows:] == -1).all()
    last = feed(batches, batches.n_steps + 1, (slice(0, n), slice(0, LENGTH)))
    assert not any(array.any() for array in last.values())


def test_the_feeds_of_a_step_share_one_reading(tokens):
    class Counting(type(tokens)):
        reads = 0

        def rows(self, *asked):
            Counting.reads += 1
            return super().rows(*asked)

    counting = Counting("x", tokens._targets, tokens._segments, tokens.vocabulary)
    batches = Batches(counting, N, 7)
    for step in (1, 2):
        feed(batches, step)
        feed(batches, step, (slice(0, 6), slice(0, LENGTH)))
    assert Counting.reads == 4
    with pytest.raises(ValueError, match="read-only"):
        batches.feeds(2)["inputs"](ALL)[0] = 0


CONFIG = {"model": {"d_model": 8, "d_ff": 16, "heads": 2, "d_kv": 4, "layers": 1, "vocab_size": 258, "length": LENGTH}, "sequences_per_batch": N}


def test_every_mesh_and_every_number_of_microbatches_is_fed_the_same_rows(tokens):
    from mesh_mpi.training.step import build

    losses = {}
    for mesh, layout, k in (("", "", 1), ("data:2", "batch:data", 1), ("data:2;model:2", "batch:data;heads:model;vocab:model", 3), ("model:2", "length:model", 1)):
        config = parse({**CONFIG, "mesh_shape": mesh, "layout": layout, "train": {"microbatches": k}})
        training = build(config)
        state = mm.State(training.programs, seed=0)
        with Batches(tokens, N, config.seed) as batches:
            batches.start(1)
            losses[mesh] = [training.run_step(state, step, batches.feeds(step)).loss for step in (1, 2, 3)]
    for mesh in losses:
        assert losses[mesh] == pytest.approx(losses[""], rel=1e-5), mesh
    assert not alive()


@pytest.mark.parametrize("prefetch", [1, 2, 5])
@pytest.mark.parametrize("explicit", [True, False])
def test_reading_ahead_gives_the_same_rows(tokens, prefetch, explicit):
    halves = [(slice(0, 6), slice(0, LENGTH)), (slice(6, 12), slice(0, LENGTH))]
    plain = Batches(tokens, N, 7)
    with Batches(tokens, N, 7, prefetch=prefetch) as ahead:
        ahead.start(1, halves if explicit else None)
        for step in (1, 2, 3, 4, 5, 20, 21, 22, 3, 4):  # also after a jump forward and back
            for half in halves:
                assert same(feed(ahead, step, half), feed(plain, step, half)), step
        assert same(feed(ahead, 5), feed(plain, 5))  # a slice that was not asked for before
        assert len(alive()) == 1
    assert not alive()
    assert same(feed(ahead, 6), feed(plain, 6))


def test_the_thread_reads_so_many_steps_ahead_and_no_more():
    read = []
    ahead = Prefetch(lambda step, key: read.append(step) or step, 3, 10, ["a"])
    for step, last in ((10, 13), (11, 14), (14, 17)):
        assert ahead.get(step, "a") == step
        for _ in range(500):
            if read[-1] == last:
                break
            time.sleep(0.01)
        time.sleep(0.02)
        assert read == list(range(10, last + 1))
    ahead.close()


def test_what_the_thread_raised_is_raised_once_and_then_the_caller_reads_itself():
    def read(step, key):
        if threading.current_thread() is not threading.main_thread() and step == 2:
            raise DataError("data: on the thread. Wait.")
        return step

    ahead = Prefetch(read, 3, 1, ["a"])
    assert ahead.get(1, "a") == 1
    with pytest.raises(DataError, match="on the thread"):
        ahead.get(2, "a")
    assert ahead.get(2, "a") == 2 and not ahead.covers(3, "a")
    ahead.close()


def test_without_prefetch_no_thread_is_started(tokens):
    batches = Batches(tokens, N, 7, prefetch=0)
    batches.start(1, [ALL])
    feed(batches, 1)
    assert not alive()


def test_an_exception_on_the_thread_reaches_the_caller_where_its_step_is_asked_for_and_reading_goes_on(tokens):
    class Failing(type(tokens)):
        broken = True

        def rows(self, indices, positions):
            if self.broken and np.array_equal(indices, wanted):
                raise DataError("data: the disk is gone. Wait.")
            return super().rows(indices, positions)

    failing = Failing("x", tokens._targets, tokens._segments, tokens.vocabulary)
    plain = Batches(tokens, N, 7)
    wanted = plain.rows(3, slice(0, N))
    with Batches(failing, N, 7, prefetch=4) as batches:
        batches.start(1, [ALL])
        assert same(feed(batches, 1), feed(plain, 1)) and same(feed(batches, 2), feed(plain, 2))
        for _ in range(2):
            with pytest.raises(DataError, match="the disk is gone"):
                feed(batches, 3)
        failing.broken = False
        for step in (3, 4, 5):
            assert same(feed(batches, step), feed(plain, step))
        assert len(alive()) == 1
    assert not alive()


def test_an_empty_batch_is_refused(tokens):
    with pytest.raises(ShapeError, match="0 sequences"):
        Batches(tokens, 0, 1)


SCRIPT = """
import json, sys
import mesh_mpi as mm
from mesh_mpi.config import parse
from mesh_mpi.data.batches import Batches
from mesh_mpi.data.source import open_rows
from mesh_mpi.training.step import build

config = parse(json.loads({config!r}))
rows = open_rows(config.data.train, "train", config.model.length, config.model.vocab_size)
training = build(config)
state = mm.State(training.programs, seed=0)
with Batches(rows, config.n_sequences, config.seed, prefetch=config.data.prefetch) as batches:
    batches.start(1)
    losses = [training.run_step(state, step, batches.feeds(step)).loss for step in (1, 2, 3)]
mm.say("losses " + repr(losses))
"""


@pytest.mark.parametrize("mesh, layout", [("data:2", "batch:data"), ("model:2", "heads:model;d_ff:model;vocab:model")])
def test_two_ranks_that_read_one_token_file_train_as_the_simulated_ones(mesh, layout, tmp_path):
    prepare(["bundled:sotu"], tmp_path / "sotu.h5", LENGTH)
    config = {**CONFIG, "mesh_shape": mesh, "layout": layout, "data": {"train": str(tmp_path / "sotu.h5")}}
    script = SCRIPT.format(config=json.dumps(config))
    two = run_ranks(2, script, timeout=90).check()
    one = run_group([sys.executable, "-c", script], 90, import_path()).check()
    lines = [[line for line in done.stderr.splitlines() if line.startswith("losses")] for done in (two, one)]
    assert len(lines[0]) == 1 and lines[0] == lines[1]

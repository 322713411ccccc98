"""What is saved on one mesh is loaded on any other, to the bit."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from checkpoint.small_model import COUNTERS, SEED, TEXT, assert_same, raw_arrays, run, state_of, trained, training, values

import mesh_mpi as mm
from mesh_mpi import checkpoint
from mesh_mpi.checkpoint import streaming
from mesh_mpi.errors import CheckpointError, GraphError
from mesh_mpi.mesh import Mesh
from mesh_mpi.runtime.recorder import Recorder
from mesh_mpi.runtime.simulated import SimulatedMachine

MESHES = ["", "data:2", "model:2", "data:4", "model:4", "data:2;model:2", "model:2;data:2", "data:1;model:4"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with one checkpoint, saved on (data:2;model:2) with slots split over data, and what it holds."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    train, state = trained("data:2;model:2", zero_1=True)
    held = values(state)
    report = checkpoint.save(state, folder, 2, COUNTERS, TEXT)
    assert report.path == folder / "checkpoints" / "step_00000002" and report.n_bytes == (report.path / "index.h5").stat().st_size
    assert report.write_s > 0 and report.verify_s > 0
    return folder, held, run(train, state, 3, 4)


@pytest.mark.parametrize("zero_1", [False, True])
@pytest.mark.parametrize("mesh_shape", MESHES)
def test_a_checkpoint_loads_on_every_mesh_to_the_bit_and_training_goes_on(saved, mesh_shape, zero_1):
    folder, held, losses = saved
    if zero_1 and "data" not in mesh_shape:
        mesh_shape = f"{mesh_shape};data:1".strip(";")
    train = training(mesh_shape, zero_1=zero_1)
    state = state_of(train, mesh_shape)
    counters = checkpoint.load(state, checkpoint.find(folder), verified=True)
    assert counters == {**COUNTERS, "step": 2, "seed": SEED}
    assert_same(values(state), held)
    np.testing.assert_allclose(run(train, state, 3, 4), losses, rtol=1e-5 if mesh_shape != "data:2;model:2" else 0)


@pytest.mark.parametrize("mesh_shape", ["", "data:2;model:2"])
def test_float_types_are_converted_on_loading(saved, tmp_path, mesh_shape):
    folder, held, _ = saved
    wide = state_of(training(mesh_shape, float_type="float64"), mesh_shape)
    checkpoint.load(wide, folder)
    assert_same(values(wide), {name: x.astype(np.float64) for name, x in held.items()})
    checkpoint.save(wide, tmp_path, 7)
    narrow = state_of(training(mesh_shape), mesh_shape)
    checkpoint.load(narrow, tmp_path)
    assert_same(values(narrow), held)
    name = next(iter(held))
    wide.assign(name, np.full(held[name].shape, 1e300))
    checkpoint.save(wide, tmp_path, 8)
    with pytest.raises(CheckpointError, match=f"{name} holds numbers of float64 beyond the largest float32. Train in float64."):
        checkpoint.load(narrow, tmp_path)
    assert not narrow.usable
    checkpoint.load(narrow, folder)
    assert narrow.usable


@pytest.mark.parametrize("mesh_shape", MESHES[1:])
def test_every_mesh_writes_the_same_datasets(saved, tmp_path, mesh_shape):
    folder, held, _ = saved
    state = state_of(training(mesh_shape), mesh_shape)
    checkpoint.load(state, folder)
    path = checkpoint.save(state, tmp_path, 2, COUNTERS, TEXT).path
    assert raw_arrays(path / "index.h5") == raw_arrays(checkpoint.resolve(folder))


def test_blocks_of_any_size_write_the_same_file_and_each_slice_is_collected_once(saved, tmp_path, monkeypatch):
    folder, held, _ = saved
    state = state_of(training("data:2;model:2", zero_1=True), "data:2;model:2")
    checkpoint.load(state, folder)
    for i, n_bytes in enumerate((4, 52, 1000)):
        monkeypatch.setattr(streaming, "BLOCK_BYTES", n_bytes)
        state.machine.recorder = Recorder()
        path = checkpoint.save(state, tmp_path, i, COUNTERS).path
        assert state.machine.recorder.total_bytes() <= sum(x.nbytes for x in held.values())
        arrays = raw_arrays(path / "index.h5")
        assert {k: v for k, v in arrays.items() if "state/" not in k} == {k: v for k, v in raw_arrays(checkpoint.resolve(folder)).items() if "state/" not in k}


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 3), (2, 3, 4), (3, 1, 2, 5)])
@pytest.mark.parametrize("block_bytes", [1, 8, 12, 40, 1000])
def test_blocks_cover_an_array_once_in_c_order(shape, block_bytes):
    array = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    found = list(streaming.blocks(shape, 4, block_bytes))
    assert np.concatenate([array[b].reshape(-1) for b in found]).tolist() == array.reshape(-1).tolist()
    assert all(array[b].nbytes <= max(4, block_bytes) for b in found)


def test_variables_of_all_kinds_and_without_dimensions_come_back(tmp_path):
    n = mm.Dimension("n", 4)
    kinds = {"float32": 1.5, "float64": 0.1, "int32": 7, "int64": 2**40, "uint64": 2**63}
    variables = [mm.Variable(f"v/{t}", dims, init=mm.constant_value(1), dtype=t) for t in kinds for dims in [()]] + [
        mm.Variable(f"m/{t}", [n], init=mm.constant_value(1), dtype=t) for t in kinds]
    program = mm.compile(outputs={v.full_name: v for v in variables}, mesh_shape="a:2", layout="n:a")
    state = mm.State([program], machine=SimulatedMachine(Mesh("a:2")))
    for v in variables:
        state.assign(v, np.full(v.shape.sizes, kinds[v.dtype], v.dtype))
    held = values(state)
    checkpoint.save(state, tmp_path, 0)
    other = mm.State([program], machine=SimulatedMachine(Mesh("a:2")))
    assert checkpoint.load(other, tmp_path) == {"step": 0, "seed": 0}
    assert_same(values(other), held)


def test_parameters_alone_leave_the_optimizer_and_counters_of_a_new_run(saved):
    folder, held, _ = saved
    state = state_of(training("model:2"), "model:2", seed=9)
    before = values(state)
    checkpoint.load(state, folder, only="parameters")
    slots = [name for name in held if name.endswith(("adam_m", "adam_v"))]
    assert slots and len(slots) < len(held)
    assert_same(values(state), {name: before[name] if name in slots else x for name, x in held.items()})
    with pytest.raises(CheckpointError, match="only='some' is neither"):
        checkpoint.load(state, folder, only="some")


def test_differences_from_the_model_are_named_all_at_once_with_both_shapes(saved):
    folder, held, _ = saved
    state = state_of(training("model:2", vocab_multiple=128), "model:2")
    before = values(state)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(state, folder)
    tables = [name for name in held if "table" in name and held[name].shape[0] == 64]
    text = str(caught.value)
    assert len(tables) >= 3 and f": {len(tables)} variables differ: " in text and text.endswith("or another checkpoint.")
    for name in tables:
        assert f"{name} is [vocab=64, d_model=16] in the checkpoint and [vocab=128, d_model=16] in the model" in text
    assert_same(values(state), before)
    assert state.usable


def test_missing_and_additional_variables_other_types_and_exchanged_dimensions_are_named(tmp_path):
    a, b = mm.Dimension("a", 4), mm.Dimension("b", 4)

    def state(*variables):
        return mm.State([mm.compile(outputs={v.full_name: v for v in variables})])

    checkpoint.save(state(mm.Variable("w", [a, b]), mm.Variable("old", [a]), mm.Variable("n", [a], dtype="int32")), tmp_path, 1)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(state(mm.Variable("w", [b, a]), mm.Variable("new", [b]), mm.Variable("n", [a], dtype="float32")), tmp_path)
    for words in ("4 variables differ", "w is [a=4, b=4] in the checkpoint and [b=4, a=4] in the model", "new[b=4] float32 is not in the checkpoint",
                  "old[a=4] float32 is not in the model", "n[a=4] is int32 in the checkpoint and float32 in the model"):
        assert words in str(caught.value)


def test_a_state_whose_program_did_not_finish_refuses_to_be_saved(saved, tmp_path):
    train, state = trained("data:2", n_steps=1)
    checkpoint.save(state, tmp_path, 1)
    broken = list(state._ready[id(train.step_program)].calls)
    broken[len(broken) // 2] = lambda: 1 / 0
    state._ready[id(train.step_program)] = state._ready[id(train.step_program)]._replace(calls=tuple(broken))
    with pytest.raises(ZeroDivisionError):
        run(train, state, 2, 2)
    with pytest.raises(GraphError, match="program 'step' did not finish"):
        checkpoint.save(state, tmp_path, 2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_00000001"]
    checkpoint.load(state, tmp_path)
    state.assert_complete()
    checkpoint.save(state, tmp_path, 3)


def test_names_that_hdf5_cannot_hold_and_counters_that_are_no_numbers_are_refused(tmp_path):
    a = mm.Dimension("a", 4)

    def save(*names, **settings):
        state = mm.State([mm.compile(outputs={n: mm.Variable(n, [a]) for n in names})])
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(state, tmp_path, **{"step": 1, **settings})
        assert not list(tmp_path.iterdir())
        return str(caught.value)

    assert "variable 'parameters/w' is also the scope of variable 'parameters/w/b'" in save("w", "w/b")
    assert "'parameters/x//y' is no name in HDF5" in save("x//y")
    assert "counter 'loss' is 'low'" in save("w", counters={"loss": "low"})
    assert "counter 'step' is 3" in save("w", counters={"step": 3})
    assert "keep_last is 0" in save("w", keep_last=0)
    assert "step is -1" in save("w", step=-1)


def test_the_file_says_what_it_is_in_plain_hdf5(saved):
    folder, held, _ = saved
    path = checkpoint.resolve(folder)
    with h5py.File(path, "r") as file:
        assert file.attrs["format"] == b"mesh_mpi checkpoint" and file.attrs["format_version"] == 1
        table = file["parameters/embedding/table"]
        assert [d.label for d in table.dims] == ["vocab", "d_model"] and table.shape == (64, 16)
        assert {"checksum", "dtype", "initializer", "storage_class"} <= set(table.attrs)
        assert file["configuration"].asstr()[()] == TEXT and file["state/tokens"][()] == 384 and file["state/best_loss"][()] == 2.5
    assert checkpoint.read_configuration(folder) == TEXT
    found = checkpoint.describe(folder)
    assert {d.name: d.shape for d in found.datasets} == {name: x.shape for name, x in held.items()}

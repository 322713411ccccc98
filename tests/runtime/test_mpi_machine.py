"""The MPI machine against the simulated one, on real ranks."""

from __future__ import annotations

import os

import pytest
from mpi_runner import ROOT, run_ranks

PATH = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]))}

TRAIN = """
import sys
import numpy as np
import mesh_mpi as mm
from mesh_mpi.runtime.banner import banner
from mesh_mpi.runtime.machine import choose_machine
from mesh_mpi.runtime.recorder import Recorder
from mesh_mpi.runtime.simulated import SimulatedMachine
from runtime.two_layers import batch_of, training_step

TOLERANCE = {"float32": 1e-6, "float64": 1e-14}

def compare(mesh_shape, layout, dtype):
    step = training_step(mesh_shape, layout, dtype)
    exact = all(step.mesh.extent(c.axes) <= 2 for c in step.collectives())
    machine = choose_machine(step.mesh)
    real, simulated = mm.State([step], seed=1), mm.State([step], seed=1, machine=SimulatedMachine(step.mesh))
    assert real.machine is machine and not machine.is_simulated
    machine.recorder = Recorder()
    for i in range(3):
        machine.recorder.calls.clear()
        feed = batch_of(i, dtype)
        out, expected = real.run(step, x=lambda slices: feed[slices]), simulated.run(step, x=feed)
        assert machine.recorder.calls == [(c.name, c.axes, c.payload_bytes) for c in step.collectives()]
        pairs = [(out["loss"], expected["loss"])]
    whole, expected = real.run(step, x=feed, whole=True), simulated.run(step, x=feed, whole=True)
    pairs += [(whole["y"], expected["y"]), (real.read("w"), simulated.read("w")), (real.read("v"), simulated.read("v"))]
    real.assign("w", lambda slices: simulated.read("w")[slices])
    pairs.append((real.read("w"), simulated.read("w")))
    for a, b in pairs:
        if exact:
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE[dtype])
    assert (machine.comm_s > 0) == (step.mesh.size > 1)
    return banner(real)

for mesh_shape, layout in LAYOUTS:
    for dtype in ("float32", "float64"):
        text = compare(mesh_shape, layout, dtype)
if choose_machine(mm.Mesh(mesh_shape)).rank == 0:
    print(text)
"""


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
@pytest.mark.parametrize("n, layouts", [
    (1, [("data:1", "batch:data")]),
    (2, [("data:2", "batch:data"), ("model:2", "d_ff:model"), ("model:2", "d_model:model")]),
    (4, [("data:2;model:2", "batch:data;d_ff:model"), ("data:2;model:2", "batch:data;d_model:model"),
         ("data:2;model:2", "d_ff:data;d_model:model"), ("data:4", "batch:data")]),
])
def test_real_ranks_give_the_simulated_answer_to_the_bit_in_groups_of_two(n, layouts, mpi):
    result = run_ranks(n, f"LAYOUTS = {layouts!r}\n{TRAIN}", timeout=90, env=PATH, mpi=mpi).check()
    assert f"{n} ranks, {n} on this node; {'MPICH' if mpi == 'mpich' else 'Open MPI'}" in result.stdout


COLLECTIVES = """
import numpy as np
import mesh_mpi as mm
from mesh_mpi.runtime import communicator
from mesh_mpi.runtime.machine import choose_machine
from mesh_mpi.runtime.recorder import Recorder
from mesh_mpi.runtime.simulated import SimulatedMachine

mesh = mm.Mesh("a:2;b:2")
real, simulated = choose_machine(mesh), SimulatedMachine(mesh)

def check(kind, axes, n_in, n_out, dtype="float32", reduce="", in_place=False):
    draw = np.random.default_rng(n_in)
    ins = [(draw.normal(size=n_in) if dtype[0] == "f" else draw.integers(0, 2 if dtype == "bool" else 2**29, n_in)).astype(dtype)
           for _ in range(4)]
    mine = ins[real.rank].copy()
    outs = [np.zeros(n_out, dtype) for _ in range(4)]
    out = mine if in_place else np.zeros(n_out, dtype)
    real.recorder = Recorder()
    real.bind(kind, axes, [out], [mine], reduce)()
    simulated.bind(kind, axes, outs, ins, reduce)()
    np.testing.assert_array_equal(out, outs[real.rank], err_msg=f"{kind} over {axes}")
    assert real.recorder.calls == [(kind, axes, max(out.nbytes, mine.nbytes))], real.recorder.calls

def check_all():
    for axes, n in ((("a",), 2), (("b",), 2), (("a", "b"), 4)):
        for dtype in ("int64", "int32", "uint64", "bool") + (("float32", "float64") if n == 2 else ()):
            for in_place in (False, True):
                check("allreduce", axes, 1001, 1001, dtype, "max", in_place)
                if dtype != "bool":
                    check("allreduce", axes, 1001, 1001, dtype, "sum", in_place)
            if dtype != "bool":
                check("reduce_scatter", axes, 12 * n, 12, dtype, "sum")
            check("allgather", axes, 12, 12 * n, dtype)
            check("alltoall", axes, 12 * n, 12 * n, dtype)
    check("swap", ("a", "b"), 30, 30)

check_all()
communicator.PIECE_BYTES, communicator.MESSAGE_BYTES, communicator.MAX_ELEMENTS = 256, 64, 5  # the ways of large arrays
check_all()
assert real.maxima([real.rank, -real.rank]) == [3.0, 0.0]
assert real.broadcast(f"from {real.rank}") == "from 0" and real.gather_objects(real.rank) == [0, 1, 2, 3]
"""


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_every_collective_agrees_with_the_simulated_one_also_the_way_large_arrays_go(mpi):
    run_ranks(4, COLLECTIVES, timeout=60, env=PATH, mpi=mpi).check()


def test_a_large_allreduce_travels_in_pieces_of_8_mib_and_is_one_record():
    run_ranks(2, """
import numpy as np
import mesh_mpi as mm
from mesh_mpi.runtime.machine import choose_machine
from mesh_mpi.runtime.recorder import Recorder
machine = choose_machine(mm.Mesh("data:2"))
x = np.full(5 << 20, machine.rank + 1.0, np.float32)
calls = []
group = machine.group(["data"])
call = group.bind("allreduce", x, x, "sum")
machine.recorder = Recorder()
call()
assert (x == 3).all() and machine.recorder.calls == [("allreduce", ("data",), 20 << 20)]
assert len(call.__closure__) and [len(c.cell_contents) for c in call.__closure__ if isinstance(c.cell_contents, tuple) and c.cell_contents
                                  and callable(c.cell_contents[0])] == [3]
""", env=PATH).check()


def test_a_step_on_real_ranks_allocates_nothing():
    run_ranks(2, """
import tracemalloc
import mesh_mpi as mm
from runtime.two_layers import batch_of, training_step
step, x = training_step("data:2", "batch:data"), batch_of()
state = mm.State([step])
for _ in range(2):
    state.run(step, x=x)
tracemalloc.start()
state.run(step, x=x)
assert tracemalloc.get_traced_memory()[1] < 1 << 17, tracemalloc.get_traced_memory()
""", env=PATH).check()

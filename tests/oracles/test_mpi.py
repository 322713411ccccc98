"""The same programs over MPI: mpi4py's communicator is handed the bytes that the program states, and gives the simulated bits."""

from __future__ import annotations

import re
from pathlib import Path

from mpi_runner import run_ranks
from oracles.harness import Layout, compiled
from oracles.samples import sample_called

SCRIPT = """
import sys
import numpy as np
sys.path.insert(0, {tests!r})
import mesh_mpi as mm
from mesh_mpi.runtime import communicator
from mesh_mpi.runtime.simulated import SimulatedMachine
from oracles.harness import Layout, arrays_of, compiled
from oracles.samples import sample_called

seen = []

class Counting:
    '''Stands where the mpi4py communicator stood and notes the bytes of the buffers in its own calls.'''
    def __init__(self, comm, axes):
        self.comm, self.axes = comm, axes
    def __getattr__(self, name):
        real = getattr(self.comm, name)
        if not name[0].isupper() or name.startswith(("Get_", "Is_")):
            return real
        def call(*arguments):
            buffers = [np.asarray(a[0] if isinstance(a, (tuple, list)) else a).nbytes for a in arguments if isinstance(a, (np.ndarray, tuple, list))]
            seen.append((self.axes, max(buffers)))
            return real(*arguments)
        return call

right = communicator.Communicator.__init__
def init(self, comm, axes, machine, mpi):
    right(self, Counting(comm, axes), axes, machine, mpi)
communicator.Communicator.__init__ = init

n = 0
for name, mesh, layout in {cases!r}:
    sample = sample_called(name)
    program = compiled(sample, "float32", Layout(mesh, layout))
    arrays = {{k: v.astype(program.feeds[k].value.dtype) for k, v in arrays_of(sample).items() if k in program.feeds}}
    found = {{}}
    for machine in (None, SimulatedMachine(program.mesh)):
        state = mm.State([program], seed=7, machine=machine)
        for v in program.variables:
            state.assign(v, arrays_of(sample)[v].astype(program.variables[v].value.dtype))
        seen.clear()
        state.run(program, **arrays)
        index = state.machine.rank if machine is None else mm_rank
        if machine is None:
            mm_rank = state.machine.rank
            assert seen == [(c.axes, c.payload_bytes) for c in program.collectives()], (name, seen, program.collectives())
            n += len(seen)
        memory = state.memories[0 if machine is None else index]
        for key, b in program.outputs.items():
            found.setdefault(key, []).append(memory.view(program.plan, b.value).copy())
    for key, (real, simulated) in found.items():
        assert real.tobytes() == simulated.tobytes(), (name, key, mm_rank, real - simulated)
print(f"<{{mm_rank}} saw {{n}}>")
"""
CASES = [("two layers with squares", "p:2;q:2", "d_model:p;b:q"), ("two layers with squares", "p:2;q:2", "batch:p;b:q"),
         ("reshape to other names, the rules crossed", "p:2;q:2", "a:p;x:q"), ("reshape that splits the inner one", "p:2;q:2", "b:p;b1:q"),
         ("cross_entropy plain", "p:2;q:2", "vocab:p;batch:q"), ("layer_norm", "p:2;q:2", "d_model:p;batch:q"), ("slice", "p:2;q:2", "c:p"),
         ("attention, causal", "p:2;q:2", "heads:p;query_length:q"), ("embedding", "p:2;q:2", "vocab:p;batch:q"), ("relayout", "p:2;q:2", "a:p;c:q")]


def test_over_mpi_the_communicators_buffers_are_what_the_program_states_and_groups_of_two_give_the_simulated_bits():
    done = run_ranks(4, SCRIPT.format(tests=str(Path(__file__).parent.parent), cases=CASES), timeout=120).check()
    counts = {rank: int(n) for rank, n in re.findall(r"<(\d) saw (\d+)>", done.stdout)}
    expected = sum(len(mpi_program(*case).collectives()) for case in CASES)
    assert counts == dict.fromkeys("0123", expected) and expected > 20


def mpi_program(name, mesh_shape, layout):
    """Compile what the script compiles."""
    return compiled(sample_called(name), "float32", Layout(mesh_shape, layout))

"""The commands of ``mesh-mpi``, one file each: thin, and above everything else.

Invariant: this package exists under one name only, ``mesh_mpi.jobs``, however its folder was found.
"""

if __name__ != "mesh_mpi.jobs":
    raise ImportError(f"jobs: this package was imported as {__name__!r}. Import mesh_mpi.jobs, so that no module exists twice.")

# The commands that exist, each a module of this folder, and a line about each.
COMMANDS = {
    "launch": "start ranks under mpiexec: launch -n 4 -- bench runs/bench_lm.yaml",
    "prepare": "turn texts into a file of tokens: prepare TEXT... OUTPUT.h5 --length 256",
    "config": "show a configuration with everything resolved, or every key with its default: config --defaults",
    "train": "train a model: train runs/quickstart.yaml, on as many ranks as its mesh has",
    "evaluate": "the loss of a checkpoint on held-out text, a token, a word and a byte",
    "generate": "continue a text with a checkpoint",
    "plot": "draw loss and throughput of runs against their steps",
    "explain": "print the SPMD programs of a configuration, for any number of ranks, without MPI",
    "bench": "measure a training step: tokens a second, communication, share of the matrix-product rate",
    "inspect": "show a checkpoint or a file of tokens: shapes, numbers, differences, checksums",
}

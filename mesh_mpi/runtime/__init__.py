"""Where programs run: a State on a machine, simulated in this process or one MPI rank a process.

Invariant: only this package imports mpi4py and threadpoolctl, and only when a launcher started this process.
"""

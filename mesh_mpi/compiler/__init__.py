"""From a graph, a mesh and rules to one SPMD program.

Invariant: compilation is pure: no MPI, no arrays, any number of ranks; the same inputs give the
same program, to the digest, in every process.
"""

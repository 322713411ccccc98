"""The commands of ``mesh-mpi``, one file each: thin, and above everything else.

Invariant: this package exists under one name only, ``mesh_mpi.jobs``, however its folder was found.
"""

if __name__ != "mesh_mpi.jobs":
    raise ImportError(f"jobs: this package was imported as {__name__!r}. Import mesh_mpi.jobs, so that no module exists twice.")

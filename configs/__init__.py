"""The configurations that come with the package: ``runs/``, ``models/`` and ``layouts/``, all YAML.

Invariant: this package exists under one name only, ``mesh_mpi.configs``, however its folder was found.
"""

if __name__ != "mesh_mpi.configs":
    raise ImportError(f"configs: this package was imported as {__name__!r}. Import mesh_mpi.configs, so that no module exists twice.")

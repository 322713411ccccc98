"""The contracts, one family a file; read them through ``mesh_mpi.kernels.contract``."""

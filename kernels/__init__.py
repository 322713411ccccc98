"""Raw-array kernels: ``contract`` says what each one does, ``cpu`` and ``gpu`` do it.

Nothing here knows dimensions, ranks or graphs, and importing this package imports neither NumPy nor CuPy.
"""

if __name__ != "mesh_mpi.kernels":
    raise ImportError(
        f"kernels: this package was imported as {__name__!r}, and it exists only as 'mesh_mpi.kernels'. "
        "Write 'import mesh_mpi.kernels'; a second copy of its modules under another name would not share state."
    )

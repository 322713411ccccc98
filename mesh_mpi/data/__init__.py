"""Data: from text to token files, and from token files to the feeds of a step.

Invariant: importing this package imports no h5py; only ``tokens`` and ``writer``, which read and write the files, do.
"""

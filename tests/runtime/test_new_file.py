"""A new file appears whole or not at all, and a full disk is an error and no crash."""

import errno
import os
import subprocess
import sys

import h5py
import pytest
from mpi_runner import import_path

from mesh_mpi.runtime.new_file import NewFile


class Full:
    """A raw file on a disk that has room for ``room`` bytes more: a write may be cut short, the next one fails."""

    def __init__(self, raw, room: int):
        self.raw, self.room = raw, room

    def __getattr__(self, name):
        return getattr(self.raw, name)

    def write(self, data) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        n = self.raw.write(bytes(data[:self.room]))
        self.room -= n
        return n


def test_a_file_has_its_name_when_it_is_published_and_not_before(tmp_path):
    new = NewFile(tmp_path / "a")
    new.write(b"hello")
    assert not (tmp_path / "a").exists() and len(os.listdir(tmp_path)) == 1
    new.publish()
    new.discard()
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_bytes() == b"hello"


def test_what_is_discarded_leaves_the_old_file_as_it_was(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    new = NewFile(tmp_path / "a")
    new.write(b"new")
    new.discard()
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_bytes() == b"old"


@pytest.mark.parametrize("room", [0, 1, 100, 3000, 100_000])
def test_an_hdf5_file_on_a_full_disk_is_an_error_when_it_is_looked_for_and_when_it_is_published(room, tmp_path):
    new = NewFile(tmp_path / "a.h5")
    new._raw = Full(new._raw, room)
    with h5py.File(new, "w", libver=("earliest", "v110")) as file:
        data = file.create_dataset("x", (100_000,), "f8", chunks=(1000,))
        data[:] = 1.0
    assert new.error.errno == errno.ENOSPC
    for action in (new.check, new.sync, new.publish):
        with pytest.raises(OSError, match="No space left"):
            action()
    new.discard()
    assert os.listdir(tmp_path) == []


def test_an_hdf5_file_written_through_it_is_whole(tmp_path):
    new = NewFile(tmp_path / "a.h5")
    with h5py.File(new, "w", libver=("earliest", "v110")) as file:
        file["x"] = range(1000)
    new.publish()
    with h5py.File(tmp_path / "a.h5", "r") as file:
        assert file["x"][:].tolist() == list(range(1000))


def test_a_folder_that_does_not_exist_is_an_error_at_once(tmp_path):
    with pytest.raises(FileNotFoundError):
        NewFile(tmp_path / "none" / "a")


def test_it_needs_no_hdf5():
    code = "import sys, mesh_mpi.runtime.new_file; print('h5py' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, **import_path()})
    assert done.stdout.strip() == "False", done.stderr

"""What is built and installed: the wheel holds exactly what git holds, and works away from the clone."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from mpi_runner import ROOT, run_group

LINKED = ("kernels", "jobs", "configs")


def _python(*words, cwd, python=sys.executable, timeout=180):
    """Run Python in isolation from the caller's PYTHONPATH and from the clone."""
    return run_group([str(python), *map(str, words)], timeout, {"PYTHONPATH": ""}, cwd).check()


def _tracked() -> list[str]:
    """Return the files of the tree: git's, or in an unpacked sdist all that are there."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        return [name for name in listed if name and os.path.lexists(ROOT / name)]
    return [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file() and p.suffix != ".pyc" and ".egg-info" not in str(p)]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the tracked files alone, links as links."""
    folder = tmp_path_factory.mktemp("packaging") / "source"
    for name in _tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def _build(kind: str, source: Path, into: Path) -> Path:
    into.mkdir()
    _python("-c", "import sys, setuptools.build_meta as backend; getattr(backend, 'build_' + sys.argv[1])(sys.argv[2])", kind, into, cwd=source)
    return next(into.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(source) -> Path:
    """The wheel of the tracked files."""
    return _build("wheel", source, source.parent / "wheel")


def _files(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_exactly_the_files_that_git_holds(wheel):
    expected = {f"mesh_mpi/{name}" if name.split("/")[0] in LINKED else name for name in _tracked()
                if name.split("/")[0] in (*LINKED, "mesh_mpi") and not (ROOT / name).is_symlink()}
    assert _files(wheel) == expected


def test_the_sdist_builds_the_same_wheel(source, wheel, tmp_path):
    archive = _build("sdist", source, tmp_path / "sdist")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    unpacked = next(tmp_path.glob("mesh_mpi-*"))
    assert {"LICENSE", "setup.cfg", "pyproject.toml", "tests"} <= {path.name for path in unpacked.iterdir()}
    assert _files(_build("wheel", unpacked, tmp_path / "wheel")) == _files(wheel)


def _environment(folder: Path, *install) -> Path:
    """Make a virtual environment with one thing installed and this one's packages as its dependencies; return its bin folder."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = next(folder.glob("lib/python*/site-packages"))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "mesh_mpi" not in entry.name and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    _python("-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation",
            "--disable-pip-version-check", *install, cwd=folder)
    return python.parent


USE = """
import importlib.util, mesh_mpi, mesh_mpi.config, mesh_mpi.jobs, mesh_mpi.kernels
print(mesh_mpi.__file__)
print(mesh_mpi.config.load("runs/bench_lm.yaml").n_tokens)
print([name for name in ("kernels", "jobs", "configs") if getattr(importlib.util.find_spec(name), "origin", "").startswith(%r)])
"""


@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_an_installed_package_runs_from_any_folder_and_adds_no_generic_names(editable, wheel, source, tmp_path):
    scripts = _environment(tmp_path / "venv", *(["-e", source] if editable else [wheel]))
    home = source if editable else tmp_path
    where, n_tokens, generic = _python("-c", USE % str(home), python=scripts / "python", cwd=tmp_path).stdout.splitlines()
    assert where.startswith(str(home)) and n_tokens == "2048" and generic == "[]"
    for words in (["--help"], ["--version"], ["launch", "--help"], ["explain", "--help"], ["bench", "--help"]):
        told = run_group([str(scripts / "mesh-mpi"), *words], 30, {"PYTHONPATH": ""}, tmp_path).check().stdout
        assert "mesh-mpi" in told
    refused = run_group([str(scripts / "mesh-mpi"), "explain", "nowhere.yaml"], 30, {"PYTHONPATH": ""}, tmp_path)
    assert refused.returncode == 2 and "runs/bench_lm.yaml" in refused.stderr and "Traceback" not in refused.stderr


def test_all_metadata_is_static_and_the_extras_are_those_that_are_documented(wheel):
    text = zipfile.ZipFile(wheel).read("mesh_mpi-0.1.0.dist-info/METADATA").decode()
    fields = [line.split(": ", 1) for line in text.split("\n\n")[0].splitlines() if ": " in line]
    said = {key: [value for k, value in fields if k == key] for key, _ in fields}
    assert said["Name"] == ["mesh-mpi"] and said["Version"] == ["0.1.0"] and said["Requires-Python"] == [">=3.10"]
    assert said["Provides-Extra"] == ["mpi", "plot", "tensorboard", "test", "gpu"]
    needed = [line.split(";")[0].strip() for line in said["Requires-Dist"] if "extra" not in line]
    assert needed == ["numpy", "mpi4py", "h5py", "pyyaml", "msgspec", "threadpoolctl", "tqdm"]
    assert not (ROOT / "setup.py").exists()

"""A real Slurm on this machine for the tests: munged, slurmctld and a slurmd for each of several nodes, in a folder of their own.

Invariant: only processes that were started here are stopped, and nothing outside the folder is written.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1,sched_interval=1
SlurmdParameters=config_overrides
SwitchType=switch/none
ReturnToService=2
KillWait=5
MinJobAge=600
StateSaveLocation={folder}/state
TmpFS={folder}/tmp/%n
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
"""


class Cluster:
    """``n_nodes`` nodes of ``cpus`` each, all this machine; use as a context."""

    def __init__(self, folder: Path, n_nodes: int = 2, cpus: int = 2):
        self.folder, self.nodes, self.cpus = folder, [f"node{i}" for i in range(1, n_nodes + 1)], cpus
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._started: list[subprocess.Popen] = []

    def __enter__(self) -> Cluster:
        missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch", "srun") if self._program(name) is None]
        if missing:
            raise AssertionError(f"slurm: {', '.join(missing)} is not installed. This test needs a real Slurm: apt-get install slurm-wlm munge.")
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception) -> None:
        for process in reversed(self._started):
            process.terminate()
        for process in self._started:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def run(self, *command: str, timeout: float = 30) -> str:
        """Run a Slurm command and return what it printed."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=timeout, cwd=self.folder)
        assert done.returncode == 0, f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return a job's fields as ``scontrol show job`` names them."""
        words = self.run("scontrol", "-o", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, number: str, done, timeout: float = 60) -> dict[str, str]:
        """Wait until ``done(fields of the job)`` holds and return the fields."""
        end = time.monotonic() + timeout
        while not done(fields := self.job(number)):
            assert time.monotonic() < end, f"job {number} after {timeout} s: {fields}"
            time.sleep(0.2)
        return fields

    def _start(self) -> None:
        folder = self.folder
        for name in ("state", "munge", *(f"spool/{n}" for n in self.nodes), *(f"tmp/{n}" for n in self.nodes)):
            (folder / name).mkdir(parents=True, mode=0o755)
        (folder / "munge").chmod(0o700)
        (folder / "munge" / "key").write_bytes(os.urandom(1024))
        (folder / "munge" / "key").chmod(0o600)
        ports = [_free_port() for _ in range(len(self.nodes) + 1)]
        lines = [f"NodeName={n} NodeHostname={n} NodeAddr=127.0.0.1 Port={p} CPUs={self.cpus} State=UNKNOWN" for n, p in zip(self.nodes, ports[1:])]
        lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=12:00:00 State=UP")
        (folder / "slurm.conf").write_text(CONFIG.format(host=socket.gethostname().split(".")[0], port=ports[0], folder=folder) + "\n".join(lines) + "\n")
        self._daemon("munged", "--foreground", "--force", f"--socket={folder}/munge.sock", f"--key-file={folder}/munge/key",
                     f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge/seed")
        self._until(lambda: (folder / "munge.sock").exists(), "munged")
        self._daemon("slurmctld", "-D", "-i", "-f", str(folder / "slurm.conf"))
        for name in self.nodes:
            self._daemon("slurmd", "-D", "-N", name, "-f", str(folder / "slurm.conf"))
        self._until(self._all_idle, "the nodes")

    def _all_idle(self) -> bool:
        done = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], env=self.environment, capture_output=True, text=True, timeout=20)
        return done.stdout.split() == ["idle"] * len(self.nodes)

    def _daemon(self, name: str, *arguments: str) -> None:
        log = open(self.folder / f"{name}-{len(self._started)}.out", "wb")
        self._started.append(subprocess.Popen([self._program(name), *arguments], env=self.environment, stdout=log, stderr=log, start_new_session=True))
        log.close()

    def _until(self, ready, what: str, timeout: float = 30) -> None:
        end = time.monotonic() + timeout
        while not ready():
            logs = "".join(path.read_text(errors="replace")[-800:] for path in sorted(self.folder.glob("*.log")))
            assert time.monotonic() < end, f"slurm: {what} did not come up in {timeout} s\n{logs}"
            time.sleep(0.1)

    @staticmethod
    def _program(name: str) -> str | None:
        return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]

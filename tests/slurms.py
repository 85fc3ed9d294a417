"""A real Slurm on this machine: a controller and two nodes, in namespaces of their own, so that it meets no other."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ranks import ROOT, done

_START = """
set -eu
read pid rest </proc/self/stat  # as those outside see it
mount -t proc proc /proc
mount --bind hosts /etc/hosts
hostname node0
ip link set lo up
unshare --net --uts sh -euc 'hostname node1; ip link set lo up; until ip link set other name eth0; do sleep 0.02; done
    ip addr add 10.77.0.2/24 dev eth0; ip link set eth0 up; exec slurmd -D -f "$0"' "$1" >node1.out 2>&1 &
ip link add eth0 type veth peer name other
until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.02; done
ip link set other netns $!
ip addr add 10.77.0.1/24 dev eth0
ip link set eth0 up
slurmctld -D -f "$1" >slurmctld.out 2>&1 &
slurmd -D -f "$1" >node0.out 2>&1 &
echo $pid
cat  # until the tests have ended, whichever way: the kernel ends all processes of the namespace with this one
"""

_CONF = """
ClusterName=box
SlurmctldHost=node0(10.77.0.1)
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=30
MinJobAge=3600
SlurmctldPidFile={0}/slurmctld.pid
SlurmdPidFile={0}/%n.pid
SlurmdSpoolDir={0}/%n
StateSaveLocation={0}/state
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node0 NodeAddr=10.77.0.1 CPUs=2 RealMemory=4000 State=UNKNOWN
NodeName=node1 NodeAddr=10.77.0.2 CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""


@dataclass(frozen=True)
class Slurm:
    """Commands of Slurm, as on its first node; with this virtual environment's `effloop`, and files where they are."""

    folder: Path  # of the configuration, spools and logs
    enter: tuple[str, ...]  # before a command: runs it there

    def start(self, *command: str, cwd: Path | None = None, **env: str) -> subprocess.Popen[str]:
        """Start a command, such as `srun -n2 effloop ...`."""
        inside = [*self.enter, "sh", "-c", 'cd "$0" && exec timeout 400 "$@"', str(cwd or self.folder), *command]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(inside, env=self.environment(**env), **pipes)

    def call(self, *command: str, cwd: Path | None = None, **env: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of a command."""
        return done(self.start(*command, cwd=cwd, **env))

    def said(self, *command: str, cwd: Path | None = None, **env: str) -> str:
        """What a command that succeeds prints."""
        code, out, err = self.call(*command, cwd=cwd, **env)
        assert code == 0, err + out
        return out.strip()

    def environment(self, **env: str) -> dict[str, str]:
        """Without what a job is given in which the tests themselves may run."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        conf = str(self.folder / "slurm.conf")
        return {**own, "PATH": path, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", "SLURM_CONF": conf, **env}

    def submit(self, script: str, *options: str, cwd: Path, **env: str) -> str:
        """Hand in a batch script; its job's number."""
        (cwd / "job.sh").write_text(script)
        return self.said("sbatch", "--parsable", *options, "job.sh", cwd=cwd, **env)

    def job(self, number: str) -> dict[str, str]:
        """`scontrol show job`: JobState, Restarts, ExitCode, ..."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.said("scontrol", "--oneliner", "show", "job", number)))

    def wait(self, number: str, what: Callable[[dict[str, str]], bool], seconds: float = 300) -> dict[str, str]:
        """Wait for something about a job; a requeued one, which waits for two minutes, starts in a second.

        Not at once: nodes refuse a job of a number that ended in the same second.
        """
        until = time.monotonic() + seconds
        while not what(job := self.job(number)):
            assert time.monotonic() < until, job
            if job["JobState"] == "PENDING" and job["Reason"] == "BeginTime":
                time.sleep(1.1)
                self.call("scontrol", "update", f"jobid={number}", "StartTime=now")
            time.sleep(0.1)
        return job

    def end(self, number: str, seconds: float = 300) -> dict[str, str]:
        """Wait until a job has ended for good: one that is queued again may be FAILED for a moment."""
        over: list[bool] = []

        def ended(job: dict[str, str]) -> bool:
            over.append(job["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"))
            return len(over) > 5 and all(over[-5:])

        return self.wait(number, ended, seconds)


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """A cluster of two nodes with two cores each, and partitions `low` and `high`, which preempts jobs of `low`."""
    if missing := [name for name in ("slurmctld", "slurmd", "srun", "ip") if not shutil.which(name)]:
        packages = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins iproute2"
        pytest.skip(f"needs {', '.join(missing)}: apt-get install {packages}")
    (folder / "state").mkdir(parents=True)
    (folder / "slurm.conf").write_text(_CONF.format(folder))
    (folder / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 node0\n10.77.0.2 node1\n")
    spaces = ("unshare", "--pid", "--fork", "--net", "--uts", "--mount")
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*spaces, "sh", "-c", _START, "sh", folder / "slurm.conf"], cwd=folder, **pipes) as process:
        if not (pid := process.stdout.readline()):
            pytest.skip(f"needs namespaces, of root: {process.stderr.read().strip()}")
        box = Slurm(folder, ("nsenter", "--target", pid.strip(), "--all", "--"))
        until = time.monotonic() + 120
        while box.call("sinfo", "-h", "-N", "-p", "low", "-o", "%T")[1].split() != ["idle", "idle"]:
            assert time.monotonic() < until, [path.read_text() for path in folder.glob("*.out")]
            time.sleep(0.1)
        yield box

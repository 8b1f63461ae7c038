"""A graph as a job of Slurm: two `slurmd` on this machine, with `munge` and a controller.

Debian: `apt-get install slurm-wlm munge`. They run as root.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dynbus.bus.nats.server_process import RunningServer, free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol")

ACTORS = """
from dynbus import Actor, depends, handler

class Printer(Actor, namespace="shop", workers=2):
    @handler
    async def print(self, text: str) -> str:
        return text.upper()

class Front(Actor, namespace="shop"):
    printer = depends(Printer)

    @handler
    async def order(self, text: str) -> str:
        return await self.printer.print(text)
"""


def run(*words: str | Path) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def until(condition: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.5)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cluster with the hosts n1 and n2; its folder."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed: apt-get install slurm-wlm munge")
    if os.getuid() != 0:
        pytest.skip("slurmd runs as root")
    folder = tmp_path / "slurm"
    for name in ("state", "n1", "n2", "munge"):
        (folder / name).mkdir(parents=True)
    for each in (*folder.parents, folder, folder / "munge"):
        # Munge trusts no socket in a folder that others may not enter.
        if tmp_path.parents[2] in (each, *each.parents):
            each.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    host = socket.gethostname().partition(".")[0]
    munge, config = folder / "munge", folder / "slurm.conf"
    ports = [free_port() for _ in range(3)]
    config.write_text(f"""\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={munge}/socket
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerParameters=bf_interval=1,sched_interval=1
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=90
MpiDefault=none
NodeName=n1,n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]},{ports[2]} CPUs=8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")
    monkeypatch.setenv("SLURM_CONF", str(config))
    daemons = [
        [
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}/socket"),
            *(f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"),
        ],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    ]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for words in daemons:
            with (folder / f"{words[0]}.out").open("ab") as out:
                started.append(subprocess.Popen(words, stdout=out, stderr=out))
            if words[0] == "munged":
                until((munge / "socket").exists, 10, lambda: (folder / "munged.out").read_text())
        until(lambda: _state("n1") == _state("n2") == "idle", 60, lambda: run("sinfo", "-N"))
        yield folder
    finally:
        for daemon in reversed(started):
            daemon.terminate()
            daemon.wait(30)


def _state(host: str) -> str:
    done = subprocess.run(
        ["sinfo", "-h", "-n", host, "-o", "%T"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout.strip()


def dynbus(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dynbus", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.nightly(
    "tests/actors/deploying/test_batch.py::test_each_workload_has_hosts_of_its_own_kind"
)
@pytest.mark.timeout(400)
@pytest.mark.server
def test_a_graph_is_a_job_that_comes_back_when_requeued_and_drains_when_cancelled(
    cluster: Path, nats_server: RunningServer, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "slurm_actors.py").write_text(ACTORS)
    (project / ".venv").symlink_to(sys.prefix)
    told = dynbus(
        project,
        *("deploy", "slurm", "slurm_actors.py", "--prefix", str(project)),
        *("--nats", nats_server.url),
    )
    assert "shop.sbatch: written" in told
    out = project / "out"

    def ready() -> int:
        return len(re.findall(r" is ready", out.read_text())) if out.exists() else 0

    def call() -> str:
        return dynbus(
            project,
            *("call", "shop.Front.order", '"a"', "--wait", "10", "--nats", nats_server.url),
        )

    script = str(project / "deploy" / "slurm" / "shop.sbatch")
    job = run("sbatch", "--parsable", "-o", out, script).strip().partition(";")[0]
    until(lambda: ready() == 3, 90, lambda: f"{run('squeue')}{out.read_text()}")
    assert "A" in call()

    # As it is when a host is lost: the job begins again, where there are hosts.
    run("scontrol", "requeue", job)

    def begun_again() -> bool:
        # Slurm waits two minutes before it begins a job again, unless it is told to begin now,
        # which it hears once the one before has ended.
        subprocess.run(
            ["scontrol", "update", f"JobId={job}", "StartTime=now"],
            capture_output=True,
            timeout=60,
            check=False,
        )
        return ready() == 6

    until(begun_again, 150, lambda: f"{run('squeue')}{out.read_text()}")
    assert "A" in call()

    run("scancel", job)
    until(lambda: not run("squeue", "-h"), 90, lambda: f"{run('squeue')}{out.read_text()}")
    text = out.read_text()
    assert len(re.findall(r"drain", text)) >= 3, text
    assert "NoInstances" in dynbus(
        project, "call", "shop.Front.order", '"a"', "--nats", nats_server.url
    )

"""The batch script of an application for Slurm: one job, in which each workload has its hosts.

Its processes need connections to the bus alone, and nothing connects to them.
"""

from __future__ import annotations

import math
import shlex
from typing import Final

from dynbus.bus.errors import ConfigError

from .application import Application, Workload

_SERVE: Final = """\
# Slurm tells all processes that the job ends; `dynbus run` drains then.
stopping=
trap 'stopping=1' TERM

# A workload whose processes have ended by themselves is started again.
serve() {
    trap 'stopping=1' TERM
    while [ -z "$stopping" ]; do
        srun --kill-on-bad-exit=0 "$@" && return
        [ -n "$stopping" ] || sleep 5
    done
}
"""


def batch_script(application: Application, prefix: str, heading: str) -> str:
    """The script that `sbatch` takes.

    Args:
        prefix: the folder, on all hosts, where the project and its environment `.venv` are.

    Raises:
        ConfigError: the servers of the bus are not named.
    """
    if not application.servers:
        raise ConfigError(
            "a job of Slurm runs on other machines than the server: name that, "
            "--nats nats://HOST:4222, or `bus: {servers: ...}` in the YAML file"
        )
    longest = max(each.grace for each in application.workloads)
    lines = [
        "#!/bin/bash",
        f"# {heading}",
        f"#SBATCH --job-name={application.name}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        # Before its time is over, as early as it takes to drain.
        f"#SBATCH --signal=TERM@{longest}",
    ]
    for number, each in enumerate(application.workloads):
        lines += (["#SBATCH hetjob"] if number else []) + [f"#SBATCH {_needs(each)}"]
    lines += ["set -u", f"cd {shlex.quote(prefix)} || exit 1"]
    for name in application.variables:
        lines.append(f': "${{{name}:?set it where sbatch is called}}"')
    lines.append(f"export NATS_URL={shlex.quote(','.join(application.servers))}")
    if application.keys:
        lines.append(f"export DYNBUS_CREDENTIALS={shlex.quote(application.keys)}")
    lines += ["", _SERVE]
    for number, each in enumerate(application.workloads):
        group = f"--het-group={number} " if len(application.workloads) > 1 else ""
        command = shlex.join([f"{prefix}/.venv/bin/dynbus", *application.command(each)])
        lines.append(f"serve {group}{command} &")
    # A signal ends `wait` early.
    lines += ["", 'while [ -n "$(jobs -pr)" ]; do wait; done']
    return "\n".join(lines) + "\n"


def _needs(workload: Workload) -> str:
    """The needs of each instance of a workload: one task is one instance."""
    cores = max(1, math.ceil(workload.resources.cpu or 1))
    needs = [f"--ntasks={workload.replicas}", f"--cpus-per-task={cores}"]
    if workload.memory_limit is not None:
        needs.append(f"--mem-per-cpu={math.ceil(workload.memory_limit / cores / 1024**2)}M")
    if workload.resources.gpu:
        needs.append(f"--gpus-per-task={workload.resources.gpu}")
    return " ".join(needs)

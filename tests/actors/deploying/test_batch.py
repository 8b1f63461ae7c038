"""The batch script, by a linter of shells; `tests/scenarios/test_slurm.py` runs one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.actors.deploying.literals import ELSEWHERE, ENGINE, PLAIN, WHOLE

from dynbus.actors.deploying.batch import batch_script
from dynbus.bus.errors import ConfigError

SERVERS = ("nats://a.example:4222",)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_linter_finds_nothing_in_the_script(number: int, tmp_path: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    some = replace(WHOLE, workloads=WHOLE.workloads[:number], servers=SERVERS)
    path = tmp_path / "chat.sbatch"
    path.write_text(batch_script(some, "/opt/my chat", "made"))

    done = subprocess.run(
        [shellcheck, path], capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.returncode, done.stdout) == (0, "")


def test_each_workload_has_hosts_of_its_own_kind() -> None:
    two = replace(WHOLE, workloads=(ENGINE, WHOLE.workloads[3]), servers=SERVERS)

    lines = batch_script(two, "/opt/chat", "made").splitlines()

    assert [line for line in lines if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name=chat",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=TERM@95",
        "#SBATCH --ntasks=4 --cpus-per-task=4 --mem-per-cpu=2112M --gpus-per-task=2",
        "#SBATCH hetjob",
        "#SBATCH --ntasks=1 --cpus-per-task=1",
    ]
    assert ': "${HF_TOKEN:?set it where sbatch is called}"' in lines


def test_a_single_workload_is_an_ordinary_job() -> None:
    text = batch_script(replace(ELSEWHERE, workloads=ELSEWHERE.workloads[:1]), "/opt", "made")

    assert "het" not in text


def test_a_server_on_this_machine_is_none_for_other_hosts() -> None:
    with pytest.raises(ConfigError, match="name that, --nats nats://HOST:4222"):
        batch_script(PLAIN, "/opt/chat", "made")

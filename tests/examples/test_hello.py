"""The hello example does what its files say."""

from __future__ import annotations

import os
import subprocess
import sys

from dynbus.testing import free_port

from .conftest import EXAMPLES, RunExample


def test_hello_greets_and_spells(run_example: RunExample) -> None:
    hello = run_example("hello", "hello.Greeter.greet")

    assert hello.run_client() == "Hello, Ada!\nA\nd\na\n"


def test_ctrl_c_ends_the_actors_with_exit_code_0(run_example: RunExample) -> None:
    hello = run_example("hello", "hello.Greeter.greet")

    assert hello.stop() == 0


def test_without_a_server_the_client_ends_with_one_line_and_exit_code_1() -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    environment = {**os.environ, "NATS_URL": url, "PYTHONPATH": str(EXAMPLES.parent / "src")}

    done = subprocess.run(
        [sys.executable, "client.py"],
        cwd=EXAMPLES / "hello",
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Unavailable: no NATS server can be reached (127.0.0.1:")
    assert done.stderr.count("\n") == 1

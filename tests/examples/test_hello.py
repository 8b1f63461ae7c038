"""The hello example does what its files say."""

from __future__ import annotations

from .conftest import RunExample


def test_hello_greets_and_spells(run_example: RunExample) -> None:
    hello = run_example("hello", "hello.Greeter.greet")

    assert hello.run_client() == "Hello, Ada!\nA\nd\na\n"


def test_ctrl_c_ends_the_actors_with_exit_code_0(run_example: RunExample) -> None:
    hello = run_example("hello", "hello.Greeter.greet")

    assert hello.stop() == 0

"""The plain example: bare nats-py calls an actor and reads its errors."""

from __future__ import annotations

from .conftest import EXAMPLES, RunExample


def test_bare_nats_py_gets_a_result_a_stream_and_an_error(run_example: RunExample) -> None:
    plain = run_example("plain_nats", "plain.Counter.count")

    lines = plain.run_client().splitlines()

    assert lines[:5] == ["count: {'characters': 5}", "word: a", "word: b", "word: c", "code: 400"]
    assert lines[5].startswith(
        "error: InvalidRequest: text: String should have at least 1 character, got ''"
    )


def test_the_client_has_no_dynbus_in_it() -> None:
    source = (EXAMPLES / "plain_nats" / "client.py").read_text()

    assert "import dynbus" not in source
    assert "from dynbus" not in source

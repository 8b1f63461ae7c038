"""The command line of `dynbus call` becomes a request, or is refused."""

from __future__ import annotations

import pytest
from click.testing import CliRunner, Result

from dynbus.actors.commands import call as calling
from dynbus.actors.commands.call import CallRequest, call
from dynbus.bus.protocol.names import EndpointName


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CallRequest]:
    """The requests that would be made."""
    seen: list[CallRequest] = []

    def execute(request: CallRequest) -> int:
        seen.append(request)
        return 13

    monkeypatch.setattr(calling, "execute", execute)
    return seen


def invoke(*words: str, text: str = "") -> Result:
    return CliRunner().invoke(call, words, input=text)


def test_every_option_reaches_the_call(made: list[CallRequest]) -> None:
    result = invoke(
        "demo.A.b", '{"x": 1}', "--timeout", "2", "--instance", "i1", "--metadata", "k=v=w",
        "--metadata", "l=", "--request-id", "r1", "--verbose", "--wait", "3", "--json", "--nats", "nats://h:1",
    )  # fmt: skip

    assert result.exit_code == 13
    assert made == [
        CallRequest(
            endpoint=EndpointName("demo", "A", "b"),
            request={"x": 1},
            timeout=2.0,
            instance="i1",
            metadata={"k": "v=w", "l": ""},
            wait=3.0,
            as_json=True,
            nats="nats://h:1",
            request_id="r1",
            verbose=True,
        )
    ]


def test_a_request_is_read_from_standard_input(made: list[CallRequest]) -> None:
    invoke("demo.A.b", "-", text="[1, 2]")

    assert made[0].request == [1, 2]


@pytest.mark.parametrize(
    ("words", "text", "request_"),
    [(("a b",), "", b"a b"), (("-",), "{no json", b"{no json"), ((), "", b"")],
)
def test_a_raw_request_is_bytes_as_they_are(
    made: list[CallRequest], words: tuple[str, ...], text: str, request_: bytes
) -> None:
    invoke("demo.A.b", *words, "--raw", text=text)

    assert (made[0].request, made[0].raw) == (request_, True)


def test_standard_input_without_anything_is_no_request(made: list[CallRequest]) -> None:
    result = invoke("demo.A.b", "-", text="")

    assert (result.exit_code, made) == (2, [])
    assert "it is not JSON: Input data was truncated" in result.output


def test_without_a_request_the_handler_gets_none(made: list[CallRequest]) -> None:
    invoke("demo.A.b")

    assert made[0].request is None


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("demo.A",), "Invalid value for ENDPOINT: "),
        (("demo.A.b", "ada"), "Invalid value for REQUEST: it is not JSON: "),
        (("demo.A.b", "--metadata", "k"), "Invalid value for --metadata: 'k': write KEY=VALUE"),
        (("demo.A.b", "--timeout", "0"), "Invalid value for '--timeout': 0.0 is not in the range"),
        (("demo.A.b", "--wait", "soon"), "Invalid value for '--wait': 'soon' is not a valid float"),
    ],
)
def test_a_wrong_word_is_refused_with_the_option_it_came_from(
    words: tuple[str, ...], text: str, made: list[CallRequest]
) -> None:
    result = invoke(*words)

    assert (result.exit_code, made) == (2, [])
    assert text in result.output

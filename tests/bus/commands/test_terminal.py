"""What commands print is readable by people and, when piped, by programs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.commands.terminal import terminal


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "0s"),
        (0.9, "0s"),
        (59.0, "59s"),
        (60.0, "1m"),
        (725.0, "12m 5s"),
        (3605.0, "1h 5s"),
        (273_845.0, "3d 4h"),
    ],
)
def test_a_length_of_time_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert terminal.duration(seconds) == text


def test_a_piped_table_is_plain_text_with_nothing_cut_off(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long = "x" * 150

    terminal.print_table(
        ("NAME", "STATE"),
        [(terminal.plain("[a]"), "[green]serving[/]"), (terminal.plain(long), "-")],
    )

    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[1].split() == ["[a]", "serving"]
    assert lines[2].split() == [long, "-"]


def test_bars_are_as_long_as_their_numbers_and_printed_where_they_are_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bars = [("[a]", 4.0, "4 ms"), ("b", 2.0, "2 ms"), ("c", 0.0, "0 ms")]

    terminal.print_bars("Times", bars)
    nothing = capsys.readouterr().out
    terminal.print_bars("Times", [], always=True)
    terminal.print_bars("Times", bars, always=True)

    assert nothing == ""
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "Times"
    assert [line.split()[0] for line in lines] == ["[a]", "b", "c"]
    assert [line.split()[-2:] for line in lines] == [["4", "ms"], ["2", "ms"], ["0", "ms"]]
    long, half, none = (line.count("\N{FULL BLOCK}") for line in lines)
    assert long > 50
    assert abs(long - 2 * half) <= 1
    assert none == 0
    assert {len(line) for line in lines} == {100}


def test_json_is_indented_for_people_and_one_line_for_programs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal.print_json({"a": [1]})
    terminal.print_json({"a": [1]}, indent=0)

    assert capsys.readouterr().out == '{\n  "a": [\n    1\n  ]\n}\n{"a":[1]}\n'


@pytest.mark.parametrize("indent", [0, 2])
def test_json_cannot_steer_the_terminal_and_says_what_was(
    indent: int, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "\x9b31m \u202e \U000e0001 \x1b[2J \n ä \U0001f600"

    terminal.print_json({hostile: hostile}, indent=indent)

    shown = capsys.readouterr().out
    assert all(line.isprintable() for line in shown.splitlines())
    assert "ä" in shown
    assert json.loads(shown) == {hostile: hostile}


def test_what_comes_from_elsewhere_cannot_steer_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal.print_table(("NAME",), [(terminal.plain("\x1b[2J\r[red]ä"),)])
    terminal.notice("two\nlines \x1b]0;title\x07")

    shown = capsys.readouterr()
    assert shown.out.splitlines()[1].rstrip() == "\\x1b[2J\\r[red]ä"
    assert shown.err == "two\nlines \\x1b]0;title\\x07\n"


@given(st.text())
def test_printable_text_is_printable_and_keeps_what_was(text: str) -> None:
    assert terminal.printable(text).isprintable()
    assert not text.isprintable() or terminal.printable(text) == text


def test_a_failed_command_says_why_in_one_line_without_credentials() -> None:
    assert terminal.error_line("no nats://me:pw@h:\n there\x1b[2J", "Unavailable") == (
        "dynbus: Unavailable: no nats://me:***@h: there\\x1b[2J"
    )
    assert terminal.error_line("no such\tfile") == "dynbus: no such file"

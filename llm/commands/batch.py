"""`dynbus batch run`: a file of requests, run against the models on the bus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from dynbus.spi import terminal

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynbus import BusConfig
    from dynbus.llm.batches.records import Batch
    from dynbus.llm.batches.whole_file import FileRun

_RUN: Final = """Run the requests of FILE against the models on the bus.

    FILE has a line for each, as OpenAI's batches have them, and so has what is written: answers
    into --out, refused requests into --errors. What is interrupted goes on when the same command
    is run again; what was answered before is not asked again.

    \b
    dynbus batch run requests.jsonl --out answers.jsonl
    dynbus batch run requests.jsonl --out answers.jsonl --model smollm2-135m-instruct

    Exit code 1: requests were refused or not done in time, or the file is not valid.
    """


@click.group(epilog=terminal.EXIT_CODES)
def batch() -> None:
    """Run batches of requests."""


@batch.command(help=_RUN, epilog=terminal.EXIT_CODES)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--errors",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where refused requests are written; --out with .errors behind it unless given.",
)
@click.option("--model", default="", help="The model of lines that name none.")
@click.option("--endpoint", default="/v1/chat/completions", show_default=True)
@click.option("--window", default="24h", show_default=True, help="What is not done then, fails.")
@click.option(
    "--concurrency",
    default=32,
    show_default=True,
    type=click.IntRange(0, 64),
    help="Requests at a time; 0 leaves them to workers of batches elsewhere.",
)
@click.option(
    "--wait",
    type=terminal.number(0),
    default=10.0,
    show_default=True,
    help="Seconds to wait for models that are named.",
)
@terminal.nats_option
def run(
    file: Path,
    out: Path,
    errors: Path | None,
    model: str,
    endpoint: str,
    window: str,
    concurrency: int,
    wait: float,
    nats: str | None,
) -> None:
    import uvloop

    from dynbus.llm.batches.records import Status
    from dynbus.llm.batches.whole_file import FileRun

    config = terminal.settings(nats)
    errors = errors or out.with_name(f"{out.name}.errors")
    asked = FileRun(file, out, errors, endpoint, model, window, concurrency, wait)
    asked.check()
    progress = _Progress()
    ended = uvloop.run(_run(config, asked, progress.tell))
    if ended is None:
        again = "run the same command again to go on"
        terminal.notice(f"interrupted: {again if progress.has_begun else 'nothing had begun'}")
        raise SystemExit(terminal.INTERRUPTED)
    counts = ended.counts
    for error in ended.errors:
        place = "" if error.line is None else f", line {error.line}"
        terminal.notice(f"{file}{place}: {error.message}")
    if ended.status in (Status.COMPLETED, Status.EXPIRED):
        terminal.notice(f"{ended.status}: {counts.completed} of {counts.total} answered in {out}")
    else:
        terminal.notice(f"{ended.status}: nothing was written")
    if counts.failed:
        terminal.notice(f"{counts.failed} have no answer: {errors} says why")
    if counts.failed or ended.status is not Status.COMPLETED:
        raise SystemExit(terminal.FAILURE)


async def _run(
    config: BusConfig, asked: FileRun, tell: Callable[[Batch, str], object]
) -> Batch | None:
    """Run a file; None where a signal ends that before."""
    import anyio

    from dynbus.llm.batches.whole_file import run_file
    from dynbus.spi import program_runtime

    ended: Batch | None = None
    with anyio.CancelScope() as scope:
        async with program_runtime(
            "dynbus-batch", config, drain=scope.cancel, stop=scope.cancel
        ) as runtime:
            ended = await run_file(runtime, asked, tell)
    return ended


class _Progress:
    """The progress of a batch, as it is told.

    Attributes:
        has_begun: whether there is a batch that goes on.
    """

    def __init__(self) -> None:
        self.has_begun = False

    def tell(self, batch: Batch, how: str) -> None:
        self.has_begun = True
        counts = batch.counts
        if how:
            terminal.notice(f"{batch.id}: {how}")
        elif counts.total:
            ended = counts.completed + counts.failed
            terminal.notice(f"{ended} of {counts.total} ended, {counts.failed} without an answer")

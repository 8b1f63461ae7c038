"""`dynbus profile`: how long the steps of an engine take, and how well that is known."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from dynbus import ConfigError, DynbusError
from dynbus.llm.small.engine import SmallSize
from dynbus.spi import ComponentName, flags, terminal

_HELP: Final = """Measure an engine, and write its profile: what mock engines, `dynbus lab replay`
    and `dynbus plan` take for its speed.

    ENGINE is a model path of the small engine, which is measured in this process: a folder, a .gguf
    file, a repository. Or it is a component on the bus, namespace.component, an instance of which
    is measured by its streams: vLLM, or another engine that dynbus serves. Then requests by chance
    that were not fitted are computed at parts of the most that the engine can do, and simulated
    with the profile: the errors are in the profile, too. Let nothing else run on the machine, and
    nobody else ask the engine.

    \b
    dynbus profile smollm2 --out smollm2.json
    dynbus profile model.gguf --out model.json --threads 1 --max-num-seqs 32 --check
    dynbus profile llm.VllmWorker --out vllm.json
    """


def _check_out(_: click.Context, __: click.Parameter, path: Path) -> Path:
    """Refuse a path where no file can be written, before minutes of measurement."""
    # A link stays, whatever it leads to.
    file = path.resolve()
    if not file.parent.is_dir():
        raise click.BadParameter(
            f"there is no folder {file.parent}: make it, or choose another one"
        )
    is_new = not file.exists()
    if not is_new and not file.is_file():
        raise click.BadParameter(f"{path} is no plain file: choose another name")
    try:
        file.open("ab").close()
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be written: {error.strerror}") from None
    if is_new:
        file.unlink()
    return path


def _component(engine: str) -> ComponentName | None:
    """The component that is named; None where it is a model path."""
    if Path(engine).exists() or engine.endswith(".gguf") or engine.count(".") != 1:
        return None
    try:
        return ComponentName.parse(engine)
    except ConfigError:
        return None


def _check_options(ctx: click.Context, others: Collection[str], engine: str) -> None:
    """Refuse options of the other kind of engine, which would do nothing."""
    for name in others:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            kind = "a model of this process" if name in ("instance", "nats") else "on the bus"
            raise click.BadParameter(
                f"{engine} is {kind}, for which it says nothing: leave it out", param_hint=option
            )


@click.command(help=_HELP, epilog=terminal.EXIT_CODES)
@click.argument("engine", metavar="ENGINE")
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=_check_out,
    help="The file of the profile.",
)
@click.option(
    "--context",
    type=click.IntRange(64),
    default=2048,
    show_default=True,
    help="Tokens of the longest request that is measured, as far as the engine takes them; the "
    "profile says nothing of longer ones.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="How often each batch of requests is measured.",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1),
    help="Of the requests that are held out, on average: 128 unless given, or a quarter of the "
    "longest request where that is less.",
)
@click.option(
    "--output-tokens",
    type=click.IntRange(2),
    help="Of these, on average: 32 unless given, or a quarter likewise.",
)
@click.option(
    "--requests",
    type=click.IntRange(20),
    default=300,
    show_default=True,
    help="How many of these at each load.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=1, show_default=True, help="Of these requests."
)
@click.option(
    "--check",
    is_flag=True,
    help="Exit code 1 where an error is above its goal, 10 % for means, 20 % for 99th percentiles, "
    "or is not known.",
)
@click.option(
    "--instance", default="", metavar="ID", help="Of the component, this one; see `dynbus ps`."
)
@terminal.nats_option
@flags(SmallSize)
@terminal.json_option
@click.pass_context
def profile(
    ctx: click.Context,
    /,
    engine: str,
    out: Path,
    context: int,
    repeats: int,
    prompt_tokens: int | None,
    output_tokens: int | None,
    requests: int,
    seed: int,
    check: bool,
    instance: str,
    nats: str | None,
    as_json: bool,
    **size: Any,
) -> None:
    import asyncio

    import msgspec

    from dynbus.llm.mock.profile import write_profile
    from dynbus.llm.profiling import Effort, misses
    from dynbus.llm.small.engine import SmallConfig

    from .profiling import Traffic, print_profile, profile_served, profile_small

    component = _component(engine)
    _check_options(ctx, size if component else {"instance": instance, "nats": nats}, engine)
    effort = Effort(context, repeats)
    traffic = Traffic(prompt_tokens, output_tokens, requests, seed)
    try:
        if component is None:
            made, unchecked = profile_small(engine, SmallConfig(**size), effort, traffic)
        else:
            made, unchecked = asyncio.run(
                profile_served(component, instance, nats, effort, traffic)
            )
    except DynbusError:
        raise
    except (ValueError, ImportError) as error:
        raise click.ClickException(str(error)) from None
    try:
        write_profile(out, made)
    except OSError as error:
        raise click.ClickException(f"the profile was not written: {error}") from None
    if as_json:
        terminal.print_json(msgspec.to_builtins(made))
    else:
        print_profile(made)
    for missed in misses(made.held_out):
        terminal.notice(f"the goal is missed: {missed}")
    if unchecked:
        terminal.notice(f"the profile is written, and its error is not known: {unchecked}")
    if check and (unchecked or misses(made.held_out)):
        raise SystemExit(terminal.FAILURE)

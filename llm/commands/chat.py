"""`dynbus chat`: talk to a model of any OpenAI-compatible front end from the terminal."""

from __future__ import annotations

from typing import Final

import click

from dynbus.spi import terminal

_HELP: Final = """Chat with a model through an OpenAI-compatible front end.

    With a QUESTION it is asked once, and the answer goes to standard output. Without one a
    conversation begins: Ctrl-C stops an answer, Ctrl-C twice or Ctrl-D ends. Where standard input
    is no terminal, all of it is the question; the word - stands for it within a QUESTION.

    \b
    dynbus chat
    dynbus chat "What is the capital of France?"
    dynbus chat --url http://127.0.0.1:8000 --model smollm2-135m-instruct --system "Be brief."
    dynbus chat "Summarise this in a sentence:" - < notes.txt
    """


@click.command(help=_HELP, epilog=terminal.EXIT_CODES)
@click.argument("question", nargs=-1)
@click.option(
    "--url",
    envvar="OPENAI_BASE_URL",
    default="http://127.0.0.1:8000",
    show_default=True,
    help="The front end; without a path, /v1 is added. Variable: OPENAI_BASE_URL.",
)
@click.option("--model", metavar="NAME", help="Needed where the front end has several.")
@click.option(
    "--api-key",
    envvar="OPENAI_API_KEY",
    metavar="KEY",
    help="Variable: OPENAI_API_KEY, which other users of the machine do not see.",
)
@click.option("--system", metavar="TEXT", help="Instructions that come before the conversation.")
@click.option("--max-tokens", type=click.IntRange(1), help="Of an answer.")
@click.option("--temperature", type=terminal.number(0), help="0 takes the likeliest token.")
@click.option(
    "--timeout",
    type=terminal.number(0, min_open=True),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the front end may be silent.",
)
@click.pass_context
def chat(
    ctx: click.Context,
    /,
    question: tuple[str, ...],
    url: str,
    model: str | None,
    api_key: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    timeout: float,
) -> None:
    from .chatting import Client, execute

    settings = {"max_tokens": max_tokens, "temperature": temperature}
    ctx.exit(
        execute(
            Client(url, api_key=api_key, timeout=timeout),
            question,
            model=model,
            system=system,
            settings={name: value for name, value in settings.items() if value is not None},
        )
    )

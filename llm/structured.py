"""The form of an output: what may be asked for, and the grammar that llguidance makes of it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from dynbus import Unavailable
from dynbus.spi import how_to_install, usable_cores

from . import grammar_checking
from .generation import StructuredOutput
from .grammar_checking import STACK, CheckAnswer, CheckRequest
from .sandbox import Sandbox, SandboxEnded
from .turns import TenantThreads

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

T = TypeVar("T")

MAX_BYTES: Final = 128 << 10
"""Of a schema, a regular expression, a grammar, or all choices together, as JSON."""
MAX_CHOICES: Final = 4096
MAX_MARKER: Final = 64
"""Characters of each text around thinking."""

_KINDS: Final = ("json_schema", "regex", "choice", "grammar")
# The objects that take what the schemas true and false take.
_BOOLEANS: Final[dict[bool, dict[str, Any]]] = {True: {}, False: {"not": {}}}


def check_structured(structured: StructuredOutput) -> None:
    """Check that exactly one form is given, and that it is not too large.

    Raises:
        ValueError: it is not so, and what to give.
    """
    given = [name for name in _KINDS if getattr(structured, name) is not None]
    if len(given) != 1:
        raise ValueError(
            f"structured has {' and '.join(given) or 'no form'}: give exactly one of "
            f"{', '.join(_KINDS)}"
        )
    (name,) = given
    value: object = getattr(structured, name)
    if structured.choice is not None and (
        not 1 <= len(structured.choice) <= MAX_CHOICES or not all(structured.choice)
    ):
        raise ValueError(f"choice: give 1 to {MAX_CHOICES} texts, none of them empty")
    try:
        size = len(msgspec.json.encode(value)) - (2 if isinstance(value, str) else 0)
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply: flatten it, for example by $defs") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} cannot be written as JSON: {error}") from None
    if not size:
        raise ValueError(f"{name} is empty: give one, or leave it out")
    if size > MAX_BYTES:
        raise ValueError(f"{name} has {size} bytes as JSON: at most {MAX_BYTES} are taken")
    thinking = structured.thinking
    if thinking is not None and not (
        0 < len(thinking.start) <= MAX_MARKER and 0 < len(thinking.end) <= MAX_MARKER
    ):
        raise ValueError(f"thinking: start and end have 1 to {MAX_MARKER} characters each")


# What llguidance makes of it ----------------------------------------------------------------

MAX_SECONDS: Final = 1.0
"""Of processor time to check a form; those in use take milliseconds."""
MAX_KNOWN: Final = 4096
"""Forms that have been checked, and are not checked again."""

CHECKERS: Final = Sandbox(Path(grammar_checking.__file__), usable_cores())
"""The processes that check forms for this one."""

_threads: Final = TenantThreads(
    ThreadPoolExecutor(usable_cores(), thread_name_prefix="dynbus-grammars"),
    # The last one is left to others.
    max(1, usable_cores() - 1),
)
_problems: Final[dict[bytes, str]] = {}
"""The faults of forms that have been checked, by their digests; empty for none."""

_JSON_OPTIONS: Final[Any] = {
    # Enough to indent; without an end a model may write nothing else.
    "whitespace_pattern": r"[ \n\r\t]{0,40}",
    # The schemas of unions have oneOf where their members exclude each other anyway.
    "coerce_one_of": True,
}
_MAX_REASON: Final = 400

_stack_size: Final = threading.Lock()


async def check_grammar(structured: StructuredOutput) -> None:
    """Check that a form can be had, in a process of its own that it may end.

    Raises:
        ValueError: it cannot, and why.
        Unavailable: there can be no such process.
    """
    await _threads.run(partial(_check_grammar, structured))


def _check_grammar(structured: StructuredOutput) -> None:
    check_structured(structured)
    grammar = grammar_of(structured)
    digest = hashlib.blake2b(grammar.encode(), digest_size=16).digest()
    problem = _problems.get(digest)
    if problem is None:
        try:
            problem = _problem_of(grammar)
        except SandboxEnded:
            # Not kept: somebody else may have ended the process.
            raise refusal(structured, "it takes too much memory") from None
        if len(_problems) >= MAX_KNOWN:
            _problems.clear()
        _problems[digest] = problem
    if problem:
        raise refusal(structured, problem)


def _problem_of(grammar: str) -> str:
    """The fault of a grammar; empty for none.

    Raises:
        SandboxEnded: the process that tried it has ended before its time.
        Unavailable: there can be no such process.
    """
    request = msgspec.json.encode(CheckRequest(grammar, MAX_SECONDS))
    try:
        answer = msgspec.json.decode(CHECKERS.ask(request), type=CheckAnswer)
    except SandboxEnded as error:
        if not error.time_is_over:
            raise
        return f"it takes more than {MAX_SECONDS:g} s of processor time"
    except OSError as error:
        raise Unavailable(f"no process can be started to check a form: {error}") from error
    # Of whatever length: the library may repeat the form.
    return answer.problem[:_MAX_REASON]


def grammar_of(structured: StructuredOutput) -> str:
    """The grammar of a form that is checked, as llguidance writes it.

    Raises:
        ValueError: llguidance is not installed, or the form cannot be written so.
    """
    matcher: type[LLMatcher] = library().LLMatcher
    if structured.json_schema is not None:
        schema = structured.json_schema
        if isinstance(schema, bool):
            schema = _BOOLEANS[schema]
        text = msgspec.json.encode(schema).decode()
        return matcher.grammar_from_json_schema(text, _JSON_OPTIONS)
    if structured.regex is not None:
        return matcher.grammar_from_regex(structured.regex)
    if structured.choice is not None:
        # As one terminal: of rules llguidance follows no 2000 side by side.
        texts = " | ".join(map(json.dumps, structured.choice))
        return matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    assert structured.grammar is not None, "a form has been given"
    return matcher.grammar_from_lark(structured.grammar)


def json_rule(schema: Mapping[str, Any]) -> str:
    """The rule for a JSON value of a schema in a grammar in the dialect of Lark."""
    return "%json " + msgspec.json.encode({**schema, "x-guidance": _JSON_OPTIONS}).decode()


def refusal(structured: StructuredOutput, problem: str) -> ValueError:
    """The message for a form that the library does not take."""
    (name,) = (name for name in _KINDS if getattr(structured, name) is not None)
    why = " ".join(problem.split())
    return ValueError(f"{name} cannot be enforced: {why[:_MAX_REASON]}")


def library() -> Any:
    """The module `llguidance`; it is imported when it is first needed.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        raise ValueError(f"structured output: {how_to_install('llm')} ({error})") from error
    return llguidance


def limits_of(guidance: Any) -> LLParserLimits:
    """The part of its time and memory that the library may take for one form."""
    limits: LLParserLimits = guidance.LLParserLimits(verbose_errors=False)
    return limits


def with_deep_stack(function: Callable[[], T]) -> T:
    """Call a function in a thread of its own that has a stack of `STACK` bytes.

    Raises:
        ValueError: the library gave up.
        Exception: what the function raised.
    """
    made: list[T] = []
    failures: list[BaseException] = []

    def call() -> None:
        try:
            made.append(function())
        except BaseException as error:  # noqa: BLE001 - a panic of a library in Rust is no `Exception`
            failures.append(error)

    thread = threading.Thread(target=call, name="dynbus-grammar", daemon=True)
    with _stack_size:
        usual = threading.stack_size(STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if not failures:
        return made[0]
    if isinstance(failures[0], Exception):
        raise failures[0]
    raise ValueError(f"llguidance gave up: {failures[0]}") from failures[0]

"""The process in which grammars are checked: it reads requests and writes answers.

A grammar comes from a request. llguidance reads it in Rust, where a few characters may ask for
hours, for all memory, or for more stack than there is, which ends the process. So it is tried first
in a process that the system ends when it takes too much, with a vocabulary of the 256 bytes.

Each request and each answer is one line of JSON. The process ends when its input does. This file is
run by its path. It imports nothing of dynbus, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import msgspec

if TYPE_CHECKING:
    from llguidance import LLTokenizer

STACK: Final = 256 << 20
"""Bytes of stack for a thread that reads a grammar: the library calls itself for each rule that
leads to another. Only what is used is real."""
MAX_MEMORY: Final = 1 << 30
"""Bytes of address space."""
MAX_MASK_SECONDS: Final = 0.2
"""Of processor time to find out which tokens may come next; as a rule it is below 0.001."""
_STEPS: Final = 8
"""Tokens that are tried."""

_END: Final = 256


class CheckRequest(msgspec.Struct, frozen=True):
    """A grammar as llguidance writes it.

    Attributes:
        seconds: of processor time that it may take.
    """

    grammar: str
    seconds: float


class CheckAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fault of a form; empty for none."""

    problem: str = ""


class _Bytes:
    """The vocabulary of all bytes, as llguidance asks for it."""

    eos_token_id = _END
    bos_token_id = None
    tokens: Sequence[bytes] = [*(bytes([byte]) for byte in range(_END)), b"<end>"]
    special_token_ids: Sequence[int] = [_END]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def byte_tokens() -> LLTokenizer:
    """The tokens that grammars are tried with."""
    import llguidance

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))


def problem_of(grammar: str, tokens: LLTokenizer) -> str:
    """The fault of a grammar; empty for none. Without a limit on its time."""
    import llguidance

    limits = llguidance.LLParserLimits(verbose_errors=False)
    problem = llguidance.LLMatcher.validate_grammar(grammar, None, limits=limits)
    if problem:
        return problem
    matcher = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits)
    for step in range(_STEPS):
        began = time.thread_time()
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return matcher.get_error()
        if time.thread_time() - began > MAX_MASK_SECONDS:
            return "it takes too much processor time for each token"
        possible = [byte for byte in range(_END) if mask[byte // 8] >> byte % 8 & 1]
        if not possible:
            break
        # Not always the same kind of character.
        if not matcher.consume_token(possible[step * 7 % len(possible)]):
            return matcher.get_error()
    return ""


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more."""
    decoder, encoder = msgspec.json.Decoder(CheckRequest), msgspec.json.Encoder()
    tokens = byte_tokens()
    for line in requests:
        request = decoder.decode(line)
        # Its signal ends the process, whatever it is doing.
        signal.setitimer(signal.ITIMER_PROF, request.seconds)
        try:
            problem = problem_of(request.grammar, tokens)
        except Exception as error:  # noqa: BLE001 - whatever it raises is the grammar's failure
            problem = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(encoder.encode(CheckAnswer(problem)) + b"\n")
        answers.flush()


def main() -> None:
    """Serve standard input and output."""
    # The process that it is checked for decides when it ends: Ctrl-C goes to the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with contextlib.suppress(ValueError, OSError):
        # Some systems have no such limit.
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK)
    arguments: tuple[Any, ...] = (sys.stdin.buffer, sys.stdout.buffer)
    thread = threading.Thread(target=serve, args=arguments)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()

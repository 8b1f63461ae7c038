"""Tokenise a long conversation whole and its next turn, in the processes of front ends and in this
one; and in several threads at once.

python -m benchmarks.tokenising [--model smollm2] [--tokens 64000]
"""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import click

from dynbus.llm.models.description import describe
from dynbus.llm.models.source import resolve
from dynbus.llm.text.guarded_tokenizer import GuardedTokenizer
from dynbus.llm.text.tokenizer import Tokenizer

SEED = 1
ROUNDS = 15
WORDS_PER_TURN = 250
_TEXT = (
    "the capital of France is Paris and a stream of tokens moves through every block that was "
    "cached before so the engine computes only what is new in 1234 lines of code() { return x; }"
)


def turns_of(tokenizer: Tokenizer, tokens: int) -> list[str]:
    """A conversation after each of its turns, until it has so many tokens."""
    draw, words = random.Random(SEED), _TEXT.split()
    text, count, found = "", 0, list[str]()
    while count < tokens or len(found) < 3:
        role = ("user", "assistant")[len(found) % 2]
        turn = " ".join(draw.choices(words, k=WORDS_PER_TURN))
        turn = f"<|im_start|>{role}\n{turn}<|im_end|>\n"
        text += turn
        count += len(tokenizer.encode(turn, special=False))
        found.append(text)
    return found


def milliseconds(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f} ms"


def longest_pause(text: str, tokenizer: Tokenizer) -> float:
    """Seconds for which another thread could not run while a text was tokenised."""
    pauses: list[float] = []
    done = threading.Event()

    def watch() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.0005)
            now = time.perf_counter()
            pauses.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    tokenizer.encode(text, special=False)
    done.set()
    watcher.join()
    return max(pauses)


@click.command()
@click.option("--model", default="smollm2", show_default=True)
@click.option("--tokens", default=64_000, show_default=True)
def main(model: str, tokens: int) -> None:
    tokenizer = describe(asyncio.run(resolve(model))).tokenizer
    turns = turns_of(tokenizer, tokens)
    before, after = turns[-3], turns[-1]
    here, whole, next_turn = list[float](), list[float](), list[float]()
    forgets = GuardedTokenizer(tokenizer.to_json(), cache_bytes=0)
    ids = tokenizer.encode(after, special=False)
    for _ in range(ROUNDS):
        remembers = GuardedTokenizer(tokenizer.to_json())
        remembers.encode(before, special=False)
        for one, times in ((tokenizer, here), (forgets, whole), (remembers, next_turn)):
            begun = time.perf_counter()
            found = one.encode(after, special=False)
            times.append(time.perf_counter() - begun)
            assert found == ids
    print(f"{len(ids)} tokens, {len(after)} characters, {len(turns)} turns")
    print(f"by tokenizers, in this process: {milliseconds(here)}")
    print(f"whole: {milliseconds(whole)}; next turn: {milliseconds(next_turn)}")
    for threads in (1, 2, 4):
        with ThreadPoolExecutor(threads) as pool:
            # Each starts its process.
            list(pool.map(lambda _: forgets.encode(after, special=False), range(threads)))
            begun = time.perf_counter()
            list(pool.map(lambda _: forgets.encode(after, special=False), range(8)))
            took = time.perf_counter() - begun
        print(f"8 times whole in {threads} threads: {8 * len(ids) / took / 1e6:.2f} M tokens/s")
    pauses = [longest_pause(after, forgets) for _ in range(ROUNDS)]
    print(f"longest pause of another thread meanwhile: {milliseconds(pauses)}")


if __name__ == "__main__":
    main()

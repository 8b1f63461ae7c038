"""Asks questions about three documents and prints which engine got each, and what it reused.

The first question about a document is computed in full. The others go where the document lies
in a cache, and only the question itself is computed. A call that fails ends the program with one
line that says why, and exit code 1.
"""

import asyncio
import sys
from random import Random

from actors import Engine

from dynbus import DynbusError, Runtime, call_options
from dynbus.kvrouter import KvRouter, open_router
from dynbus.llm import GenerateRequest


def some_tokens(text: str, count: int) -> list[int]:
    """Stands for a tokenizer: equal texts have equal tokens."""
    random = Random(text)
    return [random.randrange(32_000) for _ in range(count)]


async def ask(engine: Engine, router: KvRouter, document: str, number: int) -> None:
    prompt = some_tokens(document, 1600) + some_tokens(f"question {number}", 48)
    request_id = f"{document}-{number}"
    with call_options(request_id=request_id, wait=10.0):
        async for _ in engine.generate(GenerateRequest(prompt, max_tokens=8)):
            pass
    [decision] = router.decisions(request_id)
    print(
        f"{request_id} went to {decision.chosen.instance}: {decision.outcome.reused_tokens} of "
        f"{decision.prompt_tokens} tokens reused, {decision.expected_reuse} expected"
    )


async def main() -> None:
    async with Runtime.connect() as runtime, open_router(runtime, Engine) as router:
        engine = runtime.client(Engine, routing=router)
        for number in range(3):
            # All three at once: each document goes to an engine of its own.
            documents = ("contract", "manual", "novel")
            await asyncio.gather(*(ask(engine, router, each, number) for each in documents))
        print(f"what is known of the caches is {router.awareness()}")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except DynbusError as error:
        sys.exit(f"{error.code}: {error}")

"""GuideLLM, a public load generator, from an environment of its own."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from .model import NAME, words

MAX_TOKENS = 64
PROMPTS = 500
END_SECONDS = 120.0


class Public(NamedTuple):
    """What it found.

    Attributes:
        ttft_ms, itl_ms: medians over the requests.
        tokens: of all answers.
        cpu_seconds: that it used itself, in all its processes, from its start to its end.
    """

    ttft_ms: float
    itl_ms: float
    tokens: int
    cpu_seconds: float


async def ask(
    program: str,
    url: str,
    folder: Path,
    seed: int,
    prompt_tokens: int,
    seconds: float,
    streams: int = 1,
) -> Public:
    """Have it ask a front end for some time.

    Args:
        program: such as `guidellm-env/bin/guidellm`.
        folder: with the model's files, whose tokenizer counts the tokens.
        seed: of its prompts; those of another seed are not in a cache.

    Raises:
        RuntimeError: it failed.
    """
    with tempfile.TemporaryDirectory() as place:
        data, found = Path(place) / "prompts.jsonl", Path(place) / "found.json"
        data.write_text(
            "".join(
                json.dumps(
                    {
                        "prompt": words(prompt_tokens, seed + number),
                        "output_tokens_count": MAX_TOKENS,
                    }
                )
                + "\n"
                for number in range(PROMPTS)
            )
        )
        kind = ["synchronous"] if streams == 1 else ["concurrent", "--rate", str(streams)]
        before = _cpu_of_children()
        process = await asyncio.create_subprocess_exec(
            program,
            *("benchmark", "run", "--target", url, "--model", NAME, "--data", str(data)),
            *("--processor", str(folder), "--rate-type", *kind, "--max-seconds", str(seconds)),
            *("--disable-console-outputs", "--disable-progress", "--output-path", str(found)),
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=place,
        )
        try:
            async with asyncio.timeout(seconds + END_SECONDS):
                output, _ = await process.communicate()
        except BaseException:
            process.kill()
            raise
        if process.returncode or not found.exists():
            raise RuntimeError(f"guidellm failed: {output.decode(errors='replace')[-2000:]}")
        metrics: Any = json.loads(found.read_text())["benchmarks"][0]["metrics"]
    return Public(
        metrics["time_to_first_token_ms"]["successful"]["median"],
        metrics["inter_token_latency_ms"]["successful"]["median"],
        round(metrics["output_token_count"]["successful"]["total_sum"]),
        _cpu_of_children() - before,
    )


def _cpu_of_children() -> float:
    """Seconds on a core of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

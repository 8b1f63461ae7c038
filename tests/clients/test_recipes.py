"""The recipes of `docs/guides/clients.md`, run as they are printed by the packages that they name.

At every push those of the packages that the tests have anyway; nightly, or by
`scripts/test-clients`, all.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conditions import wait_until

from dynbus.bus.nats.server_process import free_port

from .conftest import answers
from .engine import ANSWER
from .page import RECIPES
from .programs import HERE, VARIABLES, command_of_clients, node, output_of

SAID = {
    "openai": ANSWER,
    "openai-responses": "completed",
    "openai-embeddings": "the same vector",
    "openai-rerank": "a cat",
    "openai-errors": "there is no model 'none'",
    "anthropic": ANSWER,
    "langchain": "14 degrees in Paris",
    "litellm": "best: 1",
    "pydantic-ai": "is_capital=True",
    "instructor": "is_capital=True",
    "openai-js": "2 vectors",
    "ai-sdk": "isCapital: true",
}
"""Words of what each recipe prints."""
AT_PUSH = [name for name in SAID if name == "anthropic" or name.startswith("openai")]
AT_PUSH.remove("openai-js")

PROXY_START = 240.0
"""Seconds that LiteLLM's proxy may take to start: it imports for 15 s where nothing else runs."""

ONE_AFTER_ANOTHER = """
import runpy, sys

for path in sys.argv[1:]:
    runpy.run_path(path, run_name="__main__")
    print("\\n== end of", path)
"""


def written(name: str, url: str, folder: Path) -> Path:
    """The file of a recipe for a front end at another address."""
    suffix = "py" if RECIPES[name].language == "python" else "mjs"
    path = folder / f"{name.replace('-', '_')}_recipe.{suffix}"
    path.write_text(RECIPES[name].at(url))
    return path


def run(name: str, url: str, folder: Path) -> str:
    """The output of a recipe, in the environment with its packages."""
    if RECIPES[name].language == "python":
        return output_of([command_of_clients("python"), written(name, url, folder)], folder)
    # Node looks for packages from the folder of the file upwards.
    command = node()
    beside = HERE / "node_modules" / ".recipes"
    beside.mkdir(exist_ok=True)
    return output_of([command, written(name, url, beside)], folder)


def test_recipes_run_as_printed_with_the_packages_that_are_here_anyway(
    front: str, tmp_path: Path
) -> None:
    files = [written(name, front, tmp_path) for name in AT_PUSH]

    printed = output_of([sys.executable, "-c", ONE_AFTER_ANOTHER, *files], tmp_path)

    parts = printed.split("\n== end of")[:-1]
    assert [name for name, part in zip(AT_PUSH, parts, strict=True) if SAID[name] not in part] == []


def test_each_recipe_of_the_page_is_run() -> None:
    assert set(SAID) == {name for name, one in RECIPES.items() if one.language != "yaml"}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SAID)
def test_a_recipe_runs_as_printed(name: str, front: str, tmp_path: Path) -> None:
    assert SAID[name] in run(name, front, tmp_path)


@pytest.fixture(scope="module")
def proxy(front: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of LiteLLM's proxy, as the page configures it."""
    command = command_of_clients("litellm")
    folder = tmp_path_factory.mktemp("litellm")
    (folder / "litellm.yaml").write_text(RECIPES["litellm-proxy"].at(front))
    port = free_port()
    arguments = ["--config", "litellm.yaml", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [command, *arguments], cwd=folder, env=VARIABLES, stdout=log, stderr=log
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(
            lambda: answers(f"{url}/health/liveliness") or process.poll() is not None, PROXY_START
        )
        assert process.poll() is None, (folder / "log").read_text()
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.mark.nightly
@pytest.mark.timeout(2 * PROXY_START)
@pytest.mark.parametrize(
    "name", ["openai", "openai-responses", "anthropic", "langchain", "openai-js", "ai-sdk"]
)
def test_a_recipe_runs_as_printed_through_litellms_proxy(
    name: str, proxy: str, tmp_path: Path
) -> None:
    assert SAID[name] in run(name, proxy, tmp_path)


@pytest.mark.nightly
def test_token_ids_of_tiktoken_are_read_as_the_models_own(front: str, tmp_path: Path) -> None:
    """LangChain makes them unless told otherwise. The encoding here is one of bytes, since that of
    OpenAI is downloaded."""
    program = tmp_path / "program.py"
    program.write_text(
        "import tiktoken\n"
        "from langchain_openai import OpenAIEmbeddings\n"
        "from openai import OpenAI\n"
        "ranks = {bytes([number]): number for number in range(256)}\n"
        "of_bytes = tiktoken.Encoding('of_bytes', pat_str='.', mergeable_ranks=ranks,\n"
        "                             special_tokens={})\n"
        "tiktoken.get_encoding = tiktoken.encoding_for_model = lambda _: of_bytes\n"
        f"at = dict(base_url='{front}/v1', api_key='sk-ada-1234')\n"
        "made = OpenAIEmbeddings(model='qwen3', **at).embed_query('cat')\n"
        "ids = OpenAI(**at).embeddings.create(model='qwen3', input=[[99, 97, 116]])\n"
        "print([round(x, 4) for x in made] == [round(x, 4) for x in ids.data[0].embedding])\n"
    )

    assert output_of([command_of_clients("python"), program], tmp_path) == "True\n"

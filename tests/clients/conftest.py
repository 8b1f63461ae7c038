"""A front end with one key, in a process of its own, before the engine of these tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from tests.scenarios.project import project_folder

from dynbus.bus.nats.server_process import free_port

from . import engine
from .programs import KEY


def answers(url: str) -> bool:
    """True if a GET is answered well."""
    try:
        with urlopen(url, timeout=10) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


@pytest.fixture(scope="session")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the front end."""
    path = tmp_path_factory.mktemp("front")
    engine.write_model(path / "model")
    shutil.copy(engine.__file__, path)
    (path / "keys.txt").write_text(f"ada {KEY}\n")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with project_folder(path) as project:
        engine_at = f"--Engine.folder={path / 'model'}"
        front_at = (f"--Front.port={port}", "--Front.api_keys=keys.txt")
        project.start("engine.py", "--in-process", engine_at, *front_at)
        project.wait_for(lambda: answers(f"{url}/ready"))
        yield url

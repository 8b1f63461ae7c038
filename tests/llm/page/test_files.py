"""The page's files are in the package, ask no other host, and let no text become markup."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dynbus.llm.page.files import HEADERS, PATHS, page_file

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("path", PATHS)
def test_a_file_has_its_type(path: str) -> None:
    file = page_file(path)

    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg"}
    assert file.body
    assert file.content_type.startswith(kinds[PATHS[path].rpartition(".")[2]])


def test_what_is_no_file_of_the_page_is_not_read() -> None:
    for path in ("/page/state.py", "/page/../files.py", "page.js", "/page/static/page.js"):
        with pytest.raises(KeyError):
            page_file(path)


@pytest.mark.parametrize("path", PATHS)
def test_no_file_names_another_host(path: str) -> None:
    text = page_file(path).body.decode()

    # The name of a namespace of XML is no request.
    assert set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text)) <= {
        "http://www.w3.org/2000/svg"
    }


def test_markup_has_no_script_and_no_style_of_its_own() -> None:
    markup = page_file("/").body.decode()

    assert re.findall(r"<script(?![^>]* src=)|<style|\bstyle=|\bon\w+=|javascript:", markup) == []
    named = re.findall(r'(?:src|href)="([^"]*)"', markup)
    assert {f"/{name}" for name in named} == PATHS.keys() - {"/"}


def test_the_script_makes_no_markup_of_text() -> None:
    script = page_file("/page/page.js").body.decode()

    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function"
    assert re.findall(forbidden, script) == []


def test_the_policy_allows_nothing_but_the_page_itself() -> None:
    policy = HEADERS["Content-Security-Policy"]

    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert set(re.findall(r"(?:script|style|img|connect)-src ([^;]*)", policy)) == {"'self'"}


def test_the_wheel_has_the_files(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("*.whl")

    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    assert {f"dynbus/llm/page/static/{name}" for name in PATHS.values()} <= names

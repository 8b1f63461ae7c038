"""The page in a browser: it streams, cancels, shows text as text, and fits a phone.

Needs Chromium and its driver, such as Debian's `chromium` and `chromium-driver`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio.to_thread
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from tests.browser import HOSTILE, Page, driver, needs_browser, phone
from tests.conditions import eventually
from tests.llm.http.served import CARDS, Served, served
from tests.llm.text.tiny_tokenizer import tiny_tokenizer

__all__ = ["driver"]

pytestmark = [
    pytest.mark.anyio,
    needs_browser,
]

T = TypeVar("T")


class Chat(Page):
    """The page of a front end."""

    def ask(self, question: str) -> None:
        self.until(lambda: self.driver.find_element(By.ID, "send").is_enabled())
        box = self.driver.find_element(By.ID, "question")
        box.send_keys(question)
        self.driver.find_element(By.ID, "send").click()


async def in_browser(
    driver: webdriver.Chrome, story: Callable[[Chat], T], **settings: Any
) -> tuple[T, Served]:
    """What a story in the browser comes to, with a front end before a scripted engine."""
    async with served({"tiny": CARDS["tiny"]}, **settings) as front:

        def told() -> T:
            return story(Chat(driver, front.url))

        found = await anyio.to_thread.run_sync(told)
        await eventually(lambda: not front.engine.running)
        return found, front


async def test_a_chat_is_streamed_and_remembered(driver: webdriver.Chrome) -> None:
    def story(page: Chat) -> list[str]:
        page.ask("say Paris it is.")
        page.until(lambda: page.text(".assistant .text") == "Paris it is.")
        page.until(lambda: page.all(".assistant .facts"))
        page.ask("And the river?")
        page.until(lambda: len(page.all(".assistant .facts")) == 2)
        return page.complaints()

    complaints, front = await in_browser(driver, story)

    assert complaints == []
    first, second = front.engine.requests
    assert first.stream
    assert second.stream
    asked = tiny_tokenizer().decode(second.token_ids)
    assert "say Paris it is." in asked
    assert "assistant\nParis it is." in asked
    assert "And the river?" in asked


async def test_stop_cancels_the_answer_in_its_engine(driver: webdriver.Chrome) -> None:
    def story(page: Chat) -> str:
        page.ask("endless a")
        page.until(lambda: len(page.text(".assistant .text")) > 3)
        driver.find_element(By.ID, "stop").click()
        page.until(lambda: "stopped" in page.text(".assistant .facts"))
        return page.text(".assistant .text")

    text, _ = await in_browser(driver, story)

    # `in_browser` waits until no engine works for it any longer.
    assert set(text) == {"a"}


async def test_hostile_text_of_a_model_is_shown_as_text(driver: webdriver.Chrome) -> None:
    def story(page: Chat) -> tuple[str, int, str]:
        page.ask(f"say {HOSTILE}")
        page.until(lambda: page.text(".assistant .text") == HOSTILE)
        page.until(lambda: page.all(".assistant .facts"))
        markup = page.run("return document.querySelectorAll('#messages img, script').length")
        return page.text(".assistant .text"), markup, driver.title

    (text, markup, title), _ = await in_browser(driver, story)

    assert text == HOSTILE
    # The page's own script alone.
    assert markup == 1
    assert title == "dynbus"


async def test_blocks_that_move_and_those_in_quarantine_are_shown(
    driver: webdriver.Chrome,
) -> None:
    moved = {
        "prompts_handed_over": 12,
        "prompts_fell_back": 1,
        "prompts_local": 0,
        "prompts_for_others": 0,
        "transferred_bytes": 3e9,
        "transfer_seconds": 0.5,
        "blocks_quarantined": 7,
    }
    idle: dict[str, Any] = {"running": 0, "waiting": 0, "models": [], "status": {}}
    state: dict[str, Any] = {
        "models": [],
        "hit_rate": None,
        "routing": [],
        "instances": [
            {**idle, "id": "a", "component": "llm.decode", "transfers": moved},
            {**idle, "id": "b", "component": "llm.prefill", "role": "prefill"},
        ],
    }

    def story(page: Chat) -> list[str]:
        shown = f"show({json.dumps(state)});"
        told = page.run(f"{shown} return ['transfers', 'instances'].map((id) => $(id).innerText);")
        return cast("list[str]", told)

    (figure, instances), _ = await in_browser(driver, story)

    assert "6 GB/s" in figure
    assert "3 GB of KV blocks read, 7 blocks in quarantine" in figure
    assert "12 prompts handed over, 1 fell back" in instances
    assert "prefill, 0 running" in instances


async def test_a_failure_is_told_where_the_answer_would_be(driver: webdriver.Chrome) -> None:
    def story(page: Chat) -> str:
        page.ask("refuse me")
        return page.until(lambda: page.text(".assistant .failure"))

    failure, _ = await in_browser(driver, story)

    assert "this prompt is refused" in failure


async def test_a_phone_shows_everything_without_scrolling_sideways(
    driver: webdriver.Chrome,
) -> None:
    def story(page: Chat) -> list[int]:
        page.ask("say " + "long" * 60)
        page.until(lambda: page.all(".assistant .facts"))
        widths: list[int] = []
        for view in ("chat", "fleet", "requests"):
            driver.find_element(By.CSS_SELECTOR, f"[data-show={view}]").click()
            widths.append(page.run("return document.documentElement.scrollWidth"))
            assert page.run(f"return document.getElementById('{view}').offsetWidth") > 300
        return widths

    with phone(driver):
        widths, _ = await in_browser(driver, story)

    assert widths == [390, 390, 390]


async def test_where_there_are_keys_the_page_asks_for_one(
    driver: webdriver.Chrome, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada a-long-and-secret-key-of-ada\n")

    async with served({"tiny": CARDS["tiny"]}, api_keys=keys) as front:
        # As a browser does with what its user has typed.
        url = front.url.replace("://", "://x:a-long-and-secret-key-of-ada@")

        def story() -> str:
            page = Chat(driver, url)
            page.ask("say Welcome.")
            page.until(lambda: page.text(".assistant .text") == "Welcome.")
            return page.text("#instances")

        instances = await anyio.to_thread.run_sync(story)

    assert instances

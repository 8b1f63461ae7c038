"""The dashboard in a browser, at 1280 pixels and on a phone.

Needs Chromium and its driver, such as Debian's `chromium` and `chromium-driver`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import anyio.to_thread
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from tests.browser import HOSTILE, Page, driver, needs_browser, phone

from dynbus.actors.dashboard.pages import DashboardServer

from .happened import answered, at, moved_request, view_of
from .test_pages import Shown

__all__ = ["driver"]

pytestmark = [pytest.mark.anyio, needs_browser]

T = TypeVar("T")


async def in_browser(driver: webdriver.Chrome, story: Callable[[Page], T]) -> T:
    """The outcome of a story with the page of a flight, of which a part is hostile."""
    happened = [
        *moved_request(),
        answered(101.2, HOSTILE, model=HOSTILE, status=500, error=HOSTILE, instances=HOSTILE),
        at(101.0, "instance.ready", who=f"llm.Engine@{HOSTILE}", **{HOSTILE: HOSTILE}),
        at(101.5, "process.ended", who=HOSTILE, code=-9),
    ]
    async with DashboardServer(Shown(view_of(happened)), 0, {}) as server:

        def told() -> T:
            page = Page(driver, server.page_url)
            page.until(lambda: page.all("#requests button"))
            return story(page)

        return await anyio.to_thread.run_sync(told)


def open_request(page: Page, request: str) -> None:
    page.until(lambda: page.all("#wanted"))[0].send_keys(request + Keys.ENTER)
    page.until(lambda: page.all("dialog[open] .gantt-row"))


async def test_a_request_is_searched_for_and_its_picture_shown(driver: webdriver.Chrome) -> None:
    def story(page: Page) -> tuple[str, list[str], int, list[str]]:
        open_request(page, "r")
        rows = [row.text for row in page.all(".gantt-row .label")]
        bars = len(page.all(".gantt-row .bar"))
        marks = page.text(".marks")
        page.driver.find_element(By.TAG_NAME, "body").send_keys(Keys.ESCAPE)
        page.until(lambda: not page.all("dialog[open]"))
        return marks, rows, bars, page.complaints()

    marks, rows, bars, complaints = await in_browser(driver, story)

    assert complaints == []
    assert len(rows) == 3
    assert "attempt 1 at llm.Engine a" in rows[1]
    assert "Draining" in rows[1]
    # Of the front end four, of the first attempt three, and of the second one, which did not wait.
    assert bars == 4 + 3 + 2
    assert "moved after attempt 1 at a: Draining" in marks


async def test_arrows_and_the_pointer_say_what_was_at_a_moment(driver: webdriver.Chrome) -> None:
    def story(page: Page) -> tuple[str, str, str]:
        whole = page.text("#cursor")
        lanes = page.driver.find_element(By.ID, "lanes")
        lanes.send_keys(Keys.END)
        moment = page.text("#cursor")
        lanes.send_keys(Keys.HOME, Keys.ENTER)
        page.until(lambda: page.all("#ranges button[aria-label]"))
        lanes.send_keys(Keys.ESCAPE)
        page.until(lambda: not page.all("#ranges button[aria-label]"))
        return whole, moment, page.text("#figures")

    whole, moment, figures = await in_browser(driver, story)

    assert whole.startswith("All of ")
    assert "process.ended" in moment
    assert "tried again 0, moved 1" in page_text(figures)


def page_text(text: str) -> str:
    return " ".join(text.split())


async def test_hostile_names_stay_text(driver: webdriver.Chrome) -> None:
    def story(page: Page) -> tuple[str, int, str, str, list[str]]:
        events, instances = page.text("#events"), page.text("#instances")
        page.driver.find_element(By.CSS_SELECTOR, "[data-order=failed]").click()
        page.until(lambda: len(page.all("#requests button")) == 2)
        open_request(page, HOSTILE)
        # The page's own scripts, which are in its head, and its picture.
        markup = page.run("return document.querySelectorAll('body script, main img').length")
        return events, markup, page.driver.title, instances, page.complaints()

    events, markup, title, instances, complaints = await in_browser(driver, story)

    assert HOSTILE in events
    assert HOSTILE in instances
    assert (markup, title, complaints) == (0, "dynbus dashboard", [])


@pytest.mark.parametrize("is_phone", [False, True])
async def test_nothing_has_to_be_scrolled_sideways(
    driver: webdriver.Chrome, is_phone: bool
) -> None:
    def story(page: Page) -> list[int]:
        widths = [page.run("return document.documentElement.scrollWidth")]
        assert page.run("return document.querySelector('.lane').offsetWidth") > 300
        open_request(page, "r")
        widths.append(page.run("return document.documentElement.scrollWidth"))
        widths.append(page.run("const l = document.getElementById('life'); return l.scrollWidth"))
        return widths

    if is_phone:
        with phone(driver):
            widths = await in_browser(driver, story)
    else:
        cast("Any", driver).set_window_size(1280, 900)
        widths = await in_browser(driver, story)

    assert max(widths) <= (390 if is_phone else 1280)


async def test_settings_that_are_none_are_refused_on_the_page(driver: webdriver.Chrome) -> None:
    def story(page: Page) -> str:
        page.until(lambda: page.driver.find_element(By.ID, "setting").is_displayed())
        page.driver.find_element(By.ID, "setting").send_keys("polcy=dynamo" + Keys.ENTER)
        return page.until(lambda: page.text("#compare-state.bad"))

    assert "did you mean policy?" in await in_browser(driver, story)

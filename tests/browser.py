"""A browser as tests have it: Chromium without a screen, whose waits are bounded.

Needs Chromium and its driver, such as Debian's `chromium` and `chromium-driver`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
DRIVER = shutil.which("chromedriver") or ""

needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="needs a browser: install Debian's packages chromium and chromium-driver",
)

BOUND = 60.0
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"

T = TypeVar("T")


class Page:
    """A page in a browser. Its methods wait, each for a bounded time."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        # The page before this one asks a server that is gone; what it says is not ours.
        driver.get("about:blank")
        self.complaints()
        driver.get(url)

    def until(self, condition: Callable[[], T]) -> T:
        return WebDriverWait(self.driver, BOUND, 0.05).until(lambda _: condition())

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        found = self.all(selector)
        return found[-1].text if found else ""

    def run(self, script: str) -> Any:
        return cast("Any", self.driver).execute_script(script)

    def complaints(self) -> list[str]:
        """What the browser's console has: refusals of the policy, and errors of the script."""
        return [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    folder: Path = tmp_path_factory.mktemp("chromium")
    for argument in (
        "--headless=new",
        # Tests run as root in containers; all that is opened is the page itself.
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--window-size=1200,800",
        f"--user-data-dir={folder}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@contextmanager
def phone(driver: webdriver.Chrome) -> Generator[None]:
    """Have the browser be that of a phone, 390 pixels wide."""
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    emulation = cast("Any", driver)  # whose commands have no types
    emulation.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        yield
    finally:
        emulation.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

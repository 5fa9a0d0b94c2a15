"""report.html in a real browser: drawn, silent, and no wider than the screen."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from small_runs import small

from fedspa.running import run as simulate

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no browser was asked")
    with api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        found = next(filter(None, map(shutil.which, BROWSERS)), own if os.path.exists(own) else None)
        if found is None:
            pytest.skip("there is no Chromium here: report.html was not opened")
        root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        opened = playwright.chromium.launch(executable_path=found, args=root)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "run"
    simulate(small(path, privacy={"noise_multiplier": 2.0}))
    return path


class Opened:
    """A page, and all that it said or asked for."""

    def __init__(self, browser: Browser, path: Path, **context: Any) -> None:
        self._context = browser.new_context(**context)
        self.page: Page = self._context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self._context.close()


def test_it_opens_in_silence_and_is_drawn(browser: Browser, folder: Path) -> None:
    with Opened(browser, folder / "report.html") as opened:
        page = opened.page
        assert opened.said == []
        assert opened.asked == [(folder / "report.html").as_uri()]
        assert page.locator(".grid .plot").count() == 3
        drawn = page.locator('.curve path:not([d=""])').all()  # one may lie off the scale, and says so
        assert len(drawn) >= 3
        for curve in drawn:
            assert curve.evaluate("(path) => path.getTotalLength()") > 100
        assert page.locator(".curve .best").count() == 1
        assert page.locator(".bar").count() == 6
        assert page.locator(".warnings").bounding_box()["y"] < page.locator(".cards").bounding_box()["y"]  # type: ignore[index]
        assert "not private" in page.locator(".warnings").inner_text()


@pytest.mark.parametrize("width", [360, 768, 1400])
def test_no_width_makes_the_page_scroll_sideways(browser: Browser, folder: Path, width: int) -> None:
    with Opened(browser, folder / "report.html", viewport={"width": width, "height": 800}) as opened:
        opened.page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_page_itself_forbids_requests_and_scripts(browser: Browser, folder: Path) -> None:
    """Should anything ever slip through the escaping, the page's own policy stops it."""
    with Opened(browser, folder / "report.html") as opened:
        opened.page.evaluate(
            "document.body.insertAdjacentHTML('beforeend', '<img src=\"http://127.0.0.1:9/x\" onerror=\"alert(1)\">')"
        )
        opened.page.wait_for_timeout(200)
        refused = [line for line in opened.said if "Content Security Policy" in line]
        assert any("127.0.0.1:9" in line for line in refused)
        assert any("inline event handler" in line for line in refused)
        assert not any(line == "1" for line in opened.said)

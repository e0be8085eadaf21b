"""A real browser, real brokers, and a shop's messages in them.

Two brokers serve the whole folder: `shop` is open to everybody on this machine, `guarded` wants to
know who calls. Both are processes of their own. Without a browser all tests are skipped.

Tests use playwright's blocking API. While it is up, a loop counts as running in this thread, and
`asyncio.run` would fail: so each module has a browser of its own, and none is left for the tests of
other folders.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.servers.broker import BrokerProcess
from tests.support.dashboard import SHOP_SETTINGS, Site, running_shop, set_up_rights
from tests.support.security import auth_settings

_BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
_PATIENCE_MS = 60_000


@pytest.fixture(scope="session")
def playwright_api() -> Any:
    """Playwright's blocking API, where there is a browser for it."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if _BROWSER is None:
        pytest.skip("needs chromium, and there is none on this machine")
    return api


@pytest.fixture(scope="module")
def browser(playwright_api: Any) -> Iterator[Any]:
    # Its sandbox does not work for root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=_BROWSER, args=[*arguments, "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens tabs; what they complain about fails the test."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def open_page(site: Site, route: str = "#/", **options: Any) -> Any:
        options.setdefault("viewport", {"width": 1280, "height": 900})
        options.setdefault("reduced_motion", "reduce")
        context = browser.new_context(locale="en-GB", timezone_id="UTC", **options)
        contexts.append(context)
        context.set_default_timeout(_PATIENCE_MS)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: _note(message, complaints))
        page.goto(f"{site.url}/{route}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints, complaints


def _note(message: Any, complaints: list[str]) -> None:
    # The browser itself writes down calls that were refused, and brokers that are away.
    if message.type == "error" and "Failed to load resource" not in message.text:
        complaints.append(message.text)


@pytest.fixture(scope="package")
def shop(playwright_api: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A broker with the topics of a shop; see `shop.py`."""
    directory = tmp_path_factory.mktemp("shop")
    with (
        BrokerProcess(directory, settings=SHOP_SETTINGS) as broker,
        running_shop(broker.address),
    ):
        yield Site(broker)


@pytest.fixture(scope="package")
def guarded(playwright_api: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A broker that wants to know who calls; see `set_up_rights`."""
    directory = tmp_path_factory.mktemp("guarded")
    settings = {"broker": {"auth": auth_settings(directory)}}
    with BrokerProcess(directory, settings=settings) as broker:
        set_up_rights(broker.address)
        yield Site(broker)


@pytest.fixture
def empty(playwright_api: Any, tmp_path: Any) -> Iterator[Site]:
    """A broker of one test's own, with nothing in it."""
    with BrokerProcess(tmp_path) as broker:
        yield Site(broker)

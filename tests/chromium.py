"""A headless Chromium, where this machine has one and Playwright to drive it."""

from __future__ import annotations

import shutil
from contextlib import contextmanager

import pytest

# As root there is no sandbox; the rest keeps it from asking the network for anything.
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


@contextmanager
def chromium():
    """The browser; skips a test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("there is no Chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=_ARGUMENTS)
        yield browser
        browser.close()

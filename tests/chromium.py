"""A headless Chromium, where this machine has one and Playwright to drive it."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from beamwright_lab.serve import browser


@contextmanager
def chromium():
    """The browser; skips a test where there is none."""
    pytest.importorskip("playwright.sync_api")
    if browser.chromium_path() is None:
        pytest.skip("there is no Chromium")
    with browser.chromium() as found:
        yield found

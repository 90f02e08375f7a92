"""Run a headless Chromium by Playwright, and serve an application for it to show."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

# Chromium's sandbox does not work as root; most other options avoid network requests.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


def chromium_path() -> str | None:
    """Path of the installed browser; None if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a headless browser; Playwright uses the installed one and downloads nothing."""
    from playwright.sync_api import sync_playwright

    path = chromium_path()
    if path is None:
        raise SystemExit("no Chromium found: install one (Debian: apt-get install chromium)")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def serve_app(app: FastAPI) -> Iterator[str]:
    """Serve the application on a free local port; yield its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()

"""Chromium, for tests and measurements of pages: the system's, or else Playwright's own."""

import shutil

from playwright.sync_api import Browser, Playwright

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def launch(playwright: Playwright) -> Browser:
    return playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

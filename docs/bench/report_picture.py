"""The picture of README.md, from the committed rounds: `python -m docs.bench.report_picture`.

It writes reports/report.html, and takes its first screen in Chromium.
"""

from pathlib import Path

from flows.core.locks import current_locks
from flows.report import page, round_files
from tests.browser import open_page

PICTURE = Path("docs/ui-report.png")
WIDTH, HEIGHT, SECONDS = 1200, 620, 1.0


def main() -> None:
    locks = current_locks()
    report = page.write(round_files.known_rounds(locks), locks)
    with open_page() as shown:
        if shown is None:
            raise SystemExit("no Chromium: see tests/browser.py")
        shown.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        shown.goto(report.absolute().as_uri())
        shown.wait_for_timeout(SECONDS * 1000)
        shown.screenshot(path=PICTURE)


if __name__ == "__main__":
    main()

"""The table of what was tried, at the end of a run in one process."""

from typing import Any

from tests.faults.harness import COUNTS, table


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if COUNTS:
        terminalreporter.section("bad input")
        for line in table(COUNTS):
            terminalreporter.write_line(line)

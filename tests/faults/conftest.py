"""The lab that all faults of a session share, and the table of what was tried."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import lab as laboratory
from tests.faults.harness import COUNTS, table
from tests.faults.lab import Lab, Trial
from tests.faults.scale import FULL

LAST = None if FULL else "gate_sft@r0"
Report = Callable[[str, list[Trial]], None]


@pytest.fixture(scope="session")
def lab(built_once: Callable[..., Path]) -> Iterator[Lab]:
    """All stages up to LAST have run in it once, in a session."""

    def build(folder: Path) -> None:
        with laboratory.server(folder) as made:
            laboratory.build(made, LAST)

    with laboratory.server(built_once("lab", build)) as made:
        yield made


@pytest.fixture
def report(record_property: Callable[[str, Any], None]) -> Report:
    """A function that counts trials for the table, and fails if one of them is not as it should
    be.
    """

    def count(fault: str, trials: list[Trial], declared: tuple[str, ...] = ("identical",)) -> None:
        record_property("trials", [fault, dict(Counter(trial.kind for trial in trials))])
        failures = [str(trial) for trial in trials if trial.kind not in declared]
        assert not failures, f"{len(failures)} of {len(trials)}\n" + "\n\n".join(failures[:5])

    return count


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if COUNTS:
        terminalreporter.section("bad input")
        for line in table(COUNTS):
            terminalreporter.write_line(line)

"""The lab that all faults of a session share, and the table of what was tried."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults import lab as laboratory
from tests.faults.damage import Outcome
from tests.faults.harness import COUNTS
from tests.faults.lab import Ended, Lab, Trial, copy, rondo
from tests.faults.scale import FULL
from tests.faults.servers import WAITING_RUN, MlflowServer, mlflow_server, start
from tests.flows.conftest import make_project

RUN = ("run", "--rounds", "1", "--set", "sft.max_steps=9")
LAST = None if FULL else "gate_sft@r0"

Report = Callable[..., None]


@pytest.fixture(scope="session")
def lab(built_once: Callable[..., Path]) -> Iterator[Lab]:
    """All stages up to LAST have run in it once, in a session."""

    def build(folder: Path) -> None:
        with laboratory.server(folder) as made:
            laboratory.build(made, LAST)

    with laboratory.server(built_once("lab", build)) as made:
        yield made


@pytest.fixture(scope="session")
def finished(built_once: Callable[..., Path], copy_tables: Callable[[Path], None]) -> Path:
    """The folders `before` and `after`, of a project without and with a finished run."""

    def build(folder: Path) -> None:
        check_ended(rondo(before_and_after(folder, copy_tables), RUN))

    return built_once("finished_runs", build)


@pytest.fixture(scope="session")
def undisturbed(built_once: Callable[..., Path], copy_tables: Callable[[Path], None]) -> Path:
    """As `finished`, of a run that waits for the file `go`."""

    def build(folder: Path) -> None:
        project = before_and_after(folder, copy_tables)
        (project / "go").touch()
        check_ended(start(project, *WAITING_RUN, MLFLOW_TRACKING_URI="off").ended())

    return built_once("undisturbed_runs", build)


@pytest.fixture
def server(tmp_path: Path, empty_tables: Path) -> Iterator[MlflowServer]:
    """MLflow's server, not started yet."""
    folder = tmp_path / "mlflow"
    folder.mkdir()
    with mlflow_server(folder, empty_tables) as made:
        yield made


def before_and_after(folder: Path, copy_tables: Callable[[Path], None]) -> Path:
    """Make both folders; returns `after`, in which nothing has run yet."""
    (folder / "before").mkdir()
    copy_tables(make_project(folder / "before"))
    return copy(folder / "before", folder / "after")


def check_ended(ended: Ended) -> None:
    assert ended.code == 0, ended.output


Record = Callable[[str, Any], None]


@pytest.fixture
def report(record_property: Record) -> Report:
    """A function that counts trials for the table, and fails if one of them is not as it should
    be.
    """

    def count(
        fault: str, trials: Sequence[Trial | Outcome], declared: tuple[str, ...] = ("identical",)
    ) -> None:
        title = "damage" if isinstance(trials[0], Outcome) else "faults"
        record_property(title, [fault, dict(Counter(trial.kind for trial in trials))])
        failures = [str(trial) for trial in trials if trial.kind not in declared]
        assert not failures, f"{len(failures)} of {len(trials)}\n" + "\n\n".join(failures[:5])

    return count


@pytest.fixture(autouse=True)
def counted_inputs(record_property: Record) -> Iterator[None]:
    """The bad inputs of a test, for the table."""
    COUNTS.clear()
    yield
    for kind, counts in COUNTS.items():
        record_property("bad input", [kind, dict(counts)])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what was tried, by what came of it; the reports come from all workers."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    for title, outcomes in (
        ("faults", ("identical", "again", "stopped", "different", "missed")),
        ("bad input", ("accepted", "refused")),
        ("damage", ("restored", "refused", "unread", "stopped", "different")),
    ):
        rows: dict[str, Counter[str]] = {}
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == title and report.when == "teardown":
                    rows.setdefault(value[0], Counter()).update(value[1])
        if rows:
            terminalreporter.section(title)
            terminalreporter.write_line("| | tried | " + " | ".join(outcomes) + " |")
            for kind, counts in sorted(rows.items()):
                numbers = [counts.total(), *(counts[outcome] for outcome in outcomes)]
                terminalreporter.write_line(f"| {kind} | {' | '.join(map(str, numbers))} |")
            total = sum((counts.total() for counts in rows.values()), 0)
            terminalreporter.write_line(f"| all | {total} |")

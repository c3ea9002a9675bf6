"""All runs of a project, newest first: for the page /rondo/runs and the end of `rondo status`. And
the addresses of a run's pages.
"""

import base64
import json
import os
import time
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.core.addresses import split_address
from flows.core.config import KEEP
from flows.core.run_locks import is_alive
from flows.core.services import (
    TEMPORARY,
    WORKFLOW,
    experiment_page,
    flow_run_page,
    last_servers,
    mlflow_pages,
    running_prefect,
)
from flows.core.tables import filled, interval
from flows.execution.worktree import project_home
from flows.report.run_record import RoundResults, RunRecord, State, folder_of, read, read_all
from stages.lib.core.files import stage_dir
from stages.lib.core.html import render_page
from stages.lib.core.rows import StepRow, read_rows

RUNS_PATH, REPORT_PATH = "/rondo/runs", "/rondo/report"
REPORT_NAME = "report.html"
GATES = {"sft": "SFT", "reward": "reward model", "promote": "policy"}
NOT_REACHED = "not reached"
MARKS = {  # how a gate ended -> CSS class and sign
    "passed": ("good", "✓"),
    "approved": ("warn", "!"),
    "warned": ("warn", "!"),
    "failed": ("bad", "✗"),
    "refused": ("bad", "✗"),
}
UNDECIDED = (State.waiting, State.interrupted)
STATE_CLASSES = {state: "bad" for state in State} | {
    State.completed: "good",
    State.running: "live",
    State.waiting: "warn",
    State.cancelled: "soft",
}
TEXT_RUNS, TEXT_WIDTH = 10, 78  # runs and columns in the terminal
SHOWN_CHANGES = 6
REQUEST_SECONDS = 5.0


@dataclass(frozen=True)
class Addresses:
    """Of a run's pages; None if there is no such page.

    runs, report: served by `rondo up` of this project. prefect: the flow run. mlflow: the run.
    experiment: all runs in MLflow.
    """

    runs: str | None
    report: str | None
    prefect: str
    mlflow: str | None
    experiment: str | None


def addresses(home: Path, record: RunRecord) -> Addresses:
    """They lead to the servers of the last `rondo up`, running or not, or to those of the team.

    Args:
        home: The .rondo folder of the project.
    """
    own, mlflow = last_servers(home).prefect, mlflow_pages(home) if record.mlflow else None
    report = f"{own}{REPORT_PATH}/{record.run}/{REPORT_NAME}"
    has_report = (folder_of(home, record.run) / REPORT_NAME).exists()
    experiment = record.mlflow.removeprefix("experiments/").partition("/")[0]
    return Addresses(
        runs=None if record.team else f"{own}{RUNS_PATH}",
        report=report if has_report and not record.team else None,
        prefect=flow_run_page(record.team or own, record.flow_run),
        mlflow=f"{mlflow}/#/{record.mlflow}?{WORKFLOW}" if mlflow else None,
        experiment=experiment_page(mlflow, experiment) if mlflow else None,
    )


def addresses_here() -> Addresses | None:
    """Of the run whose results are in the working directory: the project's folder or a workspace.

    None if no run has recorded its results there.
    """
    here = Path.cwd()
    home = project_home()
    record = next((record for record in read_all(home) if record.folder == str(here)), None)
    return addresses(home, record) if record else None


def served_report(home: Path, run: str) -> str | None:
    """The address of a run's report if the Prefect server of this process is that of `rondo up`."""
    record = read(home, run)
    if record is None or os.environ.get(TEMPORARY) == "true":
        return None
    return addresses(home, record).report


@dataclass(frozen=True)
class Row:
    """A run in the list.

    state: with the stage and its progress. state_class, and the second in gates: a CSS class.
    gates: (subject, class, sign, outcome) per gate. round: the last one with results, and of how
    many.
    """

    record: RunRecord
    state: str
    state_class: str
    preset: str
    round: str
    gates: list[tuple[str, str, str, str]]
    win_rate: str
    kl: str
    minutes: str
    began: str
    links: Addresses


def rows(home: Path) -> list[Row]:
    """All runs, newest first.

    Args:
        home: The .rondo folder of the project.
    """
    records = read_all(home)
    alive = {record.run for record in records if is_running(home, record)}
    open_ones = [one.flow_run for one in records if one.state in (State.running, *UNDECIDED)]
    cancelled = cancelled_in_prefect(home, open_ones)
    return [_row(home, record, record.run in alive, cancelled) for record in records]


def is_running(home: Path, record: RunRecord) -> bool:
    return record.state == State.running and is_alive(home, record.run)


def cancelled_in_prefect(home: Path, flow_runs: Sequence[str]) -> set[str]:
    """Those of these flow runs that were cancelled, as far as the server of `rondo up` knows: the
    run itself cannot tell *Cancel* from another interrupt, and one that waits has no process.
    """
    servers = running_prefect(home) if flow_runs else None
    if servers is None:
        return set()
    query = {
        "flow_runs": {
            "id": {"any_": list(flow_runs)},
            "state": {"type": {"any_": ["CANCELLED", "CANCELLING"]}},
        }
    }
    login = base64.b64encode(servers.auth.encode()).decode()
    request = urllib.request.Request(
        f"{servers.prefect}/api/flow_runs/filter",
        json.dumps(query).encode(),
        {"Content-Type": "application/json", "Authorization": f"Basic {login}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
            return {str(flow_run["id"]) for flow_run in json.load(response)}
    except (OSError, ValueError):
        return set()


def _row(home: Path, record: RunRecord, alive: bool, cancelled: Collection[str]) -> Row:
    """
    Args:
        alive: whether its process computes, or waits for a slot or a folder.
        cancelled: see `cancelled_in_prefect`.
    """
    state = record.state
    if state == State.running and not alive:  # killed
        state = State.interrupted
    if record.flow_run in cancelled:
        state = State.cancelled
    names = [name for name in record.rounds if name in record.results]
    last = names[-1] if names else ""
    results = record.results.get(last, RoundResults())
    outcomes = {gate: results.gates.get(gate, NOT_REACHED) for gate in GATES}
    failed = {*outcomes.values()} & {"failed", "refused", "warned"}
    of_rounds = f" of {len(record.rounds)} rounds" if len(record.rounds) > 1 else ""
    lasted = record.seconds + (time.time() - record.updated if alive else 0.0)
    return Row(
        record=record,
        state=state_text(record, state),
        state_class="warn" if state == State.completed and failed else STATE_CLASSES[state],
        preset=f"{KEEP} ({record.preset})" if record.named_preset == KEEP else record.preset,
        round=f"{last}{of_rounds}" if last else "",
        gates=[(GATES[gate], *MARKS.get(how, ("", "-")), how) for gate, how in outcomes.items()],
        win_rate=rate_text(results),
        kl="-" if results.kl is None else f"{results.kl:.2f}",
        minutes=f"{lasted / 60:.0f}" if lasted >= 60 else "<1",
        began=f"{datetime.fromtimestamp(record.started, UTC):%Y-%m-%d %H:%M}",
        links=addresses(home, record),
    )


def state_text(record: RunRecord, state: State) -> str:
    """The state with the stage at which the run is, and with its progress while it runs."""
    if state == State.completed:
        return state.value
    name = "GateFailed" if state == State.gate_failed else state.value
    if not record.stage:
        return "starts, or waits for its folder" if state == State.running else name
    if state == State.running:
        return f"{name} {record.stage}{stage_progress(record)}"
    return f"{name} at {record.stage}"


def stage_progress(record: RunRecord) -> str:
    """See `progress`; of a file that is older than the stage's start, nothing."""
    stage, round_ = split_address(record.stage)
    path = Path(record.folder) / stage_dir(round_, stage) / "metrics.jsonl"
    is_own = path.exists() and path.stat().st_mtime >= record.updated
    return progress(round_, stage, Path(record.folder)) if is_own else ""


def progress(round_: str, stage: str, folder: Path = Path()) -> str:
    """`: step 12, loss 0.3`, from the last row of metrics.jsonl; empty if there is none."""
    path = folder / stage_dir(round_, stage) / "metrics.jsonl"
    command = f"dvc repro -f {stage}@{round_}"
    step_rows = read_rows(StepRow, path, command, growing=True) if path.exists() else []
    if not step_rows:
        return ""
    last: Mapping[str, Any] = step_rows[-1]
    metrics = [
        f"{name} {last[name]:.3g}"
        for name in ("score_mean", "judge_score_mean", "kl", "loss")
        if isinstance(last.get(name), float)
    ]
    return ", ".join([f": step {last['step']}", *metrics])


def rate_text(results: RoundResults) -> str:
    rate, low, high = results.win_rate or (None, None, None)
    return "-" if rate is None else interval(rate, low, high)


def page(home: Path) -> str:
    """The page /rondo/runs."""
    all_rows = rows(home)
    return render_page(
        "flows.report",
        "runs.html.jinja",
        {},
        rows=all_rows,
        project=home.parent.name,
        is_live=any(row.state_class == "live" for row in all_rows),
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        shown_changes=SHOWN_CHANGES,
    )


def text(home: Path) -> str:
    """The newest runs for a terminal of 80 columns; empty if there is none."""
    all_rows = rows(home)
    if not all_rows:
        return ""
    after = "" if running_prefect(home) else " (after `rondo up`)"
    of_all = f", the newest {TEXT_RUNS} of {len(all_rows)}" if len(all_rows) > TEXT_RUNS else ""
    blocks = [block(home, row) for row in all_rows[:TEXT_RUNS]]
    page_line = f"This list with links{after}: {last_servers(home).prefect}{RUNS_PATH}"
    return "\n".join([f"Runs, newest first{of_all}:", *blocks, page_line])


def block(home: Path, row: Row) -> str:
    """The lines of a run."""
    record = row.record
    changes = record.changes[:SHOWN_CHANGES]
    more = len(record.changes) - len(changes)
    settings = ", ".join([row.preset, *changes, *([f"{more} more"] if more else [])])
    gates = ", ".join(f"{subject} {how}" for subject, _, _, how in row.gates)
    lines = [row.state, settings]
    if row.round:
        lines.append(f"{row.round}: {gates}; win rate {row.win_rate}, KL {row.kl}")
    if record.reason:
        lines.insert(1, record.reason)
    if record.isolated and record.rounds:  # it has begun there
        lines.append(f"branch runs/{record.run}, folder {relative(home, Path(record.folder))}")
    if row.links.report:
        lines.append(f"report {relative(home, folder_of(home, record.run) / REPORT_NAME)}")
    wrapped = [filled(line, TEXT_WIDTH, first="  ", others="    ") for line in lines]
    return "\n".join([f"{record.run}  {row.began} UTC  {row.minutes} min", *wrapped])


def relative(home: Path, path: Path) -> str:
    """A path as seen from the project's folder."""
    return str(path.relative_to(home.parent)) if path.is_relative_to(home.parent) else str(path)

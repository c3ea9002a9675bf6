"""What a run did, and its report pages: `.rondo/reports/<run>/`.

A run writes run.json there when it begins, at each stage and when it ends, and keeps its report
pages beside it. They stay when a later run overwrites reports/, or when the run's workspace is
removed. A record has only what its own run has passed: no number of an earlier run.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from flows.core.addresses import split_address
from flows.core.bookkeeping import bookkeeping
from flows.core.config import nearest_preset
from flows.core.services import LogLine, last_servers, prefect_pages, without_credentials
from flows.core.verdicts import read_gate
from flows.report.summary import SUMMARY
from stages.gate.verdict import passed_or_approved
from stages.lib.core.files import REPORTS, read_json, replacing, stage_dir, write_text
from stages.lib.core.params import Params

KEPT = "reports"  # in the .rondo folder
RECORD = "run.json"
MAX_REASON = 200  # characters
RECORDING = "recording the run"
PAGES = (".html", ".md")  # how the names of the kept files end


class State(StrEnum):
    """Of a run: `running` is also that of a run that was killed."""

    running = "runs"
    waiting = "waits for a decision"
    gate_failed = "gate failed"
    failed = "failed"
    interrupted = "interrupted"
    cancelled = "cancelled"
    completed = "completed"


class RoundResults(BaseModel):
    """gates: how the gates ended that the run has passed or failed. win_rate: of the policy against
    SFT, with its 95% interval. kl: of the policy from SFT, in nats per sequence.
    """

    gates: dict[str, str] = {}
    win_rate: tuple[float | None, float | None, float | None] | None = None
    kl: float | None = None


class RunRecord(BaseModel):
    """named_preset: what the user named, e.g. `keep`. changes: the settings that differ from
    `preset`. flow_run: its id in Prefect. team: the address of Prefect's pages, if the run used a
    server that is not of this machine's `rondo up`. mlflow: experiment and run, as in the addresses
    of MLflow's pages. folder: in which it works. started, updated: in seconds since the epoch.
    seconds: that its processes have worked or waited for a slot until `updated`. stage: that runs,
    or at which the run ended. reason: the first line of the error that ended it. rounds: those that
    the run computes; there are results of those that it has reached.
    """

    run: str
    named_preset: str
    preset: str
    changes: list[str]
    isolated: bool
    flow_run: str
    team: str
    mlflow: str = ""
    folder: str = ""
    started: float
    updated: float
    seconds: float = 0.0
    state: State = State.running
    stage: str = ""
    reason: str = ""
    rounds: list[str] = []
    results: dict[str, RoundResults] = {}


def folder_of(home: Path, run: str) -> Path:
    return home / KEPT / run


def read(home: Path, run: str) -> RunRecord | None:
    """The record of a run; None if there is none, or its file is damaged."""
    try:
        return RunRecord.model_validate_json((folder_of(home, run) / RECORD).read_bytes())
    except (OSError, ValueError):
        return None


def read_all(home: Path) -> list[RunRecord]:
    """The records of all runs, newest first."""
    names = (path.parent.name for path in (home / KEPT).glob(f"*/{RECORD}"))
    records = [record for name in names if (record := read(home, name))]
    return sorted(records, key=lambda record: (record.started, record.run), reverse=True)


def save(home: Path, record: RunRecord) -> None:
    write_text(folder_of(home, record.run) / RECORD, record.model_dump_json())


@contextmanager
def recorded(
    home: Path, run: str, preset: str, params: Params, isolated: bool, flow_run: str, log: LogLine
) -> Iterator[None]:
    """Record that a run begins, or begins again, and that an error or an interrupt ends it.

    Args:
        preset: as the user named it.
        params: with the preset and the user's settings.
        flow_run: its id in Prefect.
    """
    with bookkeeping(RECORDING, log):
        _begin(home, run, preset, params, isolated, flow_run)
    state, reason = State.interrupted, ""
    try:
        yield
    except Exception as error:
        state, reason = State.failed, f"{type(error).__name__}: {error}"
        raise
    finally:
        with bookkeeping(RECORDING, log):
            if record := read(home, run):
                if record.state == State.running:  # else `end` was called
                    _move(record, state)
                record.reason = without_credentials(reason.partition("\n")[0].rstrip(":"))[
                    :MAX_REASON
                ]
                save(home, record)


def _begin(
    home: Path, run: str, preset: str, params: Params, isolated: bool, flow_run: str
) -> None:
    now, server = time.time(), prefect_pages(home)
    nearest, changes = nearest_preset(params, preset)
    record = RunRecord(
        run=run,
        named_preset=preset,
        isolated=isolated,
        flow_run=flow_run,
        team="" if server == last_servers(home).prefect else server,
        started=now,
        updated=now,
        preset=nearest,
        changes=[f"{key}={value}" for key, value in changes],
    )
    if earlier := read(home, run):  # its settings stay what they were
        same = ("named_preset", "preset", "changes", "started", "seconds")
        record = record.model_copy(update={name: getattr(earlier, name) for name in same})
    save(home, record)


def set_up(home: Path, run: str, rounds: Sequence[str], mlflow: str | None) -> None:
    """Call in the run's folder when its rounds and its page in MLflow are known.

    Args:
        mlflow: the address of its page.
    """
    if record := read(home, run):
        record.folder, record.rounds = str(Path.cwd()), list(rounds)
        record.mlflow = (mlflow or "").partition("/#/")[2].partition("?")[0]
        save(home, record)


def begin_stage(home: Path, run: str, address: str) -> None:
    """Call in the run's folder when a stage begins, which means that the one before is done."""
    if record := read(home, run):
        _read_results(record, is_done=True)
        _move(record, State.running, address)
        save(home, record)


def end(home: Path, run: str, state: State) -> None:
    """Call in the run's folder when the run ends, or waits for a decision.

    Args:
        state: `failed` becomes `gate_failed` if the run stands at a gate that stops it.
    """
    if record := read(home, run):
        stops = _read_results(record, is_done=state == State.completed)
        _move(record, State.gate_failed if state == State.failed and stops else state)
        save(home, record)


def _move(record: RunRecord, state: State, address: str = "") -> None:
    now = time.time()
    record.seconds, record.updated = record.seconds + max(now - record.updated, 0.0), now
    record.state, record.stage = state, address or record.stage


def _read_results(record: RunRecord, is_done: bool) -> bool:
    """Read those of the record's stage, if it is a gate, also one that failed, or the evaluation.

    Args:
        is_done: whether the stage has ended well.

    Returns:
        Whether it is a gate that stops the run.
    """
    stage, round_ = split_address(record.stage)
    verdict = read_gate(round_, stage.removeprefix("gate_")) if stage.startswith("gate_") else None
    results = record.results.get(round_, RoundResults())
    if verdict:
        results.gates[verdict["gate"]] = outcome(verdict)
    elif stage == "evaluate" and is_done:
        metrics = read_json(stage_dir(round_, stage) / "metrics.json")
        rate, low, high = (metrics.get(f"win_rate{end}") for end in ("", "_low", "_high"))
        results.win_rate, results.kl = (rate, low, high), metrics.get("ppo", {}).get("kl")
    if results != RoundResults():
        record.results[round_] = results
    return bool(verdict and not verdict["may_continue"])


def outcome(verdict: dict[str, Any]) -> str:
    """How a gate ended, in a word or two."""
    if "not_judged" in verdict:
        return "not judged"
    if verdict["passed"]:
        return "passed"
    if passed_or_approved(verdict):
        return "approved"
    if verdict["may_continue"]:
        return "warned"
    return "refused" if verdict["approval"] else "failed"


def keep_pages(home: Path, run: str, rounds: Sequence[str]) -> None:
    """Keep the pages of reports/ in the working directory, those of these rounds only, in place of
    those that the run kept before.
    """
    folder = folder_of(home, run)
    sources = [*REPORTS.glob("*.html"), SUMMARY]
    sources += [path for name in rounds for path in (REPORTS / name).rglob("*.html")]
    kept = {folder / path.relative_to(REPORTS): path for path in sources if path.is_file()}
    for target, source in kept.items():
        with replacing(target) as stream:
            stream.write(source.read_bytes())
    for path in {*pages(folder).values()} - {*kept}:
        path.unlink()


def pages(folder: Path) -> dict[str, Path]:
    """The kept pages in a run's folder, by path within it, such as `r0/data.html`."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.suffix in PAGES and path.is_file() and not path.is_symlink()
    }

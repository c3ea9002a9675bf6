"""`rondo status`: how far each round is, what runs now, and what to do next, for a terminal."""

import json
import re
from pathlib import Path

import psutil
from rich.box import SIMPLE_HEAD
from rich.table import Table

from flows.core import tables, verdicts
from flows.core.addresses import split_address
from flows.execution import dvc_stages
from flows.execution.worktree import ENDED, WORKSPACES
from flows.report import summary
from stages.lib.core.files import stage_dir
from stages.lib.core.params import load_params

LOCKS = Path(".dvc/tmp/rwlock")
CHANGED = "to do"


def text(home: Path) -> str:
    """A stage a line and a round a column; below it the verdicts, and the runs that have a folder
    of their own.
    """
    rounds = list(load_params().rounds)
    addresses, now = dvc_stages.stage_order(rounds), running()
    todo = (
        set(addresses[addresses.index(now) :])
        if now in addresses
        else dvc_stages.waiting(addresses)
    )  # DVC tells nothing while it runs
    table = Table(box=SIMPLE_HEAD)
    for column in ("", *rounds):
        table.add_column(column)
    for stage in dict.fromkeys(split_address(address)[0] for address in addresses):
        table.add_row(
            stage,
            *(
                state(address, now, todo)
                for address in addresses
                if split_address(address)[0] == stage
            ),
        )
    lines = [tables.drawn(table), *summary.verdict(rounds), *workspaces(home)]
    return "\n".join([*lines, "All numbers: `rondo report`; in the browser: `rondo up`."])


def state(address: str, now: str | None, todo: set[str]) -> str:
    stage, round_ = split_address(address)
    if address == now:
        return f"runs{progress(round_, stage)}"
    verdict = (
        verdicts.read_gate(round_, stage.removeprefix("gate_"))
        if stage.startswith("gate_")
        else None
    )
    if verdict and not verdict["opened"]:
        return "shut"
    return CHANGED if address in todo else "done"


def running() -> str | None:
    """The stage that DVC runs in this folder, by its locks."""
    try:
        locks = json.loads(LOCKS.read_text())
    except (FileNotFoundError, ValueError):  # nothing has run yet, or DVC writes at this moment
        return None
    holders = [
        holder
        for kind in locks.values()
        for each in kind.values()
        for holder in (each if isinstance(each, list) else [each])
    ]
    commands = (holder["cmd"] for holder in holders if psutil.pid_exists(holder["pid"]))
    found = (re.search(r"repro --single-item (?:--force )?(\S+)", command) for command in commands)
    return next((match[1] for match in found if match), None)


def progress(round_: str, stage: str) -> str:
    """`: step 12, loss 0.3`, where it has said so."""
    path = stage_dir(round_, stage) / "metrics.jsonl"
    rows = path.read_text().splitlines() if path.exists() else []
    last = json.loads(rows[-1]) if rows else {}
    names = [
        name
        for name in ("score_mean", "judge_mean", "kl", "loss")
        if isinstance(last.get(name), float)
    ]
    return (
        ", ".join([f": step {last['step']}", *(f"{name} {last[name]:.3g}" for name in names)])
        if last
        else ""
    )


def workspaces(home: Path) -> list[str]:
    """A line for each run in a folder of its own: ended, or not yet."""
    return [
        f"runs/{folder.name}: {'ended' if (folder / ENDED).exists() else 'runs, waits or was cut off'}; {folder}"
        for folder in sorted((home / WORKSPACES).glob("*"))
    ]

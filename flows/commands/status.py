"""`rondo status`: the state of each stage and round, and the next step, for a terminal."""

import re
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from flows.core import tables
from flows.core.addresses import split_address
from flows.core.locks import Locks, current_locks, is_here
from flows.execution import dvc_stages
from flows.report import diagnosis, round_files, run_pages
from stages.lib.core.ended_rounds import ended_names, settings_path
from stages.lib.core.params import load_params

NOT_UP_TO_DATE = "to do"
RECORDED = "recorded"
ABOUT_RECORDED = (
    f"{RECORDED}: the numbers of an earlier run; its models and samples are not in this folder: "
    "`dvc pull` fetches them if there is a remote, `rondo run` makes them again"
)


def states_by_stage(rounds: list[str], locks: Locks) -> dict[str, dict[str, str]]:
    """By stage and round, the state; the round of a stage that runs once is empty."""
    current = running_stage()
    addresses = dvc_stages.stage_order(rounds) if current else []
    # `dvc status` fails while DVC runs: then all stages after the running one count as to do
    if current in addresses:
        todo = set(addresses[addresses.index(current) :])
    else:
        addresses, todo = dvc_stages.order_and_changes(rounds)
    by_stage: dict[str, dict[str, str]] = {}
    for address in addresses:
        stage, round_ = split_address(address)
        by_stage.setdefault(stage, {})[round_] = state(address, current, todo, locks)
    return by_stage


def values() -> dict[str, Any]:
    """For programs: `stages` (by name and round: done, to do, failed, recorded or runs...), `ended`
    (names of rounds) and `verdicts` (lines, as in `text`).
    """
    ended, locks = ended_names(), current_locks()
    rounds = [name for name in load_params().rounds if name not in ended]
    return {
        "stages": states_by_stage(rounds, locks),
        "ended": sorted(ended),
        "verdicts": diagnosis.verdict_lines(rounds, locks),
    }


def text(home: Path) -> str:
    """A table with a row per stage and a column per round; below it the verdicts, and the runs."""
    ended, locks = ended_names(), current_locks()
    rounds = [name for name in load_params().rounds if name not in ended]
    by_stage = states_by_stage(rounds, locks)
    table = Table(box=SIMPLE_HEAD)
    for column in ("", *rounds):
        table.add_column(column)
    for stage, states in by_stage.items():
        table.add_row(stage, *states.values())
    of_ended = [f"{name} has ended; {settings_path(name)}" for name in sorted(ended)]
    recorded = (
        [ABOUT_RECORDED] if any(RECORDED in states.values() for states in by_stage.values()) else []
    )
    table_text, verdict_lines = tables.render_text(table), diagnosis.verdict_lines(rounds, locks)
    lines = [table_text, *recorded, *of_ended, *verdict_lines]
    lines += ["All numbers: `rondo report`; in the browser: `rondo up`."]
    width = tables.terminal_width()
    shown = [tables.filled(line, width) for line in lines[1:] if line]
    return "\n".join(filter(None, [table_text, *shown, run_pages.text(home)]))


def state(address: str, current: str | None, todo: set[str], locks: Locks) -> str:
    """A cell of the table; `current` is the running stage, `locks` has those with results."""
    stage, round_ = split_address(address)
    if address == current:
        return f"runs{run_pages.progress(round_, stage)}"
    verdict = (
        round_files.verdicts(round_, locks).get(stage.removeprefix("gate_"))
        if stage.startswith("gate_")
        else None
    )
    if verdict and not verdict["may_continue"]:
        return "failed"
    if address not in todo:
        return "done"
    return RECORDED if address in locks and not is_here(locks[address]) else NOT_UP_TO_DATE


def running_stage() -> str | None:
    """The stage that DVC runs in this folder."""
    pattern = re.compile(r"(?: repro|/flows/execution/repro\.py) (?:-\S+ )*([^-\s]\S*)")
    matches = (pattern.search(command) for command in dvc_stages.running_commands())
    return next((match[1] for match in matches if match), None)

"""What a flow run decides once.

After a crash, a retry or a suspension at a gate, the flow starts again from the top; it has to use
the same values.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect.runtime import flow_run

from flows.core.run_locks import RUNS, hold_run_lock, locks_of
from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_object, write_json
from stages.lib.core.params import Params, check_params, load_params


def decisions_path(home: Path) -> Path:
    """The file in the .rondo folder with the decisions of this flow run (`decide_once`)."""
    return home / RUNS / f"{flow_run.id}.json"


def decisions(home: Path) -> dict[str, Any]:
    """The decisions of this flow run so far, by name."""
    path = decisions_path(home)
    return _read(path) if path.exists() else {}


def decide_once(home: Path, name: str, decide: Callable[[], Any]) -> Any:
    """The value of `decide` when this flow run first called it under this name."""
    decided = decisions(home)
    if name not in decided:
        decided[name] = decide()
        write_json(decisions_path(home), decided)
    return decided[name]


def take_over(home: Path, run: str) -> None:
    """Let this flow run have the name and the decisions of an earlier one, whose process has ended.

    Args:
        run: the name of a run.

    Raises:
        BadInput: it ended before it had recorded its settings.
    """
    values: dict[str, Any] = {}
    for lock in locks_of(home, run):
        hold_run_lock(lock)
        values |= _read(lock.with_suffix(".json"))
    if _key(run) not in values:
        raise BadInput(
            f"run {run} ended before it had recorded its settings, and no stage has run: start it "
            "again with the command, or the form, that started it"
        )
    write_json(decisions_path(home), values | {"run": run})


def decided_params(home: Path, run: str) -> Params | None:
    """The params that a run decided when it first began; None if it begins now."""
    values = decisions(home).get(_key(run))
    return check_params(values, f"run {run}") if values else None


def own_params(home: Path, run: str, decide: Callable[[], Params]) -> Params:
    """The params of a run, which `decide` resolves when the run begins.

    A run that begins again keeps them, whatever another run has written to params.yaml since.
    Rounds that the other run has added stay.
    """
    begins_again = _key(run) in decisions(home)
    values = decide_once(home, _key(run), lambda: decide().model_dump(mode="json"))
    if begins_again:
        current = load_params().model_dump(mode="json")["rounds"]
        added = {key: current[key] for key in current if key not in values["rounds"]}
        values["rounds"] |= added
    return check_params(values, f"run {run}")


def _key(run: str) -> str:
    return f"params of {run}"


def _read(path: Path) -> dict[str, Any]:
    """
    Raises:
        BadInput: the file is damaged.
    """
    fix = f"delete {path}, and start the run again with the command, or the form, that started it"
    return read_object(path, fix)

"""The flow `evaluate-checkpoint`: stages/evaluate/checkpoint.py from the Prefect UI, in the folder
of a run, or in the project's.
"""

import json
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.client.schemas import State
from prefect.states import Completed

from flows.core import addresses
from flows.core.git import revision
from flows.core.tables import interval
from flows.execution import dvc_stages
from flows.execution.worktree import WORKSPACES
from flows.orchestration import concurrency
from flows.pipeline import home_folder, make_logger
from flows.tracking.mlflow_store import open_tracker
from flows.tracking.records import Record, milliseconds, read_checkpoint
from stages.lib.core.errors import BadInput, RondoError
from stages.lib.core.files import metric_name
from stages.lib.core.params import load_params

ROWS = ("sentiment", "score", "kl", "length", "eos_rate", "distinct_2", "repetition_3")


@flow(name="evaluate-checkpoint", flow_run_name="{checkpoint}@{round}", persist_result=False)
def evaluate_checkpoint(
    run: str = "", round: str = "r0", checkpoint: str = "step_00010"
) -> State[Any]:
    """A checkpoint on the frozen prompts by the jury, against SFT and the policy that was kept.

    Args:
        run: A run with a folder of its own, as `rondo status` names it, e.g.
            20261122-154944-e99e311a. Empty: the project's folder. round: Whose SFT model, reward
            model and frozen prompts. checkpoint: A name in rounds/ROUND/ppo/checkpoints, or the
            folder of any adapter of that round's SFT model.
    """
    say = make_logger()
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        say(line)

    home = home_folder()
    folder = home / WORKSPACES / run if run else Path.cwd()
    if not folder.is_dir():
        raise BadInput(
            f"run {run}: {folder} is no folder; `rondo status` lists those that there are"
        )
    with chdir(folder), concurrency.compute_slot(say):
        code = dvc_stages.stream(
            ["stages.evaluate.checkpoint", "--round", round, "--checkpoint", checkpoint], on_line
        )
    if code:
        raise dvc_stages.ERROR_BY_EXIT_CODE.get(code, RondoError)(
            "\n".join(lines[-dvc_stages.SHOWN_LINES :])
        )
    with chdir(folder):
        record(run, Path(lines[-1]), home, say)
    told = json.loads((folder / lines[-1]).read_text())
    create_table_artifact(
        table(told),
        key=addresses.slug(f"checkpoint-{round}-{Path(told['path']).name}".lower()),
        description=told["path"],
    )
    sft, kept = (
        interval(*(told[f"win_rate_{name}{end}"] for end in ("", "_low", "_high")))
        for name in ("sft", "ppo")
    )
    return Completed(
        message=f"win rate against SFT {sft}, against the policy that was kept {kept}; all of it: {folder / lines[-1]}"
    )


def record(run: str, report: Path, home: Path, say: Callable[[str], None]) -> None:
    """Tell MLflow, as a child of the run in whose folder this is called; without one of a run that
    has the folder's name.
    """
    name, now = run or metric_name(Path.cwd().name), milliseconds()
    tags = {"revision": revision(), "seed": str(load_params().seed)}
    tracker = open_tracker(name, home, {}, say)
    tracker.send(read_checkpoint(name, report, tags))
    if not run:
        tracker.send(Record(run=name, status="FINISHED", started=now, ended=now))


def table(told: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a number: SFT, the policy that was kept, the checkpoint."""
    return [
        {"": name} | {model: round(told[model][name], 3) for model in ("sft", "ppo", "checkpoint")}
        for name in ROWS
    ]

"""The flow `evaluate-checkpoint`: runs stages/evaluate/checkpoint.py from the Prefect UI, in the
workspace of a run or in the project's folder.
"""

import json
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.client.schemas import State
from prefect.runtime import deployment
from prefect.states import Completed

from flows.core import addresses
from flows.core.form_limits import check_inside
from flows.core.git import revision
from flows.core.services import HOME
from flows.core.tables import interval
from flows.execution import dvc_stages
from flows.execution.meter import Meter
from flows.execution.worktree import folder_of_run
from flows.orchestration import concurrency, outcomes
from flows.pipeline import make_logger
from flows.tracking.mlflow_store import check_address, store_uri
from flows.tracking.mlflow_tracker import MlflowTracker
from flows.tracking.records import Record, milliseconds, read_checkpoint
from stages.lib.core.ended_rounds import params_of
from stages.lib.core.errors import RondoError
from stages.lib.core.files import find_checkpoint, metric_name
from stages.lib.core.params import load_params

ROWS = ("judge_score", "score", "kl", "length", "eos_rate", "distinct_2", "repetition_3")


@flow(name="evaluate-checkpoint", flow_run_name="{checkpoint}@{round}", persist_result=False)
@outcomes.errors_as_states
def evaluate_checkpoint(
    run: str = "", round: str = "r0", checkpoint: str = "step_00010"
) -> State[Any]:
    """Evaluate a checkpoint on the evaluation prompts, against SFT and the selected policy.

    Args:
        run: A run with a workspace of its own, as `rondo status` lists it, e.g.
            20261122-154944-e99e311a. Empty: the project's folder.
        round: The round of the SFT model, the reward model and the evaluation prompts.
        checkpoint: A name in rounds/ROUND/ppo/checkpoints, or a folder: of an adapter of that
            round's SFT model, or of a model with its tokens.
    """
    log = make_logger()
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        log(line)

    home = HOME.resolve()
    folder = folder_of_run(run, home) if run else Path.cwd()
    if deployment.id:
        check_inside([Path(checkpoint)])
    check_address(store_uri(home))
    with chdir(folder):
        params_of(round)
        find_checkpoint(round, checkpoint)
    with chdir(folder), concurrency.compute_slot(log), Meter() as meter:
        code = dvc_stages.stream(
            ["stages.evaluate.checkpoint", "--round", round, "--checkpoint", checkpoint], on_line
        )
    if code:
        raise dvc_stages.ERROR_BY_EXIT_CODE.get(code, RondoError)(
            "\n".join(lines[-dvc_stages.ERROR_LINES :])
        )
    report = Path(lines[-1])  # the stage prints the path of its report last
    with chdir(folder):
        record(run, report, home, log, meter)
    results = json.loads((folder / report).read_text("utf-8"))
    create_table_artifact(
        table(results),
        key=addresses.slug(f"checkpoint-{round}-{Path(results['path']).name}".lower()),
        description=results["path"],
    )
    against_sft, against_policy = (
        interval(*(results[f"win_rate_{name}{end}"] for end in ("", "_low", "_high")))
        for name in ("sft", "ppo")
    )
    return Completed(
        message=f"win rate against SFT {against_sft}, against the selected policy "
        f"{against_policy}; all results: {folder / report}"
    )


def record(run: str, report: Path, home: Path, log: Callable[[str], None], meter: Meter) -> None:
    """Record the results in MLflow, from the working directory of the evaluation.

    Args:
        run: The parent run. Empty: a run with the name of the working directory.
        report: The JSON file that the stage wrote.
        home: The .rondo folder.
        log: Called with errors of MLflow.
        meter: Measured the time of the evaluation.
    """
    name, now = run or metric_name(Path.cwd().name), milliseconds()
    tracker = MlflowTracker(name, store_uri(home), home, {}, log)
    tags = {"revision": revision()}
    evaluation = read_checkpoint(name, report, tags, load_params().mlflow.upload)
    evaluation.started = evaluation.ended - round(meter.seconds * 1000)
    tracker.send(evaluation)
    if not run:
        tracker.send(Record(run=name, status="FINISHED", started=now, ended=now))
    tracker.finish_sending()


def table(results: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per metric, with the values of SFT, the selected policy and the checkpoint."""
    models = ("sft", "ppo", "checkpoint")
    return [
        {"": name} | {model: round(results[model][name], 3) for model in models} for name in ROWS
    ]

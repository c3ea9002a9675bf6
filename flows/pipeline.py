"""The Prefect flow: one task a stage and round, through the DAG; MLflow mirrors it; a failed gate
is its last state.

Started by `rondo run`, or from the Prefect UI through the deployment in prefect.yaml. Both take the
same parameters.
"""

import json
import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas import State
from prefect.exceptions import Pause
from prefect.runtime import flow_run, task_run
from prefect.states import Completed, Failed
from pydantic import Field

from flows.core.config import KEEP, Sections, one_more_round, preset_names, resolve, write_params
from flows.core.git import revision
from flows.core.services import LogLine
from flows.execution import dvc_stages, energy, estimate, fork_server
from flows.execution.worktree import working_tree, workspace
from flows.orchestration import approval, artifacts, concurrency, crashed_runs, retries
from flows.report import page, summary
from flows.tracking import provenance
from flows.tracking.mlflow_store import open_tracker
from flows.tracking.records import NullTracker
from stages.lib.core.errors import GateFailed, Unreachable
from stages.lib.core.files import write_json
from stages.lib.core.params import load_params
from stages.lib.core.source_files import changed_sources

PresetName = Annotated[str, Field(json_schema_extra={"enum": list[Any](preset_names())})]
Rounds = Annotated[
    int, Field(ge=0)
]  # a form sends null for a field that was emptied, and can give no reason where null is allowed


def make_logger() -> LogLine:
    """Lines go to the Prefect run's log, and clean to the terminal when there is one of our own."""
    logger, console = get_run_logger(), logging.getLogger("rondo")

    def say(line: str) -> None:
        logger.info(line)
        console.info(line)

    return say


WAITS = retries.retry_delays()


@task(
    name="stage",
    task_run_name="{address}",
    cache_policy=NO_CACHE,
    retries=len(WAITS),
    retry_delay_seconds=WAITS,
    retry_condition_fn=retries.is_retryable,
    log_prints=False,
)
def run_stage(
    address: str, by: provenance.RunRef, tracker: NullTracker, force: bool
) -> dvc_stages.Outcome:
    """Bring one stage up to date, streaming its log; the run's page shows how far it is, and what
    it has left.

    Where only the network was missing Prefect calls it again, after a wait in which the slot is
    free for other runs.
    """
    say = make_logger()
    shown = artifacts.RunArtifacts(address, say)

    def on_line(line: str) -> None:
        say(line)
        tracker.progress()
        shown.line(line)

    with concurrency.compute_slot(say):
        tracker.start(address)
        outcome, meter = "failed", energy.Meter(energy.counters())
        try:
            with meter:
                done = dvc_stages.run(address, on_line, force)
            outcome = done.value
            say(f"[{address}] {outcome}")
            return done
        except Unreachable:
            tried, most = task_run.run_count, 1 + len(WAITS)
            again = f"tried again in {WAITS[tried - 1]:g} s" if tried < most else "not tried again"
            say(f"[{address}] out of reach at try {tried} of {most}: {again}")
            raise
        finally:
            tracker.finish(outcome)
            if outcome == dvc_stages.Outcome.ran.value:
                provenance.record_provenance(address, by, tracker.page(address), meter)
            shown.end(outcome)


def before_the_last(rounds: list[str]) -> list[str]:
    """The promotion gates that end no run: what a round does wrong is what the next one learns
    from.
    """
    return [f"gate_promote@{name}" for name in rounds[:-1]]


def report_page(rounds: list[str]) -> str:
    """Writes it and says where; a page that cannot be written must not undo what a run has done."""
    try:
        return f"the same with pictures and samples: {page.write(rounds).resolve()}"
    except Exception as error:
        return f"{page.REPORT} was not written ({type(error).__name__}: {error}); `rondo report` tries again"


def home_folder() -> Path:
    return Path(os.environ.get("RONDO_HOME", ".rondo")).resolve()


def record() -> Path:
    """Where this flow run keeps what it has decided."""
    return home_folder() / "runs" / f"{flow_run.id}.json"


def decide_once(name: str, decide: Callable[[], Any]) -> Any:
    """What this flow run decided when it first asked: after a crash, a retry or a gate that asks it
    starts again from the top.
    """
    path = record()
    known = json.loads(path.read_text()) if path.exists() else {}
    if name not in known:
        known[name] = decide()
        write_json(path, known)
    return known[name]


def run_id() -> str:
    crashed_runs.hold_run_lock(record())
    return str(
        decide_once("run", lambda: f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{str(flow_run.id)[:8]}")
    )


def run_name() -> str:
    """In Prefect: what is run, and the name that branch, folder and MLflow know it by."""
    given = flow_run.parameters
    return f"{given.get('key') or given.get('preset') or flow_run.flow_name} {run_id()}"


@flow(name="rlhf-pipeline", flow_run_name=run_name, persist_result=False)
def rlhf_pipeline(
    preset: PresetName = KEEP,
    rounds: Rounds = 0,
    settings: list[str] = [],  # noqa: B006
    sections: Sections | None = None,
    isolated: bool = False,
) -> State[Any]:
    """Data preparation, SFT, reward model, PPO, evaluation and badcase replay, round after round,
    with gates between.

    Args:
        preset: An overlay on the defaults. `keep`: params.yaml as it is; `default`: the defaults.
        rounds: How many rounds. 0: as params.yaml or the preset says.
        settings: Single values, section.key=value, e.g. ppo.total_episodes=64.
        sections: Whole sections of params.yaml; what is left out stays.
        isolated: In a git worktree of its own, which ends as the branch `runs/RUN`.
    """
    return pipeline(run_id(), preset, lambda: rounds, settings, sections, isolated)


def pipeline(
    run: str,
    preset: str,
    rounds: Callable[[], int],
    settings: list[str],
    sections: Sections | None,
    isolated: bool,
) -> State[Any]:
    """What `rlhf_pipeline` does, as the run of this name. rounds: asked when no other run works in
    the folder.

    Raises:
        Pause: a gate waits for a decision.
    """
    say, home = make_logger(), home_folder()
    resolve(
        preset, None, settings, sections
    )  # bad input is said before there is anything to clean up
    warmth = (
        nullcontext()
        if fork_server.VARIABLE in os.environ
        else fork_server.fork_server(dvc_stages.stage_environment())
    )
    with warmth, workspace(run, home) if isolated else working_tree(home, say) as folder:
        params = resolve(preset, rounds() or None, settings, sections)
        changes = write_params(params)
        say(f"run {run} in {folder}")
        say(
            "\n".join(["params.yaml changed:", *(f"  {change}" for change in changes)])
            if changes
            else "params.yaml as it was"
        )
        names = list(params.rounds)
        addresses = dvc_stages.stage_order(names)
        todo = dvc_stages.waiting(addresses)
        changed = changed_sources(params) if "assets" not in todo else []
        if changed:
            say(f"changed since the last run: {', '.join(changed)}")
            todo = set(addresses)  # all stages hang on assets
        for line in estimate.report(params, addresses, todo):
            say(line)
        by = provenance.RunRef(run, revision())
        tracker = open_tracker(
            run, home, {"revision": by.revision, "seed": str(params.seed), "preset": preset}, say
        )
        link(tracker.page(), "mlflow", "This run in MLflow: parameters, curves, models", say)
        left = list(addresses)
        try:
            while left:
                try:
                    run_stage(left[0], by, tracker, force=left[0] == "assets" and bool(changed))
                except GateFailed as error:
                    if approval.decided_in_the_ui(left[0]):
                        continue  # the gate reads the decision
                    if left[0] not in before_the_last(names):
                        raise
                    say(f"{error}\nNot promoted; the next round learns from its badcases.")
                left.pop(0)
            ended: State[Any] = Completed(
                message=f"{len(names)} rounds done: {'; '.join(summary.verdict(names))}"
            )
        except GateFailed as error:
            ended = Failed(name="GateFailed", message=str(error))
        except Pause:
            raise
        except BaseException:
            close(run, names, left, tracker, say, bool(todo))
            raise
        close(run, names, left, tracker, say, bool(todo))
        return ended


def close(
    run: str, rounds: list[str], left: list[str], tracker: NullTracker, say: LogLine, changed: bool
) -> None:
    """What there is at the end of a run: table, verdicts, pages. left: the stages that it has not
    come to.
    """
    summary.write(rounds)
    say(summary.text(rounds))
    if changed or not page.REPORT.exists():
        say(report_page(rounds))
    tracker.close(
        not left,
        {path.name: path.read_text() for path in (summary.SUMMARY, page.REPORT) if path.exists()},
    )
    with artifacts.ignore_ui_errors("summary", say):
        create_markdown_artifact(
            summary.SUMMARY.read_text(), key="summary", description=f"Run {run}"
        )
    if page.REPORT.exists():
        link(tracker.page(text=page.REPORT.name), "report", "Who is at fault, on one page", say)
    if left:
        say(
            f"Ended at {left[0]}: what is shown of the stages after it, if anything, is from an earlier run."
        )


def link(address: str | None, key: str, told: str, say: LogLine) -> None:
    if address:
        with artifacts.ignore_ui_errors(key, say):
            create_link_artifact(address, link_text=told, key=key, description=told)


def with_one_more() -> int:
    """How many rounds there are with one more, decided once; no fewer than others have made of them
    since.
    """
    return max(int(decide_once("rounds", one_more_round)), len(load_params().rounds))


@flow(name="next-round", flow_run_name=run_name, persist_result=False)
def next_round(
    settings: list[str] = [],  # noqa: B006
    sections: Sections | None = None,
    isolated: bool = False,
) -> State[Any]:
    """One more round, on the failures of the last; those before are not run again. Goes on with a
    last round that has not ended.

    Args:
        settings: Single values, section.key=value, e.g. replay.max_badcases=32.
        sections: Whole sections of params.yaml; what is left out stays.
        isolated: In a git worktree of its own, which ends as the branch `runs/RUN`.
    """
    return pipeline(run_id(), KEEP, with_one_more, settings, sections, isolated)

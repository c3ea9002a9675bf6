"""The Prefect flow: one task per stage and round, in the order of the DAG, mirrored to MLflow.

A failed gate ends the flow in the state GateFailed. The flow is started by `rondo run`, or from the
Prefect UI through the deployments in prefect.yaml, with the same parameters.
"""

import html
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import LinkArtifact, MarkdownArtifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas import State
from prefect.exceptions import Pause
from prefect.runtime import deployment, flow_run, task_run
from pydantic import Field

from flows.core.addresses import slug, split_address
from flows.core.bookkeeping import bookkeeping
from flows.core.config import (
    KEEP,
    check_rerun,
    describe_presets,
    one_more_round,
    preset_names,
    resolve,
    settable_keys,
)
from flows.core.form_limits import check_form
from flows.core.git import revision
from flows.core.locks import Locks, current_locks
from flows.core.run_locks import hold_run_lock
from flows.core.services import HOME, LogLine, flow_run_page, prefect_pages
from flows.execution import dvc_stages, fork_server, gpus, history, inputs, needs
from flows.execution.meter import Meter
from flows.execution.worktree import working_tree, workspace
from flows.orchestration import (
    approval,
    artifacts,
    cards,
    concurrency,
    outcomes,
    retries,
    run_names,
    stage_card,
)
from flows.orchestration.decisions import (
    decide_once,
    decided_params,
    decisions_path,
    own_params,
    take_over,
)
from flows.report import page, run_pages, run_record, summary
from flows.tracking import provenance
from flows.tracking.mlflow_store import check_address, store_uri
from flows.tracking.mlflow_tracker import MlflowTracker
from stages.lib.core.errors import GateFailed, Unreachable
from stages.lib.core.params import Params, load_params
from stages.lib.core.progress import progress, reporting
from stages.lib.core.user_inputs import user_files

# Prefect takes these descriptions before the docstring's
PRESET_FIELD: dict[str, Any] = {"enum": preset_names(), "description": describe_presets()}
PresetName = Annotated[str, Field(json_schema_extra=PRESET_FIELD)]


def describe_settings() -> str:
    """The text of the field `settings` in the form, in Markdown, with all keys by section."""
    lines = [
        "Single values, `section.key=value`, e.g. `ppo.total_episodes=64`. All others stay as the "
        "preset or params.yaml has them. stages/lib/core/params describes the keys:"
    ]
    for section, names in groupby(settable_keys(), lambda name: name.partition(".")[0]):
        keys = ", ".join(name.partition(".")[2] for name in names)
        lines.append(f"- `{section}`" + (f": {keys}" if keys else ""))
    return "\n\n".join(lines)  # Prefect's form joins lines that no empty line divides


Settings = Annotated[list[str], Field(json_schema_extra={"description": describe_settings()})]
# 0 stands for "not set": if null were allowed, the form in the Prefect UI could not show why a
# value is invalid.
Rounds = Annotated[int, Field(ge=0)]
QUICK_STAGES = {"champion", "gate_sft", "gate_reward", "gate_promote"}  # wait for no slot
SHOWN_ENDED = 3  # ended rounds in summary and report, before those of the run
RETRY_DELAYS = retries.retry_delays()  # seconds
INTERRUPTED_SECONDS = 1.0  # for sending to MLflow what waits, at the end of an interrupted run

GOES_ON = (
    "`rondo run --continue {run}` goes on; `rondo approve GATE ROUND --run {run}` decides on a gate"
)


def make_logger() -> LogLine:
    """A function that logs a line to the Prefect run, and without prefix to the terminal."""
    logger, console = get_run_logger(), logging.getLogger("rondo")

    def log(line: str) -> None:
        logger.info(line)
        console.info(line)

    return log


@task(
    name="stage",
    task_run_name="{address}",
    cache_policy=NO_CACHE,
    retries=len(RETRY_DELAYS),
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=retries.is_retryable,
    log_prints=False,
)
@outcomes.errors_as_states
def run_stage(
    address: str, run_ref: provenance.RunRef, tracker: MlflowTracker
) -> dvc_stages.Outcome | State[Any]:
    """Bring one stage up to date and stream its log; a gate that failed ends in the state Warned if
    the run continues.

    The run's page shows the progress of the stage and, at its end, its results. If the network or a
    remote server was unreachable, Prefect retries the task after a delay; other runs may compute in
    the meantime. What records or shows the results neither fails the stage nor keeps the slot.
    """
    log = make_logger()
    run_artifacts = artifacts.RunArtifacts(address, log)

    def on_line(line: str) -> None:
        log(line)
        run_artifacts.line(line)

    result, meter = "cancelled", Meter()
    tracker.start(address, meter)
    try:
        outcome = dvc_stages.run(address, on_line, around=computing(address, meter, log))
        result = outcome.value
        log(f"[{address}] {result}")
        return outcomes.warned(address) or outcome
    except Exception as error:
        result = "failed"
        if isinstance(error, Unreachable):
            attempt, attempts = task_run.run_count, 1 + len(RETRY_DELAYS)
            retry = "not tried again"
            if attempt < attempts:
                retry = f"tried again in {RETRY_DELAYS[attempt - 1]:g} s"
            log(f"[{address}] out of reach at try {attempt} of {attempts}: {retry}")
        raise
    finally:
        with bookkeeping(f"recording {address} in MLflow", log):
            tracker.finish(result)
        if result == dvc_stages.Outcome.ran.value:
            with bookkeeping(f"recording the provenance of {address}", log):
                provenance.record_provenance(address, run_ref, tracker.page(address), meter)
        run_artifacts.end(result)


@contextmanager
def computing(address: str, meter: Meter, log: LogLine) -> Iterator[None]:
    """Measure a stage while it computes; all but quick stages wait for a compute slot first."""
    if split_address(address)[0] in QUICK_STAGES:
        slot: AbstractContextManager[None] = nullcontext()
    else:
        slot = concurrency.compute_slot(log, gpus.processes(load_params(), address))
    with slot, meter:
        yield


def write_report(rounds: list[str], locks: Locks, log: LogLine) -> None:
    page.write_pages(rounds, locks, log)
    with bookkeeping(f"writing {page.REPORT} (`rondo report` tries again)", log):
        log(f"report with charts and samples: {page.write(rounds, locks).resolve()}")


def run_id() -> str:
    """The name of this run: its start in UTC and the beginning of the flow run's id."""
    home = HOME.resolve()
    hold_run_lock(decisions_path(home))

    def new_id() -> str:
        return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{str(flow_run.id)[:8]}"

    return str(decide_once(home, "run", new_id))


def run_name() -> str:
    """The flow run's name in Prefect: what a person typed, else preset or swept key; then the name
    of branch and folder.
    """
    run = run_id()
    return f"{kind_of_run(HOME.resolve())} {run}"


def kind_of_run(home: Path) -> str:
    """The name that a person gave this flow run, else its preset or swept key."""
    parameters = flow_run.parameters
    typed = decide_once(home, "name", lambda: run_names.typed_name(flow_run.name))
    return str(typed or parameters.get("key") or parameters.get("preset") or flow_run.flow_name)


@flow(name="rlhf-pipeline", flow_run_name=run_name, persist_result=False)
@outcomes.errors_as_states
def rlhf_pipeline(
    preset: PresetName = KEEP,
    rounds: Rounds = 0,
    settings: Settings = [],  # noqa: B006
    isolated: bool = False,
    rerun: list[str] = [],  # noqa: B006
) -> State[Any]:
    """Data preparation, SFT, reward model, PPO, evaluation and badcase replay, round after round,
    with gates between.

    Args:
        preset: An overlay on the defaults. `keep`: params.yaml as it is; `default`: the defaults.
        rounds: Number of rounds. 0: the number in params.yaml or the preset.
        settings: Single values, section.key=value.
        isolated: Work in a new git worktree and commit the results to the branch `runs/RUN`.
        rerun: Ended rounds to run again with these settings, and with them all later ones; `all`
            for every round. A preset runs every round again.
    """
    return pipeline(run_id(), preset, lambda: rounds, settings, isolated, rerun)


def pipeline(
    run: str,
    preset: str,
    rounds: Callable[[], int],
    settings: list[str],
    isolated: bool,
    rerun: Collection[str] = (),
) -> State[Any]:
    """Run the stages of all rounds; the body of `rlhf_pipeline`, also for other flows.

    Args:
        run: the name of the run.
        rounds: returns the number of rounds, 0 for the number in params.yaml or the preset; it is
            called when no other run uses the folder.
        rerun: ended rounds to run again, or ALL.

    Returns:
        The final state: Completed, or Failed with the name GateFailed or GatesFailed.

    Raises:
        BadInput: a param is invalid, or names what a form may not name; or MLflow's address can
            never take a record.
        Pause: a gate waits for a decision.
    """
    log, home = make_logger(), HOME.resolve()
    # 1. Check the parameters and MLflow's address, before there is anything to clean up.
    check_rerun(rerun)
    check_address(store_uri(home))
    checked = decided_params(home, run) or resolve(preset, None, settings)
    files = checked_files(checked)
    server = fork_server.fork_server(dvc_stages.stage_environment())
    tree = workspace(run, home, log, files) if isolated else working_tree(home, log)
    recorded = run_record.recorded(home, run, preset, checked, isolated, str(flow_run.id), log)
    with reporting("run", log, dvc_stages.QUIET_SECONDS), recorded, server, tree as folder:
        # 2. Write params.yaml.
        number = rounds() or None
        params = own_params(home, run, lambda: resolve(preset, number, settings))
        ended = history.rounds_to_end(params, preset, rerun)
        changes = [f"  {change}" for change in history.write(params, ended)]
        log(f"run {run} in {folder}")
        log("\n".join(["params.yaml changed:", *changes]) if changes else "params.yaml: no changes")
        if ended:
            log(f"ended, not run again (--rerun does): {', '.join(ended)}")
        # 3. Find the stages to run, and what they need.
        names = history.open_rounds(params, ended)
        shown = [*ended[-SHOWN_ENDED:], *names]
        inputs.refresh(params, home, log)
        addresses, todo = stages_to_run(params, names, log)
        # 4. Run the stages.
        run_ref = provenance.RunRef(run, revision())
        tags = provenance.run_tags(run_ref, params, preset, isolated, home)
        settings_of_run = provenance.main_settings(params, preset)
        tracker = MlflowTracker(run, store_uri(home), home, tags, log, params.mlflow.upload)
        tracker.name, tracker.params = run_names.short_name(kind_of_run(home), run), settings_of_run
        tracker.begin()
        link_mlflow(tracker, names, log)
        remaining, gate_error = list(addresses), None
        try:
            run_stages(remaining, names, run_ref, tracker, log)
        except GateFailed as error:
            gate_error = error
        except Pause:
            with bookkeeping(run_record.RECORDING, log):
                run_record.end(home, run, run_record.State.waiting)
            tracker.wait()
            raise  # the flow starts again from the top when a person has decided
        except Exception:
            close(run, shown, names, remaining, tracker, log, todo)
            raise
        except BaseException:  # Ctrl-C, Cancel: there is no time for a report
            with bookkeeping("recording the run", log):
                tracker.close("KILLED", {}, seconds=INTERRUPTED_SECONDS)
            log(f"Interrupted at {remaining[0] if remaining else 'the end'}.")
            raise
        finally:
            if remaining and isolated and not deployment.id:  # Prefect's UI has Resume and Retry
                log(GOES_ON.format(run=run))
        # 5. Write the results.
        ended_with = close(run, shown, names, remaining, tracker, log, todo)
        return outcomes.final_state(ended_with, gate_error)


def checked_files(params: Params) -> list[Path]:
    """The files of the user that the params name.

    Raises:
        BadInput: one is missing, or a run from the browser may not name it.
    """
    files = [path for paths in user_files(params).values() for path in paths]
    if deployment.id:
        check_form(params, files)
    return files


def stages_to_run(params: Params, rounds: list[str], log: LogLine) -> tuple[list[str], set[str]]:
    """The stages of a run in order, and those of them that are not up to date.

    Raises:
        RondoError: there is no room for their models, on disk or in memory.
    """
    with progress(dvc_stages.DVC_COMPARES):
        addresses, todo = dvc_stages.order_and_changes(rounds)
    needs.check(params, addresses, todo, log)
    return addresses, todo


def run_stages(
    remaining: list[str],
    rounds: list[str],
    run_ref: provenance.RunRef,
    tracker: MlflowTracker,
    log: LogLine,
) -> None:
    """Run the stages of `remaining` in order, and remove each from `remaining` when it is done.

    Raises:
        GateFailed: an SFT or reward gate failed, or the last round's promotion gate.
        Pause: a gate waits for a decision.
    """
    # A failed promotion gate of an earlier round does not end the run: the next round learns from
    # the badcases of its policy.
    may_fail = {f"gate_promote@{name}" for name in rounds[:-1]}
    decided = ""  # the gate on which the form has just decided
    while remaining:
        address = remaining[0]
        ends_run = address not in may_fail
        with bookkeeping(run_record.RECORDING, log):
            run_record.begin_stage(tracker.home, tracker.run, address)
        try:
            ended = run_stage(address, run_ref, tracker)
            if isinstance(ended, State) and ended.name != outcomes.WARNED:
                ended.result()  # raises the error of the stage
        except GateFailed as error:
            if address != decided and approval.apply_ui_decision(address, revise=ends_run):
                decided = address
                continue  # the gate runs again and reads the decision
            if ends_run and address == decided:
                raise GateFailed(f"{error}; *Retry* asks again") from None
            if ends_run:
                raise
            log(f"{error}\nNot promoted; the next round learns from its badcases.")
        remaining.pop(0)


def close(
    run: str,
    rounds: list[str],
    names: list[str],
    remaining: list[str],
    tracker: MlflowTracker,
    log: LogLine,
    todo: set[str],
) -> outcomes.Conclusion:
    """Write and link the results at the end of a run: summary table, verdicts, report.

    Args:
        rounds: those that summary and report show.
        names: those of the run.
        remaining: the stages that did not run.
        todo: the stages that were not up to date; if there were none, an existing report is still
            valid.
    """
    locks = current_locks(unfinished=todo & {*remaining})
    with bookkeeping("the summary", log):
        summary.write(rounds, locks)
        log(summary.text(rounds, locks))
    if todo or not page.REPORT.exists():
        write_report(rounds, locks, log)
    with bookkeeping("keeping the report", log):
        run_record.keep_pages(tracker.home, run, rounds)
        ended = run_record.State.failed if remaining else run_record.State.completed
        run_record.end(tracker.home, run, ended)
    ended_with = outcomes.conclusion(names or rounds, locks, log)
    report = run_pages.served_report(tracker.home, run) or tracker.page(text=page.REPORT.name)
    files = [path for path in (summary.SUMMARY, page.REPORT) if path.exists()]
    with bookkeeping("recording the run", log):
        pages = [
            ("Run in Prefect", flow_run_page(prefect_pages(), str(flow_run.id))),
            ("Report", report),
        ]
        tracker.close(
            "FAILED" if remaining or ended_with.gates_failed else "FINISHED",
            {path.name: path.read_text("utf-8") for path in files},
            outcomes.tags(ended_with, names, locks, pages),
            outcomes.numbers(names, locks),
        )
    with bookkeeping("showing the summary in Prefect", log):
        results = cards.links([slug(address) for address in dvc_stages.stage_order(names)])
        text = summary_card(ended_with.sentence, results)
        cards.show(MarkdownArtifact(key="summary", markdown=text, description=f"Run {run}"))
    if page.REPORT.exists():
        link(report, "report", "Report: results, and the stage at fault", log)
    if remaining:
        log(f"Ended at {remaining[0]}.")
    return ended_with


def summary_card(sentence: str, results: list[str]) -> str:
    """The summary in Prefect: the sentence and the answers, then links to the cards of the stages
    in their order, and the table.
    """
    # Prefect renders Markdown with the HTML in it; the summary has texts of people
    text = html.escape(summary.SUMMARY.read_text("utf-8"), quote=False)
    answers, _, table = text.partition("\n\n")
    headline = f"**{stage_card.escaped(sentence)}**"
    return "\n\n".join(filter(None, [headline, answers, " | ".join(results), table]))


def link_mlflow(tracker: MlflowTracker, rounds: list[str], log: LogLine) -> None:
    """Show and record the page of a run, which computes these rounds."""
    url = tracker.page()
    link(url, "mlflow", "This run in MLflow: parameters, curves, models", log)
    with bookkeeping(run_record.RECORDING, log):
        run_record.set_up(tracker.home, tracker.run, rounds, url)


def link(url: str | None, key: str, text: str, log: LogLine) -> None:
    """Show a link on the run's page in Prefect; nothing if there is no URL."""
    if url:
        with bookkeeping(f"showing the link {key} in Prefect", log):
            cards.show(LinkArtifact(link=url, link_text=text, key=key, description=text))


@flow(name="continue", flow_run_name="continue {run}", persist_result=False)
@outcomes.errors_as_states
def continued_run(run: str) -> State[Any]:
    """An isolated run goes on in its workspace, with its own settings.

    Args:
        run: Its name.
    """
    take_over(HOME.resolve(), run)
    return pipeline(run_id(), KEEP, lambda: 0, [], True)


def rounds_with_one_more(home: Path) -> int:
    """The number of rounds with one more, decided once per flow run.

    Another run may have added more rounds since; these are kept.
    """
    return max(int(decide_once(home, "rounds", one_more_round)), len(load_params().rounds))


@flow(name="next-round", flow_run_name=run_name, persist_result=False)
@outcomes.errors_as_states
def next_round(
    settings: Settings = [],  # noqa: B006
    isolated: bool = False,
) -> State[Any]:
    """One more round, on the badcases of the last one; earlier rounds do not run again. If the last
    round is not complete, this flow completes it instead.

    Args:
        settings: Single values, section.key=value.
        isolated: Work in a new git worktree and commit the results to the branch `runs/RUN`.
    """
    home = HOME.resolve()
    return pipeline(run_id(), KEEP, lambda: rounds_with_one_more(home), settings, isolated)

"""Runs against a real Prefect server: retries of a stage and of a run, compute slots, decisions in
the form, `next-round`.
"""

import html
import json
import logging
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import chdir, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas import FlowRun, SetStateStatus, State
from prefect.client.schemas.filters import ArtifactFilter
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow
from prefect.logging.loggers import get_logger
from prefect.states import Cancelled, Scheduled

from flows import pipeline
from flows.core.config import resolve, write_params
from flows.core.git import git
from flows.core.locks import current_locks
from flows.execution import fork_server, needs
from flows.execution.dvc_stages import command_environment
from flows.orchestration.concurrency import LIMIT, compute_slot
from flows.pipeline import next_round, rlhf_pipeline
from flows.report import diagnosis, run_pages, summary
from flows.tracking.mlflow_store import experiment_of
from stages.lib.core.ended_rounds import params_of
from stages.lib.core.errors import BadInput
from stages.lib.core.files import write_json
from stages.lib.core.params import load_params
from tests.paths import ROOT
from tests.servers import read_until, request, rondo, start_rondo, until

ExecuteLogged = Callable[..., tuple[State[Any], str]]
FIRST_STEP = "[sft@r0] step 1/3"


def submit(
    prefect: SyncPrefectClient, flow: Flow[..., Any], name: str | None = None, **parameters: Any
) -> FlowRun:
    """A run of a deployment, as the form creates it."""
    deployment = prefect.create_deployment(prefect.create_flow(flow), "form")
    return prefect.create_flow_run_from_deployment(deployment, name=name, parameters=parameters)


def execute(prefect: SyncPrefectClient, flow: Flow[..., Any], run: FlowRun) -> State[Any]:
    """What the process does that a worker starts for a scheduled run."""
    with suppress(Pause):  # ends the process of a suspended run
        run_flow(flow, flow_run=prefect.read_flow_run(run.id), return_type="state")
    state = prefect.read_flow_run(run.id).state
    assert state is not None
    return state


def retry(prefect: SyncPrefectClient, run: FlowRun) -> None:
    """The button *Retry* of a run's page."""
    prefect.set_flow_run_state(run.id, Scheduled(name="AwaitingRetry"))


@pytest.fixture
def execute_logged(prefect: SyncPrefectClient, caplog: pytest.LogCaptureFixture) -> ExecuteLogged:
    """A function that executes a run of a flow; returns its last state and its log."""
    caplog.set_level(logging.INFO, "rondo")

    def execute_one(run: FlowRun, flow: Flow[..., Any] = rlhf_pipeline) -> tuple[State[Any], str]:
        caplog.clear()
        state = execute(prefect, flow, run)
        # Prefect's own loggers have each line too
        lines = [record.getMessage() for record in caplog.records if record.name == "rondo"]
        return state, "\n".join(lines)

    return execute_one


def set_retry_delays(monkeypatch: pytest.MonkeyPatch, delays: list[float]) -> None:
    """Seconds between the tries of a stage, which the pipeline reads as it is imported."""
    stage = pipeline.run_stage.with_options(retries=len(delays), retry_delay_seconds=delays)
    monkeypatch.setattr(pipeline, "run_stage", stage)
    monkeypatch.setattr(pipeline, "RETRY_DELAYS", delays)


def states(api: str, run: FlowRun, address: str) -> set[str]:
    """The names of all states that a stage of this run had."""
    of_run = {"flow_runs": {"id": {"any_": [str(run.id)]}}}
    task_runs = request(f"{api}/task_runs/filter", of_run)
    return {
        state["name"]
        for task_run in task_runs
        if task_run["name"] == address
        for state in request(f"{api}/task_run_states/?task_run_id={task_run['id']}")
    }


def test_an_unreachable_server_is_tried_a_second_time(
    project: Path,
    api: str,
    prefect: SyncPrefectClient,
    execute_logged: ExecuteLogged,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_retry_delays(monkeypatch, [1])
    run = submit(prefect, rlhf_pipeline, settings=["sft.max_steps=7"])
    state, log = execute_logged(run)
    assert state.is_completed(), state.message
    assert log.count(FIRST_STEP) == 2
    assert "[sft@r0] out of reach at try 1 of 2: tried again in 1 s" in log
    assert "[evaluate@r0] ran" in log
    # the server may record states with a delay
    until(lambda: {"AwaitingRetry", "Completed"} <= states(api, run, "sft@r0"))


def test_a_server_that_stays_unreachable_ends_the_run_with_4(project: Path, api: str) -> None:
    done = rondo(
        project,
        *("run", "--set", "sft.max_steps=8"),
        RONDO_NETWORK_WAITS="0,1",
        MLFLOW_TRACKING_URI="off",
        PREFECT_API_URL=api,
    )
    assert done.returncode == 4
    assert done.stdout.count(FIRST_STEP) == 3
    assert "[sft@r0] out of reach at try 3 of 3: not tried again" in done.stdout
    assert "[gate_sft@r0]" not in done.stdout
    assert "rondo: Unreachable: sft@r0: " in done.stderr and "no answer" in done.stderr


def test_a_run_whose_gates_warn_is_not_green_and_has_its_name_and_verdict_everywhere(
    project: Path,
    api: str,
    prefect: SyncPrefectClient,
    shared_database: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", shared_database)
    settings = ["gates.sft.loss_drop=0.9", "gates.sft.policy=warn"]
    run = submit(prefect, rlhf_pipeline, "my-first-smoke", settings=settings, isolated=True)
    failed = execute(prefect, rlhf_pipeline, run)
    retry(prefect, run)
    again = execute(prefect, rlhf_pipeline, run)
    [folder] = (project / ".rondo/workspaces").iterdir()
    with chdir(folder):
        sentence = diagnosis.headline(["r0"], current_locks())
    for state in (failed, again):
        assert state.is_failed() and (state.name, state.message) == ("GatesFailed", sentence)
    assert (folder / ".rondo/ended").exists()
    until(lambda: "Warned" in states(api, run, "gate_sft@r0"))
    assert "Completed" not in states(api, run, "gate_sft@r0")
    until(lambda: "Completed" in states(api, run, "evaluate@r0"))
    name = folder.name
    assert prefect.read_flow_run(run.id).name == f"my-first-smoke {name}"

    client = MlflowClient(shared_database)
    query = f"tags.`rondo.run` = '{name}' AND tags.`rondo.address` = 'pipeline'"
    [recorded] = client.search_runs([experiment_of(client)], query)
    assert recorded.info.status == "FAILED"
    assert recorded.info.run_name == f"my-first-smoke {str(run.id)[:8]}"
    assert recorded.data.params["preset"] == "keep"
    assert recorded.data.params["gates.sft.policy"] == "warn"
    assert recorded.data.tags["r0.gate_sft"] == "failed; the run went on, since the gate only warns"
    assert recorded.data.metrics["final/r0/win_rate"] == 0.8
    assert recorded.data.metrics["final/r0/kl"] == 6.0
    note, _, links = recorded.data.tags["mlflow.note.content"].partition("\n\n")
    assert note == html.escape(sentence, quote=False)
    assert f"/runs/flow-run/{run.id})" in links

    query = f"tags.`rondo.run` = '{name}' AND tags.`rondo.address` = 'sft@r0'"
    [sft] = client.search_runs([experiment_of(client)], query)
    [made] = json.loads((folder / ".rondo/work/r0/sft/made.json").read_text()).values()
    duration = (sft.info.end_time - sft.info.start_time) / 1000
    assert duration == pytest.approx(made["seconds"], abs=0.01)  # the report's


def test_another_failure_is_not_retried(
    project: Path,
    prefect: SyncPrefectClient,
    execute_logged: ExecuteLogged,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_retry_delays(monkeypatch, [0, 0])
    state, log = execute_logged(submit(prefect, rlhf_pipeline, settings=["sft.max_steps=1"]))
    assert log.count(FIRST_STEP) == 1 and "tried again" not in log
    assert str(state.message).startswith("BadInput: sft@r0: ")
    assert "rows missing" in str(state.message)


def test_a_run_that_begins_again_keeps_its_own_params_and_rounds_of_others(
    project: Path, prefect: SyncPrefectClient, execute_logged: ExecuteLogged
) -> None:
    run = submit(prefect, rlhf_pipeline, settings=["gates.sft.loss_drop=0.9"])
    failed, log = execute_logged(run)
    assert failed.name == "GateFailed", failed.message
    [name] = re.findall(r"run \S+ in .*", log)
    other_run = resolve("keep", 2, ["gates.sft.loss_drop=0.1", "seed=5"])
    write_params(other_run)

    retry(prefect, run)
    again, log = execute_logged(run)
    assert again.name == "GateFailed", again.message
    params = load_params()
    assert (params.gates.sft.loss_drop, params.seed) == (0.9, 0)
    assert list(params.rounds) == ["r0", "r1"]
    assert re.findall(r"run \S+ in .*", log) == [name]


def test_only_stages_that_compute_wait_for_a_slot(
    finished_project: Path,
    api: str,
    prefect: SyncPrefectClient,
    execute_logged: ExecuteLogged,
) -> None:
    slot = {"names": [LIMIT], "slots": 1, "mode": "concurrency", "lease_duration": 600}
    with compute_slot(pytest.fail):
        pass  # the limit is there
    lease = request(f"{api}/v2/concurrency_limits/increment-with-lease", slot)["lease_id"]

    # the gate runs, all other stages are unchanged
    changed_gate = submit(prefect, rlhf_pipeline, settings=["gates.sft.loss_drop=0.1"])
    state, log = execute_logged(changed_gate)
    assert state.is_completed(), state.message
    assert "[gate_sft@r0] ran" in log and "waiting" not in log

    run = start_rondo(finished_project, "run", "--set", "seed=1", PREFECT_API_URL=api)
    waiting = read_until(run, "waiting for a slot of rondo-compute")
    assert "step" not in waiting
    request(f"{api}/v2/concurrency_limits/decrement-with-lease", {"lease_id": lease})
    stdout, stderr = run.communicate(timeout=600)
    assert run.returncode == 0, stderr
    assert "[prepare@r0] ran" in stdout


def test_an_edited_data_file_is_seen_by_isolated_runs_and_by_plain_dvc(
    project: Path,
    prefect: SyncPrefectClient,
    execute_logged: ExecuteLogged,
    empty: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def log_of_run(isolated: bool, mlflow: str = "off") -> str:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow)
        state, log = execute_logged(
            submit(prefect, rlhf_pipeline, settings=settings, isolated=isolated)
        )
        assert state.is_completed(), state.message
        return log

    store = tmp_path_factory.mktemp("store") / "mlflow.db"
    database = f"sqlite:///{shutil.copy(empty, store)}"
    data = project / "pairs.jsonl"
    data.write_text('{"label": 1}\n')
    settings = ["assets.data=files", "prepare.sources=[{path: pairs.jsonl}]"]

    first = log_of_run(isolated=True, mlflow=database)
    assert "[prepare@r0] ran" in first
    assert "changed since the last run" not in first
    assert "[prepare@r0] restored" in log_of_run(isolated=False, mlflow=database)

    data.write_text('{"label": 0}\n')
    edited = log_of_run(isolated=True)
    assert "changed since the last run: pairs.jsonl" in edited
    assert "[prepare@r0] ran" in edited

    client = MlflowClient(database)
    runs = client.search_runs(
        [experiment_of(client)], "tags.`rondo.address` = 'pipeline'", order_by=["start_time"]
    )
    assert [run.data.tags["isolated"] for run in runs] == ["True", "False"]
    assert len({run.data.tags["project"] for run in runs}) == 1
    data.write_text('{"label": 2}\n')
    for expected in (True, False):
        repro = subprocess.run(
            [fork_server.python(), "-m", "dvc", "repro", "prepare@r0"],
            env=command_environment() | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ("[prepare@r0] step" in repro.stdout) is expected, repro.stdout


def question_of(prefect: SyncPrefectClient, run: FlowRun) -> str:
    """The text above the form of a suspended run."""
    state = prefect.read_flow_run(run.id).state
    assert state is not None and state.state_details.run_input_keyset
    key = state.state_details.run_input_keyset["description"]
    return str(json.loads(prefect.read_flow_run_input(run.id, key)))


def of_id(artifact: str) -> ArtifactFilter:
    return ArtifactFilter.model_validate({"id": {"any_": [artifact]}})


def listed_state(project: Path) -> str:
    """The state of the only run in the list of all runs."""
    [row] = run_pages.rows(project / ".rondo")
    return row.state


def test_a_decision_in_the_form_is_valid_for_its_numbers_and_a_refusal_ends_the_run(
    project: Path, prefect: SyncPrefectClient
) -> None:
    settings = ["gates.sft.loss_drop=0.9", "gates.sft.policy=ask"]
    run = submit(prefect, rlhf_pipeline, settings=settings)
    suspended = execute(prefect, rlhf_pipeline, run)
    assert suspended.name == "Suspended"
    assert listed_state(project) == "waits for a decision at gate_sft@r0"
    days_to_decide = suspended.state_details.pause_timeout - datetime.now(UTC)
    assert timedelta(days=6) < days_to_decide < timedelta(days=7)

    prefect.set_flow_run_state(run.id, Cancelled())  # without a decision
    retry(prefect, run)
    assert execute(prefect, rlhf_pipeline, run).name == "Suspended"

    decision = {"by": "Ada", "reason": "too little"}
    prefect.resume_flow_run(run.id, {"decision": "approve", **decision})
    stage = project / "stage.py"
    stage.write_text(stage.read_text().replace('"loss_after": 4.67', '"loss_after": 4.57'))
    assert execute(prefect, rlhf_pipeline, run).name == "Suspended"  # asks for the new number
    assert not (project / "approvals/r0/sft.json").exists()

    undecided = prefect.resume_flow_run(run.id, decision)  # who only presses Submit
    assert undecided.status == SetStateStatus.REJECT
    prefect.resume_flow_run(run.id, {"decision": "refuse", **decision})
    refused = execute(prefect, rlhf_pipeline, run)
    assert refused.name == "GateFailed"
    revise = (
        'To revise it: `rondo approve sft r0 --reason "..."`, then run again; *Retry* asks again'
    )
    assert f"Refused by Ada: too little. {revise}" in str(refused.message)
    approval = json.loads((project / "approvals/r0/sft.json").read_text())
    failed = {"sft.loss_before - sft.loss_after": pytest.approx(0.6)}
    assert approval == {"approved": False, "failed": failed, **decision}
    verdict = json.loads((project / "reports/r0/gate_sft.json").read_text())
    assert verdict["approval"] == approval and not verdict["may_continue"]

    retry(prefect, run)  # asks again, also after the same refusal
    assert execute(prefect, rlhf_pipeline, run).name == "Suspended"
    prefect.resume_flow_run(run.id, {"decision": "refuse", **decision})
    assert execute(prefect, rlhf_pipeline, run).name == "GateFailed"
    retry(prefect, run)
    assert execute(prefect, rlhf_pipeline, run).name == "Suspended"
    question = question_of(prefect, run)
    assert "It was refused by Ada: too little" in question
    links = re.findall(r"\[(\S+)\]\(\S+/artifacts/artifact/(\S+)\)", question)
    artifacts = {key: prefect.read_artifacts(artifact_filter=of_id(id_))[0] for key, id_ in links}
    assert list(artifacts) == ["gate-sft-r0", "sft-r0"]
    assert all(artifact.key == key for key, artifact in artifacts.items())
    prefect.resume_flow_run(run.id, {"decision": "approve", "by": "Bo", "reason": "enough"})
    assert execute(prefect, rlhf_pipeline, run).name == "Completed"
    assert listed_state(project) == "completed"
    assert json.loads((project / "approvals/r0/sft.json").read_text())["by"] == "Bo"


def test_a_retried_run_resumes_in_its_own_folder(project: Path, prefect: SyncPrefectClient) -> None:
    def fails_in_its_only_folder(run: FlowRun) -> Path:
        state = execute(prefect, rlhf_pipeline, run)
        assert state.is_failed() and "rows missing" in str(state.message)
        [folder] = (project / ".rondo/workspaces").iterdir()
        return folder

    run = submit(prefect, rlhf_pipeline, settings=["sft.max_steps=1"], isolated=True)
    folder = fails_in_its_only_folder(run)
    prepared = (folder / "rounds/r0/prepare/metrics.jsonl").stat().st_mtime_ns
    retry(prefect, run)
    assert fails_in_its_only_folder(run) == folder
    assert (folder / "rounds/r0/prepare/metrics.jsonl").stat().st_mtime_ns == prepared


def test_a_run_that_a_gate_stopped_shows_no_number_of_the_committed_run(
    finished_project: Path, prefect: SyncPrefectClient
) -> None:
    """A worktree has the metrics of all stages of the last committed run."""

    def shown(text: str) -> dict[str, str]:
        rows = (line.strip("| ").split("|") for line in text.splitlines() if line.startswith("|"))
        return {row[0].strip(): row[-1].strip() for row in rows}

    subprocess.run(["git", "add", "dvc.lock", "rounds"], check=True)
    subprocess.run(["git", "commit", "-q", "-m", "a finished run"], check=True)
    settings = ["seed=5", "gates.sft.loss_drop=0.9"]
    run = submit(prefect, rlhf_pipeline, settings=settings, isolated=True)
    assert execute(prefect, rlhf_pipeline, run).name == "GateFailed"
    [workspace] = (finished_project / ".rondo/workspaces").iterdir()
    branch = git("show", f"runs/{workspace.name}:records/{workspace.name}/summary.md")
    for text in ((workspace / "reports/summary.md").read_text(), branch):
        assert shown(text)["SFT loss, nats per token"] == "5.170 -> 4.670"
        assert shown(text)["judge score, SFT -> policy"] == "-"
    page = (workspace / "reports/report.html").read_text()
    assert "rondo run --isolated" in page and "--set seed=5" in page and "seed 5" in page
    assert "0.26 -&gt; 0.70" not in page
    assert listed_state(finished_project) == "GateFailed at gate_sft@r0"
    [row] = run_pages.rows(finished_project / ".rondo")
    assert [how for *_, how in row.gates] == ["failed", "not reached", "not reached"]
    assert row.win_rate == "-" and {"seed=5", "gates.sft.loss_drop=0.9"} <= {*row.record.changes}
    kept = finished_project / f".rondo/reports/{workspace.name}/report.html"
    assert kept.read_text() == page  # it stays when the workspace is removed

    assert "0.26 -> 0.70" in summary.text(["r0"], current_locks())


def test_a_bad_value_fails_the_run_before_it_writes_anything(
    project: Path, prefect: SyncPrefectClient, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has its message, and no traceback, as the process of a worker logs it."""
    run = submit(prefect, rlhf_pipeline, settings=["ppo.gamma=7"], isolated=True)
    logger = get_logger("prefect.flow_runs")
    with caplog.at_level(logging.INFO, logger.name), suppress(BadInput):
        run_flow(
            rlhf_pipeline,
            flow_run=prefect.read_flow_run(run.id),
            error_logger=logger,
        )
    failed = prefect.read_flow_run(run.id).state
    assert failed and failed.is_failed()
    assert str(failed.message).startswith("BadInput: params.yaml with --set: ppo.gamma: ")
    assert [record.getMessage() for record in caplog.records if "ppo.gamma" in record.getMessage()]
    assert not [record for record in caplog.records if record.exc_info]
    assert not (project / ".rondo/workspaces").exists()


def test_a_run_without_the_disk_for_its_models_runs_no_stage(
    project: Path, prefect: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "free_bytes", lambda: 1000)
    failed = execute(prefect, rlhf_pipeline, submit(prefect, rlhf_pipeline))
    assert failed.is_failed() and "1.0 kB are free" in str(failed.message)
    assert not (project / "rounds/r0/prepare").exists()


def test_a_run_without_the_memory_for_its_stages_runs_none(
    project: Path, prefect: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with 0.4 GB, less than the models of a stage take."""
    monkeypatch.setattr(needs, "ram_bytes", lambda: 4 * 10**8)
    failed = execute(prefect, rlhf_pipeline, submit(prefect, rlhf_pipeline))
    assert failed.is_failed() and "this machine has 400.0 MB" in str(failed.message)
    assert not (project / "rounds/r0/prepare").exists()


def round_names() -> list[str]:
    return list(load_params().rounds)


def test_next_round_keeps_the_results_of_the_rounds_before(
    finished_project: Path, prefect: SyncPrefectClient, execute_logged: ExecuteLogged
) -> None:
    write_json(Path("rounds/r0/replay/metrics.json"), {})
    loss_drop = load_params().gates.sft.loss_drop
    one_more = submit(prefect, next_round, settings=["gates.sft.loss_drop=0.3"])
    done, log = execute_logged(one_more, next_round)
    assert done.is_completed(), done.message
    assert "ended, not run again (--rerun does): r0" in log
    assert round_names() == ["r0", "r1"]
    assert params_of("r0").gates.sft.loss_drop == loss_drop
    assert load_params().gates.sft.loss_drop == 0.3
    assert "@r0]" not in log and "[evaluate@r1] ran" in log

    # nothing of this is committed, and an isolated run has it
    settings = ["gates.sft.loss_drop=0.31"]
    tried, log = execute_logged(submit(prefect, rlhf_pipeline, settings=settings, isolated=True))
    assert tried.is_completed(), tried.message
    assert "ended, not run again (--rerun does): r0" in log
    assert "[evaluate@r1] restored" in log and "@r0]" not in log
    [workspace] = Path(".rondo/workspaces").iterdir()
    for path in ("rounds/r0/params.yaml", "rounds/r0/evaluate/data/rows.jsonl"):
        assert (workspace / path).read_text() == Path(path).read_text()
    committed = git("ls-tree", "-r", "--name-only", f"runs/{workspace.name}").splitlines()
    assert "rounds/r0/params.yaml" in committed

    again, log = execute_logged(submit(prefect, rlhf_pipeline, rerun=["r0"]))
    assert again.is_completed(), again.message
    assert "[gate_sft@r0] ran" in log
    assert "[sft@r0] unchanged" in log and round_names() == ["r0", "r1"]


def test_each_run_of_next_round_adds_one_round_and_its_retry_adds_none(
    project: Path, prefect: SyncPrefectClient
) -> None:
    def fails(run: FlowRun) -> bool:
        return "rows missing" in str(execute(prefect, next_round, run).message)

    write_json(Path("rounds/r0/replay/metrics.json"), {})
    first = submit(prefect, next_round, settings=["sft.max_steps=1"])  # ends soon
    assert fails(first) and round_names() == ["r0", "r1"]
    write_json(Path("rounds/r1/replay/metrics.json"), {})
    retry(prefect, first)
    assert fails(first) and round_names() == ["r0", "r1"]
    assert fails(submit(prefect, next_round)) and round_names() == ["r0", "r1", "r2"]

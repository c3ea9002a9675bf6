"""`rondo up` as a user runs it: real processes, Prefect and MLflow servers, a small DVC project."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest
from prefect.blocks.notifications import SlackWebhook
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from pydantic import SecretStr

from flows.core.services import is_up, last_servers
from flows.orchestration import notifications
from flows.orchestration.artifacts import picture_markdown
from flows.report import run_pages
from flows.report.line_charts import Curve, lines
from tests.browser import Ui, look_at_the_report, open_page
from tests.flows import attacks
from tests.paths import ROOT
from tests.servers import free_port, of_project, prefect_api, read_until, request, rondo, until


@dataclass
class Receiver:
    """Of a webhook, on this machine: the texts that it received."""

    url: str
    texts_received: list[str]

    def wait_for(self, *texts: str) -> None:
        until(
            lambda: any(all(text in received for text in texts) for received in self.texts_received)
        )


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    texts_received: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            texts_received.append(
                json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
            )
            self.send_response(204)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever).start()
        yield Receiver(f"http://127.0.0.1:{server.server_port}/", texts_received)
        server.shutdown()


def test_serve_a_run_from_the_ui_a_failed_gate_and_the_end_of_all(
    project: Path,
    receiver: Receiver,
    tmp_path_factory: pytest.TempPathFactory,
    copy_tables: Callable[[Path], None],
) -> None:
    """One server for the ways to use it, since its start is what takes the time."""
    copy_tables(project)
    environment = with_the_flow(project) | {"OPENAI_API_KEY": attacks.API_KEY}
    server = up(project, environment | {"RONDO_NOTIFY_URL": receiver.url + attacks.HOOK})
    try:
        printed = read_until(server, "Ctrl-C")
        assert "notifications: block `rondo` (Custom Webhook)" in printed
        api, [link] = prefect_api(project), re.findall(r"http://\S+#\S+:\S+", printed)
        assert re.search(r"MLflow +http://\S+/#/experiments/\d+/runs\?workflowType=", printed)
        second = rondo(project, "up", **environment)
        assert second.returncode == 2
        assert "already runs in this folder" in second.stderr

        attacks.without_the_string(project)
        attacks.from_pages_of_other_hosts(project)
        attacks.from_another_project(project, tmp_path_factory.mktemp("other") / ".rondo")

        pipeline = a_run_from_the_form(project, api)
        services_that_end(server, f"http://127.0.0.1:{environment['MLFLOW_PORT']}")
        a_shut_gate(project, api, environment, receiver)
        with open_page() as page:
            ui = Ui(page, last_servers(project / ".rondo").prefect, api) if page else None
            if ui:
                ui.log_in(link)
            run = a_gate_that_asks(project, api, pipeline, receiver, ui)
            if ui:
                pages_of_a_run(project, ui, run)
        sleeping = start(api, pipeline, "gates.sft.loss_drop=0.4", "sft.max_steps=2")  # sleeps
        nightly = request(f"{api}/deployments/name/next-round/next-round")
        assert [schedule["active"] for schedule in nightly["schedules"]] == [False]
        schedule = f"{nightly['id']}/schedules/{nightly['schedules'][0]['id']}"
        request(f"{api}/deployments/{schedule}", {"active": True}, "PATCH")
        until(lambda: of_project(project, "stage.py"))
        os.killpg(server.pid, signal.SIGINT)
        assert server.wait(60) == 0
        until(lambda: not of_project(project))

        server = up(project, environment)
        assert f"resumes: {sleeping}" in read_until(server, "Ctrl-C")
        [schedule] = request(f"{api}/deployments/name/next-round/next-round")["schedules"]
        assert schedule["active"]  # as the person left it
        until(lambda: of_project(project, "stage.py"))
        request(f"{api}/flow_runs/{sleeping}/set_state", {"state": {"type": "CANCELLING"}})
        until(lambda: not of_project(project, "stage.py"))
        a_killed_run(project, api, environment, receiver)
        until(lambda: request(f"{api}/flow_runs/{sleeping}")["state_type"] == "CANCELLED")
        assert "cancelled at sft@r0" in rondo(project, "status", **environment).stdout
        states = sorted(
            request(f"{api}/flow_run_states/?flow_run_id={sleeping}"),
            key=lambda state: state["timestamp"],
        )
        names = [state["name"] for state in states]
        assert names[names.index("AwaitingRetry") - 1] == "CutOff"
        assert not any(sleeping in text for text in receiver.texts_received)
        assert attacks.secrets_in_files(project) == []
        what_a_person_left(project, api)
    finally:
        os.killpg(server.pid, signal.SIGHUP)
        assert server.wait(60) == 0


def with_the_flow(project: Path) -> dict[str, str]:
    """The project with what is deployed in it, and an environment with ports of its own."""
    (project / "prefect.yaml").write_text((ROOT / "prefect.yaml").read_text())
    (project / "flows").symlink_to(ROOT / "flows")
    for command in (["add", "prefect.yaml", "flows"], ["commit", "-qm", "the flow"]):
        subprocess.run(["git", *command], cwd=project, check=True)
    return {
        "PWD": str(project.parent),  # as when `rondo up` is started by a program and not a shell
        "PREFECT_SERVER_API_PORT": free_port(),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "MLFLOW_PORT": free_port(),
        "PYTHONPATH": str(ROOT),
    }


def up(project: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    """`rondo up`; its runs share the fork server of the tests."""
    command = [sys.executable, "-m", "flows.cli", "up"]
    return subprocess.Popen(
        command,
        cwd=project,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def a_run_from_the_form(project: Path, api: str) -> str:
    """Returns the deployment's id."""
    deployment = request(f"{api}/deployments/name/rlhf-pipeline/rlhf-pipeline")
    assert deployment["pull_steps"][0]["prefect.deployments.steps.set_working_directory"][
        "directory"
    ] == str(project)
    assert deployment["parameters"] == {"isolated": True}
    filled = {"parameters": {"isolated": False, "settings": ["seed=3"]}}
    made = request(f"{api}/deployments/{deployment['id']}/create_flow_run", filled)
    assert finished(api, made["id"]) == "Completed"
    names = {run["name"] for run in request(f"{api}/task_runs/filter", {})}
    assert names == {"assets", "prepare@r0", "sft@r0", "gate_sft@r0", "evaluate@r0"}
    assert "seed: 3" in (project / "params.yaml").read_text()
    assert "the reward gate was not reached" in (project / "reports/report.html").read_text()
    its_artifacts(api, made["id"])
    with pytest.raises(urllib.error.HTTPError, match="409"):  # the form shows why
        wrong = {"parameters": {"rounds": -1}}
        request(f"{api}/deployments/{deployment['id']}/create_flow_run", wrong)
    return str(deployment["id"])


def its_artifacts(api: str, flow_run: str) -> None:
    """What Prefect shows of a run: bars, tables, verdicts, and links into MLflow."""
    of_run = {"artifacts": {"flow_run_id": {"any_": [flow_run]}}}
    artifacts = request(f"{api}/artifacts/filter", of_run)
    by_key = {artifact["key"]: (artifact["type"], artifact["data"]) for artifact in artifacts}
    stages = {"prepare-r0", "sft-r0", "gate-sft-r0", "evaluate-r0"}
    assert set(by_key) == {"report", "summary", "mlflow", *stages}
    assert len(artifacts) == len(by_key)
    assert "| loss_before | 5.17 |" in by_key["sft-r0"][1]
    assert re.search(r"Human: Hi ↵ .* a +b\n", by_key["sft-r0"][1])
    assert by_key["gate-sft-r0"][1].startswith("**passed**")
    sentence, *_ = summary = by_key["summary"][1].splitlines()
    assert sentence == "**not finished: the reward gate was not reached**"
    order = [re.findall(r"\[(\S+)\]\(http", line) for line in summary]
    assert [*filter(None, order)] == [["prepare-r0", "sft-r0", "gate-sft-r0", "evaluate-r0"]]
    titles = [line for line in summary if line.startswith("|") and "win rate against SFT" in line]
    assert titles and summary.index(titles[0]) > summary.index(sentence)
    link = re.search(r"\((\S+)\)", by_key["mlflow"][1])
    run, query = link[1].split("?") if link else ("", "")
    assert re.search(r"/#/experiments/\d+/runs/\w+$", run)
    assert query == "workflowType=machine_learning"
    address = (
        rf"\(({last_servers().prefect}/rondo/report/\d{{8}}-\d{{6}}-{flow_run[:8]}/report.html)\)"
    )
    report = re.search(address, by_key["report"][1])
    assert report and page_status(report[1]) == 401  # a browser logs in first


def page_status(url: str) -> int:
    try:
        with urllib.request.urlopen(url) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def services_that_end(server: subprocess.Popen[str], mlflow: str) -> None:
    """MLflow and the worker are started again, and the runs after this use them."""
    services = {"mlflow": {"flows.tracking.mlflow_server"}, "worker": {"worker", "start"}}
    for words in services.values():
        [guard] = guards(server, words)
        for process in guard.children():
            process.kill()
    ended = read_until(server, "it starts again")
    ended += read_until(server, "it starts again")
    assert all(f"{name} ended with" in ended for name in services)
    until(lambda: all(guards(server, words) for words in services.values()))
    until(lambda: is_up(f"{mlflow}/health"))


def guards(server: subprocess.Popen[str], words: set[str]) -> list[psutil.Process]:
    """The children of `rondo up` with these words in their command lines."""
    children = psutil.Process(server.pid).children()
    return [
        process for process in children if process.is_running() and words <= set(process.cmdline())
    ]


def a_shut_gate(project: Path, api: str, environment: dict[str, str], receiver: Receiver) -> None:
    # MLflow accepts any user and password
    mlflow = f"http://ada:{attacks.PASSWORD}@127.0.0.1:{environment['MLFLOW_PORT']}"
    tracked = environment | {"MLFLOW_TRACKING_URI": mlflow}
    failed = rondo(project, "run", "--set", "gates.sft.loss_drop=0.9", **tracked)
    assert failed.returncode == 3 and attacks.PASSWORD not in failed.stdout + failed.stderr
    assert "[sft@r0] unchanged" in failed.stdout
    assert "Ended at gate_sft@r0." in failed.stdout
    last_line = failed.stderr.splitlines()[-1]
    assert last_line.startswith("rondo: GateFailed: SFT is at fault: it learnt too little (")
    [run] = [
        run["id"]
        for run in request(f"{api}/flow_runs/filter", {})
        if run["state_name"] == "GateFailed"
    ]
    numbers = "gate sft of r0 failed:\nsft.loss_before - sft.loss_after 0.5, wanted >= 0.9:"
    receiver.wait_for(
        "rlhf-pipeline keep ",
        f"-{run[:8]}: GateFailed",
        numbers,
        f"{last_servers(project / '.rondo').prefect}/runs/flow-run/{run}",
    )


def a_gate_that_asks(
    project: Path, api: str, pipeline: str, receiver: Receiver, ui: Ui | None
) -> str:
    """In a folder of its own, through the pages if there is a browser; returns the run's id."""
    settings = ("gates.sft.loss_drop=0.9", "gates.sft.policy=ask")
    paused = ui.start(*settings) if ui else start(api, pipeline, *settings, isolated=True)
    until(lambda: request(f"{api}/flow_runs/{paused}")["state_name"] == "Suspended")
    receiver.wait_for("Suspended\nwaits for a decision", paused)
    [folder] = (project / ".rondo/workspaces").iterdir()
    input_request = (
        f"{api}/flow_runs/{paused}/input/filter",
        {"prefix": f"suspended-{folder.name}-sft-r0-"},
    )
    until(lambda: request(*input_request))  # it is written after the state
    form = json.loads(request(*input_request)[0]["value"])
    assert set(form["properties"]) == {"decision", "by", "reason"}
    word = {"decision": "approve", "by": "<b>Ada", "reason": "loss is not what this is about"}
    for missing in ({"reason": ""}, {"reason": " \n"}, {"by": " "}, {"decision": None}):
        refused = request(f"{api}/flow_runs/{paused}/resume", {"run_input": word | missing})
        assert refused["status"] == "REJECT"
    if ui:
        ui.open_run(paused)
        ui.approve(word["by"], word["reason"])
    else:
        accepted = request(f"{api}/flow_runs/{paused}/resume", {"run_input": word})
        assert accepted["status"] == "ACCEPT"
    assert finished(api, paused) == "Completed"
    verdict = json.loads((folder / "reports/r0/gate_sft.json").read_text())
    approval = verdict["approval"]
    assert (verdict["may_continue"], verdict["passed"], approval["approved"]) == (True, False, True)
    assert (approval["by"], approval["reason"]) == (word["by"], word["reason"])
    key = {"artifacts": {"key": {"any_": ["summary"]}}}
    [summary] = request(f"{api}/artifacts/latest/filter", key)
    assert "&lt;b&gt;Ada" in summary["data"] and "<b>" not in summary["data"]
    return paused


def pages_of_a_run(project: Path, ui: Ui, run: str) -> None:
    """Its artifacts, a picture, and its report: in MLflow, and as a file."""
    shown = {
        "sft-r0": "Human: Hi",
        "gate-sft-r0": "loss_before",
    }
    ui.look_at_artifacts(run, shown)
    ui.look_at_all_runs("completed")
    chart = lines("KL", [Curve("r0", "training", [1, 2], [0.5, 0.6])], ["r0"], ("update", "nats"))
    ui.look_at_a_picture(picture_markdown(chart))
    [folder] = (project / ".rondo/workspaces").iterdir()
    look_at_the_report(ui.page, folder / "reports/report.html", "approved by <b>Ada")


def a_killed_run(project: Path, api: str, environment: dict[str, str], receiver: Receiver) -> None:
    """Of the terminal, which has no worker that would notice."""
    command = [sys.executable, "-m", "flows.cli", "run", "--set", "sft.max_steps=2"]  # sleeps
    run = subprocess.Popen(
        command, cwd=project, env={**os.environ, **environment}, stdout=subprocess.DEVNULL
    )
    until(lambda: of_project(project, "stage.py"))
    [known] = [
        run["id"]
        for run in request(f"{api}/flow_runs/filter", {})
        if run["state_name"] == "Running"
    ]
    run.kill()
    run.wait()
    until(lambda: not of_project(project, "stage.py"))
    receiver.wait_for("Crashed\nits process ended", known)
    assert request(f"{api}/flow_runs/{known}")["state_name"] == "Crashed"
    [row] = [row for row in run_pages.rows(project / ".rondo") if row.record.flow_run == known]
    assert row.state == "interrupted at sft@r0"


def what_a_person_left(project: Path, api: str) -> None:
    """Asked again, with another address: one automation, off as before; a block of another type is
    told too.
    """
    [made] = request(f"{api}/automations/filter", {})
    assert (
        made["name"] == "rondo: tell of GateFailed, GatesFailed, Suspended, Failed, Crashed"
        and made["enabled"]
    )
    request(f"{api}/automations/{made['id']}", {"enabled": False}, "PATCH")
    servers = last_servers(project / ".rondo")
    address = {PREFECT_API_URL: f"{servers.prefect}/api", PREFECT_API_AUTH_STRING: servers.auth}
    with temporary_settings(address):
        assert notifications.set_up_notifications("http://127.0.0.1:9/other") == ["Custom Webhook"]
        [block] = request(f"{api}/block_documents/filter", {"include_secrets": True})
        assert block["data"]["secrets"] == {"url": "http://127.0.0.1:9/other"}
        SlackWebhook(url=SecretStr("https://hooks.slack.com/services/a/b/c")).save("rondo")
        both = notifications.set_up_notifications(None)
    assert sorted(both) == ["Custom Webhook", "Slack Webhook"]
    [left] = request(f"{api}/automations/filter", {})
    assert len(left["actions"]) == 2 and not left["enabled"]


def start(api: str, pipeline: str, *settings: str, isolated: bool = False) -> str:
    """A run as the form creates it; returns its id."""
    filled = {"parameters": {"isolated": isolated, "settings": settings}}
    return str(request(f"{api}/deployments/{pipeline}/create_flow_run", filled)["id"])


def finished(api: str, flow_run: str) -> str:
    until(
        lambda: (
            request(f"{api}/flow_runs/{flow_run}")["state_type"]
            in ("COMPLETED", "FAILED", "CRASHED")
        ),
        600,
        pause=1.0,
    )
    return str(request(f"{api}/flow_runs/{flow_run}")["state_name"])

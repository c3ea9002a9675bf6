"""`rondo` as a user runs it: real processes, Prefect and MLflow servers, a small DVC project."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest
import yaml
from prefect.blocks.notifications import SlackWebhook
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from pydantic import SecretStr

from flows import cli
from flows.core.services import is_up, last_servers
from flows.execution import fork_server
from flows.orchestration import notifications
from stages.lib.core.files import write_json
from tests.flows import attacks
from tests.paths import ROOT
from tests.servers import free_port, of_project, prefect_api, read_until, request, until


def rondo(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flows.cli", *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_bad_input_ends_with_2_before_anything_starts(project: Path) -> None:
    for arguments, message in (
        (["run", "--preset", "nope"], "no such preset"),
        (["run", "--set", "ppo.gamma=7"], "ppo.gamma"),
        (["run", "--rounds", "0"], "at least 1"),
    ):
        done = rondo(project, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
    for url in ("hooks.example.org/very-secret", "http://[very-secret"):
        done = rondo(project, "up", RONDO_NOTIFY_URL=url)
        assert (done.returncode, done.stdout) == (2, "")
        assert "RONDO_NOTIFY_URL: expected an address" in done.stderr
        assert "very-secret" not in done.stderr
    done = rondo(project.parent, "run")
    assert done.returncode == 2
    assert "no dvc.yaml" in done.stderr
    assert not (project / ".rondo").exists()


def test_a_reader_that_has_seen_enough_ends_it_quietly(project: Path) -> None:
    case = {
        "id": "a",
        "round": "r0",
        "cause": "human",
        "origin": "ada",
        "prompt_id": "p",
        "prompt": "The",
        "response": " x" * 30,
    }
    numbers = {"score": 0.0, "sentiment": 0.0, "sentiment_plain": 0.0, "repetition": 0.0}
    ledger = project / "rounds/r0/replay/data/badcases.jsonl"
    ledger.parent.mkdir(parents=True)
    ledger.write_text(
        "".join(json.dumps({**case, **numbers, "id": f"a{n}"}) + "\n" for n in range(2000))
    )
    listed = f"{sys.executable} -m flows.cli badcases list | head -1"
    done = subprocess.run(
        listed, shell=True, cwd=project, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_data_are_checked_anywhere(tmp_path: Path) -> None:
    row = {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}
    (tmp_path / "good.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "bad.jsonl").write_text(
        json.dumps(row) + "\n" + json.dumps({**row, "chosen": ""}) + "\n"
    )
    environment = {"PYTHONPATH": str(ROOT)}
    assert rondo(tmp_path, "check-data", "good.jsonl", **environment).returncode == 0
    done = rondo(tmp_path, "check-data", "bad.jsonl", **environment)
    assert (
        done.returncode == 2
        and "bad.jsonl:2: `chosen` is empty" in done.stdout
        and done.stderr == ""
    )
    done = rondo(tmp_path, "check-data", "none.jsonl", **environment)
    assert done.returncode == 2 and "none.jsonl: expected a file" in done.stderr


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
    project: Path, receiver: Receiver, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One server for the ways to use it, since its start is what takes the time."""
    environment = with_the_flow(project) | {"OPENAI_API_KEY": attacks.API_KEY}
    server = up(project, environment | {"RONDO_NOTIFY_URL": receiver.url + attacks.HOOK})
    try:
        assert "notifications: block `rondo` (Custom Webhook)" in read_until(server, "Ctrl-C")
        api = prefect_api(project)
        second = rondo(project, "up", **environment)
        assert second.returncode == 2
        assert "already runs in this folder" in second.stderr

        attacks.without_the_string(project)
        attacks.from_pages_of_other_hosts(project)
        attacks.from_another_project(project, tmp_path_factory.mktemp("other") / ".rondo")

        pipeline = a_run_from_the_form(project, api)
        a_sweep(project, api)
        services_that_end(project, server, f"http://127.0.0.1:{environment['MLFLOW_PORT']}")
        a_shut_gate(project, api, environment, receiver)
        a_gate_that_asks(project, api, pipeline, receiver)
        sleeping = start(api, pipeline, "gates.sft.loss_drop=0.4", "sft.max_steps=2")  # sleeps
        nightly = request(f"{api}/deployments/name/next-round/next-round")
        assert [schedule["active"] for schedule in nightly["schedules"]] == [False]
        schedule = f"{nightly['id']}/schedules/{nightly['schedules'][0]['id']}"
        request(f"{api}/deployments/{schedule}", {"active": True}, "PATCH")
        until(lambda: computes(project))
        os.killpg(server.pid, signal.SIGINT)
        assert server.wait(60) == 0
        until(lambda: not of_project(project))

        server = up(project, environment)
        assert f"resumes: {sleeping}" in read_until(server, "Ctrl-C")
        [schedule] = request(f"{api}/deployments/name/next-round/next-round")["schedules"]
        assert schedule["active"]  # as the person left it
        until(lambda: computes(project))
        request(f"{api}/flow_runs/{sleeping}/set_state", {"state": {"type": "CANCELLING"}})
        until(lambda: not computes(project))
        until(lambda: request(f"{api}/flow_runs/{sleeping}")["state_type"] == "CANCELLED")
        a_killed_run(project, api, environment, receiver)
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
    elsewhere = {
        "PWD": str(project.parent)
    }  # as when `rondo up` is started by a program and not a shell
    return elsewhere | {
        "PREFECT_SERVER_API_PORT": free_port(),
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
    filled = {"parameters": {"isolated": False, "sections": {"seed": 3}}}
    made = request(f"{api}/deployments/{deployment['id']}/create_flow_run", filled)
    assert finished(api, made["id"]) == "Completed"
    names = {run["name"] for run in request(f"{api}/task_runs/filter", {})}
    assert names == {"assets", "prepare@r0", "sft@r0", "gate_sft@r0", "evaluate@r0"}
    assert "seed: 3" in (project / "params.yaml").read_text()
    assert "r0: has not reached the reward gate" in (project / "reports/report.html").read_text()
    with pytest.raises(urllib.error.HTTPError, match="409"):  # the form shows why
        wrong = {"parameters": {"sections": {"ppo": {"gamma": 7}}}}
        request(f"{api}/deployments/{deployment['id']}/create_flow_run", wrong)
    return str(deployment["id"])


def a_sweep(project: Path, api: str) -> None:
    swept = request(f"{api}/deployments/name/sweep/sweep")["id"]
    wanted = {"key": "sft.max_steps", "values": ["4", "1"], "seeds": [5, 6]}
    wanted |= {"settings": ["gates.sft.loss_drop=0.9"]}
    run = request(f"{api}/deployments/{swept}/create_flow_run", {"parameters": wanted})["id"]
    assert finished(api, run) == "Failed"  # the stage sft cannot train with the second value
    message = request(f"{api}/flow_runs/{run}")["state"]["message"]
    assert "2 runs done" in message and "BadInput: rows missing" in message
    [table] = (project / "reports").glob("sweep-*.md")
    rows = table.read_text().splitlines()[2:]
    settings = [row.split("|")[2].strip() for row in rows]
    assert settings == [
        f"sft.max_steps={value}, seed={seed}"
        for seed in wanted["seeds"]
        for value in wanted["values"]
    ]
    for row in rows[::2]:
        assert "r0: SFT is at fault: sft.loss_before - sft.loss_after 0.5, wanted >= 0.9" in row
    for row in rows[1::2]:
        assert "BadInput: rows missing" in row and "SFT is at fault" not in row
    git = ["git", "-C", str(project)]
    branches = subprocess.run(
        [*git, "branch", "--format=%(refname:short)", "--list", "runs/*"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert [name[-2:] for name in branches] == [".0", ".1", ".2", ".3"]
    prepared = [  # once per seed; the second value has DVC's results of the first
        (project / f".rondo/workspaces/{Path(name).name}/.rondo/work/r0/prepare").exists()
        for name in branches
    ]
    assert prepared == [True, False, True, False]
    for branch, seed in zip(branches[::2], wanted["seeds"], strict=True):
        params = subprocess.run(
            [*git, "show", f"{branch}:params.yaml"], capture_output=True, text=True, check=True
        )
        assert yaml.safe_load(params.stdout)["seed"] == seed


def services_that_end(project: Path, server: subprocess.Popen[str], mlflow: str) -> None:
    """MLflow and the worker are started again, and the runs after this use them."""
    for name, words in (("mlflow", {"mlflow", "server"}), ("worker", {"worker", "start"})):
        [guard] = [
            process
            for process in psutil.Process(server.pid).children()
            if words <= set(process.cmdline())
        ]
        for process in guard.children():
            process.kill()
        assert f"{name} ended with" in read_until(server, "it starts again in 1 s")
        until(lambda words=words: of_service(server, words))  # type: ignore[misc]
    until(lambda: is_up(f"{mlflow}/health"))


def of_service(server: subprocess.Popen[str], words: set[str]) -> bool:
    children = psutil.Process(server.pid).children()
    return any(words <= set(process.cmdline()) for process in children if process.is_running())


def a_shut_gate(project: Path, api: str, environment: dict[str, str], receiver: Receiver) -> None:
    # MLflow accepts any user and password
    mlflow = f"http://ada:{attacks.PASSWORD}@127.0.0.1:{environment['MLFLOW_PORT']}"
    tracked = environment | {"MLFLOW_TRACKING_URI": mlflow}
    failed = rondo(project, "run", "--set", "gates.sft.loss_drop=0.9", **tracked)
    assert failed.returncode == 3 and attacks.PASSWORD not in failed.stdout + failed.stderr
    assert "[sft@r0] unchanged" in failed.stdout
    assert "Ended at gate_sft@r0: results of later stages" in failed.stdout
    reason = "sft.loss_before - sft.loss_after 0.5, wanted >= 0.9. SFT learnt too little"
    assert f"gate sft of r0 failed:\n{reason}" in failed.stderr
    [run] = [
        run["id"]
        for run in request(f"{api}/flow_runs/filter", {})
        if run["state_name"] == "GateFailed"
    ]
    numbers = "gate sft of r0 failed:\nsft.loss_before - sft.loss_after 0.5, wanted >= 0.9."
    receiver.wait_for(
        "rlhf-pipeline keep ",
        f"-{run[:8]}: GateFailed",
        numbers,
        f"{last_servers(project / '.rondo').prefect}/runs/flow-run/{run}",
    )


def a_gate_that_asks(project: Path, api: str, pipeline: str, receiver: Receiver) -> None:
    paused = start(api, pipeline, "gates.sft.loss_drop=0.9", "gates.sft.policy=ask")
    until(lambda: request(f"{api}/flow_runs/{paused}")["state_name"] == "Suspended")
    receiver.wait_for("Suspended\nwaits for a decision", paused)
    input_request = (
        f"{api}/flow_runs/{paused}/input/filter",
        {"prefix": f"suspended-{project.name.replace('_', '-')}-sft-r0-"},
    )
    until(lambda: request(*input_request))  # it is written after the state
    form = json.loads(request(*input_request)[0]["value"])
    assert set(form["properties"]) == {"approve", "by", "reason"}
    word = {"approve": True, "by": "<b>Ada", "reason": "loss is not what this is about"}
    for missing in ({"reason": ""}, {"reason": " \n"}, {"by": " "}):
        refused = request(f"{api}/flow_runs/{paused}/resume", {"run_input": word | missing})
        assert refused["status"] == "REJECT"
    assert request(f"{api}/flow_runs/{paused}/resume", {"run_input": word})["status"] == "ACCEPT"
    assert finished(api, paused) == "Completed"
    verdict = json.loads((project / "reports/r0/gate_sft.json").read_text())
    assert (
        verdict["may_continue"]
        and not verdict["passed"]
        and verdict["approval"]["reason"] == word["reason"]
    )
    key = {"artifacts": {"key": {"any_": ["summary"]}}}
    [summary] = request(f"{api}/artifacts/latest/filter", key)
    assert "&lt;b&gt;Ada" in summary["data"] and "<b>" not in summary["data"]


def a_killed_run(project: Path, api: str, environment: dict[str, str], receiver: Receiver) -> None:
    """Of the terminal, which has no worker that would notice."""
    command = [sys.executable, "-m", "flows.cli", "run", "--set", "sft.max_steps=2"]  # sleeps
    run = subprocess.Popen(
        command, cwd=project, env={**os.environ, **environment}, stdout=subprocess.DEVNULL
    )
    until(lambda: computes(project))
    [known] = [
        run["id"]
        for run in request(f"{api}/flow_runs/filter", {})
        if run["state_name"] == "Running"
    ]
    run.kill()
    run.wait()
    until(lambda: not computes(project))
    receiver.wait_for("Crashed\nits process ended", known)
    assert request(f"{api}/flow_runs/{known}")["state_name"] == "Crashed"


def what_a_person_left(project: Path, api: str) -> None:
    """Asked again, with another address: one automation, off as before; a block of another type is
    told too.
    """
    [made] = request(f"{api}/automations/filter", {})
    assert (
        made["name"] == "rondo: tell of GateFailed, Suspended, Failed, Crashed" and made["enabled"]
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


def test_a_run_that_is_told_to_end_leaves_nothing_behind(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a Prefect server of its own, for there is no other on this port, and a fork server."""
    monkeypatch.delenv(fork_server.VARIABLE)
    environment = {**os.environ, "PREFECT_SERVER_API_PORT": free_port(), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "flows.cli", "run", "--set", "sft.max_steps=2"]  # sleeps
    run = subprocess.Popen(
        command,
        cwd=project,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    until(
        lambda: any(
            {"stage.py", "sft"} <= set(process.info["cmdline"]) for process in of_project(project)
        )
    )
    status = rondo(project, "status")
    assert status.returncode == 0, status.stderr
    lines = {
        line.split()[0]: line.split(maxsplit=1)[1]
        for line in status.stdout.splitlines()
        if len(line.split()) > 1
    }
    assert (lines["prepare"], lines["gate_sft"], lines["evaluate"]) == ("done", "to do", "to do")
    assert (
        lines["sft"] == "runs: step 3, loss 0.333"
        and lines["r0:"] == "has not reached the sft gate"
    )
    os.killpg(run.pid, signal.SIGTERM)
    printed, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in printed and "Error" not in printed, printed
    until(lambda: not of_project(project))


def start(api: str, pipeline: str, *settings: str) -> str:
    """A run in the project's folder, from the form; returns its id."""
    filled = {"parameters": {"isolated": False, "settings": settings}}
    return str(request(f"{api}/deployments/{pipeline}/create_flow_run", filled)["id"])


def finished(api: str, flow_run: str) -> str:
    until(
        lambda: (
            request(f"{api}/flow_runs/{flow_run}")["state_type"]
            in ("COMPLETED", "FAILED", "CRASHED")
        ),
        600,
    )
    return str(request(f"{api}/flow_runs/{flow_run}")["state_name"])


def computes(folder: Path) -> bool:
    return any("stage.py" in process.info["cmdline"] for process in of_project(folder))


def test_report_writes_and_prints_the_results(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = {"win_rate": 0.8, "win_rate_low": 0.7, "win_rate_high": 0.9}
    write_json(project / "rounds/r0/evaluate/metrics.json", metrics)
    with pytest.raises(SystemExit) as ended:
        cli.main(["report"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    cell = "0.800 [0.700, 0.900]"
    assert cell in printed and "reports/report.html" in printed
    assert cell in (project / "reports/summary.md").read_text()
    assert cell in (project / "reports/report.html").read_text()

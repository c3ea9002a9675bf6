"""`rondo` as a user runs it: real processes, real Prefect and MLflow servers, a small DVC project."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.servers import free_port, read_until, request, until

ROOT = Path(__file__).parents[2]


def rondo(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flows.cli", *arguments]
    return subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False)


def test_bad_input_ends_with_2_before_anything_starts(project: Path) -> None:
    for arguments, said in (
        (["run", "--preset", "nope"], "no such preset"),
        (["run", "--set", "ppo.gamma=7"], "ppo.gamma"),
        (["run", "--rounds", "0"], "at least 1"),
    ):
        done = rondo(project, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr
    done = rondo(project.parent, "run")
    assert done.returncode == 2
    assert "no dvc.yaml" in done.stderr
    assert not (project / ".rondo").exists()


def test_a_reader_that_has_seen_enough_ends_it_quietly(project: Path) -> None:
    case = {"id": "a", "round": "r0", "cause": "human", "origin": "ada", "prompt_id": "p", "prompt": "The", "response": " x" * 30}
    numbers = {"score": 0.0, "sentiment": 0.0, "sentiment_plain": 0.0, "repetition": 0.0}
    ledger = project / "rounds/r0/replay/data/badcases.jsonl"
    ledger.parent.mkdir(parents=True)
    ledger.write_text("".join(json.dumps({**case, **numbers, "id": f"a{n}"}) + "\n" for n in range(2000)))
    listed = f"{sys.executable} -m flows.cli badcases list | head -1"
    done = subprocess.run(listed, shell=True, cwd=project, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_data_are_checked_anywhere(tmp_path: Path) -> None:
    row = {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}
    (tmp_path / "good.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "bad.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "chosen": ""}) + "\n")
    environment = {"PYTHONPATH": str(ROOT)}
    assert rondo(tmp_path, "check-data", "good.jsonl", **environment).returncode == 0
    done = rondo(tmp_path, "check-data", "bad.jsonl", **environment)
    assert done.returncode == 2 and "bad.jsonl:2: `chosen` is empty" in done.stdout and done.stderr == ""
    done = rondo(tmp_path, "check-data", "none.jsonl", **environment)
    assert done.returncode == 2 and "none.jsonl: expected a file" in done.stderr


def test_serve_a_run_from_the_ui_a_failed_gate_and_the_end_of_all(project: Path) -> None:
    """One server for the three ways to use it, since its start is what takes the time."""
    (project / "prefect.yaml").write_text((ROOT / "prefect.yaml").read_text())
    (project / "flows").symlink_to(ROOT / "flows")
    for command in (["add", "prefect.yaml", "flows"], ["commit", "-qm", "the flow"]):
        subprocess.run(["git", *command], cwd=project, check=True)
    elsewhere = {"PWD": str(project.parent)}  # as when `rondo up` is started by a program and not a shell
    environment = elsewhere | {"PREFECT_SERVER_API_PORT": free_port(), "MLFLOW_PORT": free_port(), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "flows.cli", "up"]
    server = subprocess.Popen(command, cwd=project, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)
    try:
        read_until(server, "Ctrl-C")
        api = f"http://127.0.0.1:{environment['PREFECT_SERVER_API_PORT']}/api"
        in_use = rondo(project, "up", **environment)
        assert in_use.returncode == 2
        assert "is in use" in in_use.stderr

        deployment = request(f"{api}/deployments/name/rlhf-pipeline/rlhf-pipeline")
        assert deployment["pull_steps"][0]["prefect.deployments.steps.set_working_directory"]["directory"] == str(project)
        assert deployment["parameters"] == {"isolated": True}
        here = {"isolated": False}
        made = request(f"{api}/deployments/{deployment['id']}/create_flow_run", {"parameters": here | {"sections": {"seed": 3}}})
        assert finished(api, made["id"]) == "Completed"
        names = {run["name"] for run in request(f"{api}/task_runs/filter", {})}
        assert names == {"assets", "prepare@r0", "sft@r0", "gate_sft@r0", "evaluate@r0"}
        assert "seed: 3" in (project / "params.yaml").read_text()
        assert "r0: has not reached the reward gate" in (project / "reports/report.html").read_text()

        with pytest.raises(urllib.error.HTTPError, match="409"):  # the form shows why
            wrong = {"parameters": {"sections": {"ppo": {"gamma": 7}}}}
            request(f"{api}/deployments/{deployment['id']}/create_flow_run", wrong)
        swept = request(f"{api}/deployments/name/sweep/sweep")["id"]
        wanted = {"key": "sft.max_steps", "values": ["4", "5"], "settings": ["gates.sft.loss_drop=0.9"]}
        run = request(f"{api}/deployments/{swept}/create_flow_run", {"parameters": wanted})["id"]
        assert finished(api, run) == "Completed"
        [table] = (project / "reports").glob("sweep-*.md")
        rows = table.read_text().splitlines()[2:]
        assert [row.split("|")[2].strip() for row in rows] == ["sft.max_steps=4", "sft.max_steps=5"]
        assert all("r0: SFT is at fault: sft.loss_before - sft.loss_after 0.5, wanted >= 0.9" in row for row in rows)
        branches = subprocess.run(["git", "branch", "--list", "runs/*"], cwd=project, capture_output=True, text=True, check=True)
        assert [name[-2:] for name in branches.stdout.split() if name != "+"] == [".0", ".1"]

        failed = rondo(project, "run", "--set", "gates.sft.loss_drop=0.9", **environment)
        assert failed.returncode == 3
        assert "[sft@r0] unchanged" in failed.stdout
        assert "Ended at gate_sft@r0: what is shown of the stages after it" in failed.stdout
        assert "gate sft of r0 failed:\nsft.loss_before - sft.loss_after 0.5, wanted >= 0.9. SFT learnt too little" in failed.stderr
        assert "GateFailed" in {run["state_name"] for run in request(f"{api}/flow_runs/filter", {})}

        asks = {"parameters": here | {"settings": ["gates.sft.loss_drop=0.9", "gates.sft.policy=ask"]}}
        paused = request(f"{api}/deployments/{deployment['id']}/create_flow_run", asks)["id"]
        until(lambda: request(f"{api}/flow_runs/{paused}")["state_name"] == "Suspended", 90)
        asked = f"{api}/flow_runs/{paused}/input/filter", {"prefix": f"suspended-{project.name.replace('_', '-')}-sft-r0-"}
        until(lambda: request(*asked))  # it is written after the state
        form = json.loads(request(*asked)[0]["value"])
        assert set(form["properties"]) == {"approve", "by", "reason"}
        word = {"approve": True, "by": "Ada", "reason": "loss is not what this is about"}
        assert request(f"{api}/flow_runs/{paused}/resume", {"run_input": word | {"reason": ""}})["status"] == "REJECT"
        assert request(f"{api}/flow_runs/{paused}/resume", {"run_input": word})["status"] == "ACCEPT"
        assert finished(api, paused) == "Completed"
        verdict = json.loads((project / "reports/r0/gate_sft.json").read_text())
        assert verdict["opened"] and not verdict["passed"] and verdict["approval"]["reason"] == word["reason"]

        settings = {"parameters": here | {"settings": ["gates.sft.loss_drop=0.4", "sft.max_steps=2"]}}  # sleeps
        sleeping = request(f"{api}/deployments/{deployment['id']}/create_flow_run", settings)["id"]
        nightly = request(f"{api}/deployments/name/next-round/next-round")
        assert [schedule["active"] for schedule in nightly["schedules"]] == [False]
        switch_on(f"{api}/deployments/{nightly['id']}/schedules/{nightly['schedules'][0]['id']}")
        until(lambda: any("stage.py" in process.info["cmdline"] for process in of_project(project)))
        start = time.monotonic()
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0
        assert time.monotonic() - start < 10
        until(lambda: not of_project(project), 2)

        server = subprocess.Popen(command, cwd=project, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)
        assert f"goes on: {sleeping}" in read_until(server, "Ctrl-C")
        [schedule] = request(f"{api}/deployments/name/next-round/next-round")["schedules"]
        assert schedule["active"]  # as the person left it
        until(lambda: any("stage.py" in process.info["cmdline"] for process in of_project(project)))
        start = time.monotonic()
        request(f"{api}/flow_runs/{sleeping}/set_state", {"state": {"type": "CANCELLING"}})
        until(lambda: not any("stage.py" in process.info["cmdline"] for process in of_project(project)))
        assert time.monotonic() - start < 10
        until(lambda: request(f"{api}/flow_runs/{sleeping}")["state_type"] == "CANCELLED")
    finally:
        server.terminate()
        server.wait(20)


def test_a_run_that_is_told_to_end_leaves_nothing_behind(project: Path) -> None:
    """With a server of its own, for there is no other on this port."""
    environment = {**os.environ, "PREFECT_SERVER_API_PORT": free_port(), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "flows.cli", "run", "--set", "sft.max_steps=2"]  # sleeps
    run = subprocess.Popen(command, cwd=project, env=environment, stdout=subprocess.PIPE, text=True)
    until(lambda: any({"stage.py", "sft"} <= set(process.info["cmdline"]) for process in of_project(project)))
    told = rondo(project, "status")
    assert told.returncode == 0, told.stderr
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in told.stdout.splitlines() if len(line.split()) > 1}
    assert (lines["prepare"], lines["gate_sft"], lines["evaluate"]) == ("done", "to do", "to do")
    assert lines["sft"] == "runs: step 3, loss 0.333" and lines["r0:"] == "has not reached the sft gate"
    run.terminate()
    assert run.wait(20) != 0
    until(lambda: not of_project(project), 10)


def switch_on(schedule: str) -> None:
    sent = urllib.request.Request(schedule, b'{"active": true}', {"Content-Type": "application/json"}, method="PATCH")
    urllib.request.urlopen(sent, timeout=10).close()


def finished(api: str, flow_run: str) -> str:
    until(lambda: request(f"{api}/flow_runs/{flow_run}")["state_type"] in ("COMPLETED", "FAILED", "CRASHED"), 90)
    return str(request(f"{api}/flow_runs/{flow_run}")["state_name"])


def of_project(folder: Path) -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline", "cwd"])
    return [process for process in found if process.pid != os.getpid() and process.info["cwd"] == str(folder) and process.info["cmdline"]]

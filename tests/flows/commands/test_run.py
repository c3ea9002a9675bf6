"""`rondo run --continue`, and `rondo run` with variables of the user, as a user runs it."""

import json
import re
import socket
import urllib.error
from collections.abc import Callable
from pathlib import Path

import pytest

from flows import cli
from flows.core.git import git
from flows.core.run_locks import hold_run_lock, locks_of
from tests.servers import NOWHERE, of_project, read_until, request, rondo, start_rondo


def test_an_isolated_run_is_decided_on_and_continued_by_its_name(
    project: Path, api: str, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = {"PREFECT_API_URL": api, "MLFLOW_TRACKING_URI": "off"}
    servers |= {"GIT_DIR": ".git", "GIT_INDEX_FILE": ".git/index"}  # as in a hook of git
    settings = ("--set", "gates.sft.loss_drop=0.9", "--set", "gates.sft.policy=ask")
    failed = rondo(project, "run", "--isolated", *settings, **servers)
    assert failed.returncode == 3, failed.stderr
    named = re.search("`rondo run --continue (.*)` goes on", failed.stdout)
    assert named
    run = named[1]

    decision = ["approve", "sft", "r0", "--reason", "a small task", "--by", "Ada"]
    assert cli.exit_code(decision) == 2  # in the project's folder
    assert "no such verdict" in capsys.readouterr().err
    assert cli.exit_code([*decision, "--run", run]) == 0
    assert f"run `rondo run --continue {run}` to continue" in capsys.readouterr().out

    Path("params.yaml").write_text(Path("params.yaml").read_text().replace("seed: 0", "seed: 4"))
    done = rondo(project, "run", "--continue", run, **servers)
    assert done.returncode == 0, done.stderr
    assert "[sft@r0] unchanged" in done.stdout and "[evaluate@r0] ran" in done.stdout
    assert "--continue" not in done.stdout
    [folder] = (project / ".rondo/workspaces").iterdir()
    assert folder.name == run
    assert json.loads(git("show", f"runs/{run}:approvals/r0/sft.json"))["by"] == "Ada"
    assert "seed: 0" in git("show", f"runs/{run}:params.yaml")

    for arguments, message in (
        (["run", "--continue", "x"], "is not a folder"),
        (["run", "--continue", run, "--isolated"], "takes no other options"),
        (["run", "--continue", run, "--preset", "smoke"], "takes no other options"),
    ):
        assert cli.exit_code(arguments) == 2
        assert message in capsys.readouterr().err
    [lock] = locks_of(project / ".rondo", run)
    hold_run_lock(lock)
    assert cli.exit_code(["run", "--continue", run]) == 2
    assert "has not ended" in capsys.readouterr().err


def test_an_empty_address_of_prefect_is_none_and_its_server_asks_for_the_string(
    project: Path, copy_tables: Callable[[Path], None]
) -> None:
    """And a proxy is not asked for this machine, and texts are UTF-8 in every locale."""
    copy_tables(project)
    Path("params.yaml").write_text(f"# Grüße 😀\n{Path('params.yaml').read_text()}", "utf-8")
    variables = {"PREFECT_API_URL": "", "PREFECT_HOME": "", "MLFLOW_TRACKING_URI": "off"}
    proxies = {"HTTP_PROXY": NOWHERE, "http_proxy": NOWHERE, "NO_PROXY": "", "no_proxy": "a.org"}
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # ASCII
    settings = ("--set", "sft.max_steps=51")
    run = start_rondo(project, "run", *settings, **variables, **proxies, **locale)
    read_until(run, "[sft@r0] step 3/3")
    server, *_ = of_project(project, "flows.orchestration.prefect_server")
    port = server.cmdline()[-1]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        request(f"http://127.0.0.1:{port}/api/flow_runs/filter", {})
    Path("go").touch()
    _, errors = run.communicate(timeout=600)
    assert run.returncode == 0, errors
    assert (project / ".rondo/prefect/prefect.db").exists()
    assert Path("params.yaml").read_text("utf-8").startswith("# Grüße 😀\n")


def test_a_server_of_prefect_that_does_not_answer_is_unreachable(project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = [f"{NOWHERE}/api", f"http://127.0.0.1:{silent.getsockname()[1]}/api"]
        for address in addresses:
            Path(".env").write_text(f"PREFECT_API_URL={address}\n")
            done = rondo(project, "run")
            assert done.returncode == 4
            assert f"rondo: Unreachable: Prefect's server at {address} does not" in done.stderr
            assert "Traceback" not in done.stderr and "[assets]" not in done.stdout


def test_an_address_of_mlflow_that_takes_no_record_ends_a_run_before_its_stages(
    project: Path, api: str
) -> None:
    done = rondo(project, "run", PREFECT_API_URL=api, MLFLOW_TRACKING_URI="./mlruns")
    assert done.returncode == 2 and "step 1/3" not in done.stdout
    assert "rondo: BadInput: MLflow cannot use ./mlruns" in done.stderr
    assert "Next: set MLFLOW_TRACKING_URI to" in done.stderr

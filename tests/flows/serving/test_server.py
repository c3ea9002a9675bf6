"""The command `rondo serve-reward`, as a user runs it."""

import json
import shutil
import signal
import socket
from pathlib import Path

import httpx
import pytest
import yaml
from transformers import AutoTokenizer

from flows import cli
from flows.serving.server import TOKEN, load_texts
from stages.lib.core.errors import BadInput
from stages.lib.core.params.data import rounds
from tests.flows.serving.conftest import make_judged_project, repro
from tests.servers import start_rondo
from tests.stages.gate.test_gate import BATTERY
from tests.tokenizers import add_token


@pytest.fixture
def project(models, params, tmp_path, monkeypatch, fast_processes) -> Path:
    make_judged_project(tmp_path, models / "reward")
    monkeypatch.chdir(tmp_path)
    changed = params.model_copy(update={"rounds": rounds(1)})
    Path("params.yaml").write_text(yaml.safe_dump(changed.model_dump(mode="json")))
    Path("assets").mkdir()
    Path("assets/model").symlink_to(models / "assets/model")
    return tmp_path


def test_the_command_serves_until_a_signal(project, scorer, monkeypatch):
    monkeypatch.chdir(project)
    server = start_rondo(project, "serve-reward", "r0", "--port", "0", **{TOKEN: "secret"})
    line = server.stdout.readline()
    assert line.startswith("reward@r0, gate passed: http://127.0.0.1:"), line + server.stdout.read()
    url = line.split()[3].removesuffix("/get_reward,")
    assert httpx.get(f"{url}/health").json()["gate"] == "passed"
    body = {"query": ["The day was good."], "prompts": ["The day"]}
    assert httpx.post(f"{url}/get_reward", json=body).status_code == 401
    reply = httpx.post(
        f"{url}/get_reward", json=body, headers={"Authorization": "Bearer secret"}, timeout=60
    )
    expected = scorer(["The day"], [" was good."])
    assert reply.json()["rewards"] == pytest.approx(expected, abs=1e-5)
    server.send_signal(signal.SIGINT)
    _, errors = server.communicate(timeout=60)
    assert (server.returncode, errors) == (130, "rondo: stopped\n")


def test_a_reward_model_with_other_tokens_is_not_served(models, scorer, tmp_path) -> None:
    shutil.copytree(models / "reward", tmp_path / "mine")
    add_token(tmp_path / "mine")
    scorer.tokenizer = AutoTokenizer.from_pretrained(tmp_path / "mine")
    with pytest.raises(BadInput, match=r"tokens are not those of assets\.model, whose templ"):
        load_texts(scorer, scorer.params)


def test_what_keeps_the_server_from_starting_is_named(project, capsys):
    def ends(*arguments: str) -> tuple[int, str]:
        """Exit code and error of a server that does not start."""
        return cli.exit_code(["serve-reward", *arguments]), capsys.readouterr().err

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, output = ends("r0", "--port", port)
    assert code == 2 and f"--port {port}: Address already in use" in output
    code, output = ends("r0", "--port", "70000")
    assert code == 2 and "--port 70000: bind(): port must be 0-65535" in output
    code, output = ends("r0", "--host", "0.0.0.0")
    assert (
        code == 2 and f"other machines may connect, so requests need a token: set {TOKEN}" in output
    )
    code, output = ends("r7")
    assert code == 2 and "r7" in output
    Path("battery.json").write_text(json.dumps(BATTERY | {"worst_flip": 0.5}))
    repro(project)
    code, output = ends("r0")
    assert code == 3 and "battery.worst_flip 0.5, wanted <= 0.2" in output

"""Models in a real MLflow: loaded from its server alone, sent after an outage."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import copy, copytree

import psutil
import pytest
import torch
import yaml
from dvc.repo import Repo
from mlflow import MlflowClient
from mlflow.entities import LoggedModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from flows.core.services import is_up
from flows.execution.meter import Meter
from flows.tracking.mlflow_store import EXPERIMENT, has_files
from flows.tracking.mlflow_tracker import MlflowTracker
from flows.tracking.sync import send_all
from stages.assets.base_model import write_model
from stages.evaluate.evaluator import Evaluator
from stages.gate.verdict import run_gate
from stages.lib.core.files import read_jsonl, stage_dir, write_json
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.tracking import Upload
from stages.lib.lm.loading import load_tokenizer
from stages.lib.lm.saving import save_model
from stages.lib.lm.scoring import RewardScorer
from tests.faults.servers import refusing_proxy
from tests.servers import NOWHERE, free_port, until
from tests.stages.conftest import SMALL, write_adapter, write_data

OUTPUTS = {
    "prepare": ["data"],
    "sft": ["model"],
    "reward": ["model"],
    "ppo": ["policy", "checkpoints"],
}
MADE = ("sft@r0", "reward@r0", "ppo@r0")
ALL = ("r0-ppo", "r0-reward", "r0-sft", "r0-step_00002", "r0-step_00004")
EVALUATION = {
    "sft": {"kl": 0.0, "repetition_3": 0.0, "eos_rate": 0.7},
    "ppo": {"kl_per_token": 0.4, "distinct_2": 0.8, "repetition_3": 0.0, "eos_rate": 0.9},
    "checkpoints": {"step_00002": {"kl": 2.0}, "step_00004": {"kl": 5.0}},
    **dict.fromkeys(("win_rate", "win_rate_low", "win_rate_high"), 0.8),
    **dict.fromkeys(("win_rate_champion", "win_rate_champion_low", "win_rate_champion_high")),
    "human_nll_rise": 0.0,
}


def build(folder: Path) -> None:
    """A DVC project with the files of one round; its policy is the checkpoint step_00004."""
    round_ = folder / "rounds/r0"
    params = check_params(SMALL, "test")
    (folder / "params.yaml").write_text(yaml.safe_dump(params.model_dump(mode="json")))
    write_data(round_ / "prepare/data")
    write_model(params, folder / "assets/model")
    tokenizer = load_tokenizer(folder / "assets/model")
    sft = AutoModelForCausalLM.from_pretrained(folder / "assets/model", dtype=torch.float32)
    torch.manual_seed(7)
    reward = AutoModelForSequenceClassification.from_pretrained(
        folder / "assets/model", num_labels=1, dtype=torch.float32
    )
    reward.config.mean, reward.config.std = 0.5, 2.0
    save_model(sft, tokenizer, round_ / "sft/model")
    save_model(reward, tokenizer, round_ / "reward/model")
    for name, seed in {"policy": 1, "checkpoints/step_00002": 2}.items():
        write_adapter(sft, round_ / "ppo" / name, seed)
    copytree(round_ / "ppo/policy", round_ / "ppo/checkpoints/step_00004")
    write_json(round_ / "ppo/metrics.json", {"dangers": 0, "policy_update": 4})
    write_json(round_ / "reward/metrics.json", {"accuracy": 0.8})
    write_json(round_ / "replay/metrics.json", {"regressed": 0})
    write_json(round_ / "capability/metrics.json", {"worst_fall": None})
    write_json(round_ / "evaluate/metrics.json", EVALUATION)
    stages = {
        f"{stage}-r0": {"cmd": "true", "outs": [f"rounds/r0/{stage}/{out}" for out in outs]}
        for stage, outs in OUTPUTS.items()
    }
    (folder / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    Repo.init(str(folder), no_scm=True).close()
    relock(folder)


def relock(folder: Path) -> None:
    """Write dvc.lock and DVC's cache. Without `foreach`, DVC allows no @ in the name of a stage."""
    lock = folder / "dvc.lock"
    lock.unlink(missing_ok=True)
    with Repo(str(folder)) as repo:
        repo.commit(force=True)
    lock.write_text(lock.read_text().replace("-r0:", "@r0:"))


@pytest.fixture
def project(
    built_once: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The project as working directory."""
    folder = tmp_path / "project"
    copytree(built_once("models", build), folder)
    monkeypatch.chdir(folder)
    run_gate(load(), "promote", "r0")
    return folder


def load() -> Params:
    return check_params(yaml.safe_load(Path("params.yaml").read_text()), "test")


@pytest.fixture
def home(tmp_path: Path, empty_tables: Path) -> Path:
    """MLflow's folder, and that of the recorded runs."""
    folder = tmp_path / "home"
    folder.mkdir()
    copy(empty_tables, folder / "mlflow.db")
    return folder


@dataclass
class Server:
    """MLflow as `rondo up` starts it. home: its folder."""

    uri: str
    home: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, empty_tables: Path) -> Iterator[Server]:
    """Started once, since its start takes long; tests differ by the names of their runs."""
    home, port = tmp_path_factory.mktemp("server"), free_port()
    copy(empty_tables, home / "mlflow.db")
    command = [sys.executable, "-m", "mlflow", "server", "--port", port, "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{home / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(home / "mlartifacts")]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = psutil.Popen(command, env=environment, **quiet)
    try:
        until(lambda: is_up(f"http://127.0.0.1:{port}/health"))
        yield Server(f"http://127.0.0.1:{port}", home)
    finally:
        for process in [*started.children(recursive=True), started]:
            process.kill()
        started.wait()


def record(
    run: str,
    uri: str,
    home: Path,
    *addresses: str,
    upload: Collection[Upload] = tuple(Upload),
    outcome: str = "ran",
    local: bool = True,
) -> list[str]:
    """Record stages as a run does; returns the messages."""
    messages: list[str] = []
    tags = {"revision": "c0ffee", "project": "p"}
    tracker = MlflowTracker(run, uri, home, tags, messages.append, local, upload)
    tracker.begin()
    for address in addresses:
        tracker.start(address, Meter())
        tracker.finish(outcome)
    tracker.close("FINISHED", {})
    return messages


def models_of(uri: str, run: str) -> dict[str, LoggedModel]:
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment
    models = client.search_logged_models([experiment.experiment_id], f"tags.`rondo.run` = '{run}'")
    return {str(model.name): model for model in models}


def weights(home: Path) -> list[Path]:
    return sorted((home / "mlartifacts").rglob("*.safetensors"))


SCRIPT = """
import json, sys
import mlflow
mlflow.set_tracking_uri(sys.argv[1])
policy = mlflow.pyfunc.load_model("models:/rondo-policy@champion")
reward = mlflow.pyfunc.load_model(sys.argv[2])
result = {
    "texts": policy.predict(policy.input_example),
    "second": policy.predict(policy.input_example, params={"seed": 1}),
    "other": policy.predict([{"prompt": "A walk"}], params={"max_new_tokens": 3}),
    "scores": reward.predict(json.load(sys.stdin)),
    "code": __import__("stages").__file__,
}
print(json.dumps(result))
"""


def test_the_server_alone_gives_the_champion_and_the_reward_model(
    project: Path, server: Server, tmp_path: Path
) -> None:
    """Recorded in the database, without the server; loaded by a process that has no project."""
    params, home, database = load(), server.home, f"sqlite:///{server.home / 'mlflow.db'}"
    assert record("first", database, home, *MADE, "evaluate@r0", "gate_promote@r0") == []
    models = models_of(database, "first")
    assert {name: model.status for name, model in models.items()} == dict.fromkeys(ALL, "READY")
    write_json(stage_dir("r0", "champion") / "champion.json", {"round": None})
    evaluator = Evaluator(params, "r0")
    expected = [
        [sample.text for sample in evaluator.sample(evaluator.load_ppo(), number)]
        for number in (0, 1)
    ]
    pairs = read_jsonl(stage_dir("r0", "prepare") / "data/pairs_eval.jsonl", "")
    rows = [{"prompt": pair["prompt"], "response": pair["chosen"]} for pair in pairs]
    scorer = RewardScorer(stage_dir("r0", "reward") / "model", evaluator.tokenizer, params)
    scores = scorer(*([row[name] for row in rows] for name in ("prompt", "response")))

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    project.rename(tmp_path / "moved")  # no path of the recording machine is of use
    done = subprocess.run(
        [sys.executable, "-I", "-c", SCRIPT, server.uri, models["r0-reward"].model_uri],
        cwd=elsewhere,
        input=json.dumps(rows),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [result["texts"], result["second"]] == expected
    assert expected[0] != expected[1]
    assert len(result["other"]) == 1
    assert result["scores"] == pytest.approx(scores, abs=1e-6)
    assert not result["code"].startswith(str(Path(__file__).parents[3]))


def test_an_unchanged_stage_stores_no_second_model(project: Path, home: Path) -> None:
    database = f"sqlite:///{home / 'mlflow.db'}"
    record("first", database, home, *MADE)
    stored = weights(home)
    assert len(stored) == 5  # SFT, reward model, policy, two checkpoints
    record("second", database, home, *MADE, outcome="unchanged")
    assert weights(home) == stored and not models_of(database, "second")


def test_without_kinds_no_file_is_uploaded(project: Path, home: Path) -> None:
    database = f"sqlite:///{home / 'mlflow.db'}"
    assert record("none", database, home, *MADE, upload=()) == []
    models = models_of(database, "none")
    assert set(models) == set(ALL)
    assert weights(home) == []
    params = load()
    lora = params.ppo.lora.model_copy(update={"r": 0})
    whole = params.model_copy(update={"ppo": params.ppo.model_copy(update={"lora": lora})})
    Path("params.yaml").write_text(yaml.safe_dump(whole.model_dump(mode="json")))
    record("whole", database, home, "sft@r0", upload=[Upload.policy])
    assert weights(home) == []  # no adapter needs the SFT model
    Path("params.yaml").write_text(yaml.safe_dump(params.model_dump(mode="json")))
    record("policy", database, home, *MADE, upload=[Upload.policy])
    models = models_of(database, "policy")
    with_files = {name for name, model in models.items() if has_files(model)}
    assert with_files == {"r0-ppo", "r0-sft"}  # the policy is an adapter


def test_a_model_without_its_list_of_files_is_recorded_with_the_reason(
    project: Path, home: Path
) -> None:
    """E.g. after `dvc gc`."""
    for path in (project / ".dvc/cache").rglob("*.dir"):
        path.unlink()
    assert record("first", f"sqlite:///{home / 'mlflow.db'}", home, "sft@r0") == []
    (model,) = models_of(f"sqlite:///{home / 'mlflow.db'}", "first").values()
    assert model.status == "READY" and not has_files(model)
    assert "`dvc gc` removed rounds/r0/sft/model" in model.tags["mlflow.note.content"]


def test_files_are_sent_after_an_outage_though_the_folder_has_another_model(
    project: Path, home: Path
) -> None:
    """Unless DVC's cache has lost one; this holds up no other model."""
    database = f"sqlite:///{home / 'mlflow.db'}"
    assert "`rondo sync` sends the rest" in record("first", NOWHERE, home, *MADE)[-1]
    for path in project.glob("rounds/**/*.safetensors"):
        path.write_bytes(b"another model")
    for path in (project / ".dvc/cache").rglob("*"):
        if path.is_file() and b"score.weight" in path.read_bytes()[:10_000]:
            path.unlink()
    (message,) = record("next", database, home)
    assert "does not get the files of r0-reward" in message and "run its stage again" in message
    states = {name: model.status for name, model in models_of(database, "first").items()}
    assert states == dict.fromkeys(ALL, "READY") | {"r0-reward": "FAILED"}
    before = weights(home)
    assert record("later", database, home) == []
    assert weights(home) == before


def test_an_upload_that_an_outage_interrupts_is_completed_by_a_sync(
    project: Path, server: Server, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    refused = {"/mlflow-artifacts/": (500, "no room")}
    with refusing_proxy(server.uri, refused) as uri:
        first, last = record("cut", uri, home, "sft@r0", local=False)
        assert "failed" in first and "`rondo sync` sends the rest" in last
        assert models_of(server.uri, "cut")["r0-sft"].status == "PENDING"
        refused.clear()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert list(send_all(home, pytest.fail)) == ["cut: files of r0-sft"]
        assert list(send_all(home, pytest.fail)) == []
    assert models_of(server.uri, "cut")["r0-sft"].status == "READY"

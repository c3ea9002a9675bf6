"""A tiny random reward model, and its server on a free port."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
import yaml
from transformers import AutoModelForSequenceClassification

from flows.execution.dvc_stages import command_environment
from flows.serving.accepted_model import ServedModel
from flows.serving.app import make_app
from flows.serving.scoring_queue import Score, ScoringQueue
from flows.serving.server import listen, load_texts
from stages.lib.core.params import Params, check_params
from stages.lib.lm.loading import load_tokenizer
from stages.lib.lm.saving import save_model
from stages.lib.lm.scoring import RewardScorer
from tests.servers import until
from tests.stages.gate.test_gate import BATTERY, REWARD

# A stage that copies what it would have trained and measured
MAKE = """
import json, pathlib, shutil, sys
stage = sys.argv[1]
folder = pathlib.Path("rounds/r0", stage)
folder.mkdir(parents=True, exist_ok=True)
shutil.copytree("trained", folder / "model")
manifest = {"started_from": "rounds/r0/sft/model", "template_hash": "cd34"}
(folder / "manifest.json").write_text(json.dumps(manifest))
shutil.copy(f"{stage}.json", folder / "metrics.json")
"""
MODEL = ServedModel("reward@r0", "rounds/r0/reward/model", "ab12", "sft", "cd34", "passed", [])


@pytest.fixture(scope="session")
def params() -> Params:
    return check_params(
        {"assets": {"model": "tiny"}, "model": {"dtype": "float32", "threads": 1}}, "test"
    )


@pytest.fixture(scope="session")
def models(params, tmp_path_factory) -> Path:
    """A folder with assets/model and the reward model `reward`, calibrated by 0.5 and 2."""
    from stages.assets.base_model import write_model

    folder = tmp_path_factory.mktemp("project")
    write_model(params, folder / "assets/model")
    torch.manual_seed(7)
    reward = AutoModelForSequenceClassification.from_pretrained(
        folder / "assets/model", num_labels=1, dtype=torch.float32
    )
    reward.score.weight.data = torch.randn_like(reward.score.weight)
    reward.config.mean, reward.config.std = 0.5, 2.0
    save_model(reward, load_tokenizer(folder / "assets/model"), folder / "reward")
    return folder


@pytest.fixture
def scorer(models, params, monkeypatch) -> RewardScorer:
    """Scores as the stages do; the working directory is the project."""
    monkeypatch.chdir(models)
    return RewardScorer(models / "reward", params)


@contextmanager
def serving(
    model: ServedModel, queue: ScoringQueue, scorer: RewardScorer, **options: Any
) -> Iterator[str]:
    """A server of the queue's reward model; gives its address."""
    listener = listen("127.0.0.1", 0)
    app = make_app(model, load_texts(scorer, scorer.params), queue, **options)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    until(lambda: server.started)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    queue.close()


@pytest.fixture
def queues() -> list[ScoringQueue]:
    """Of the servers that `serve` has started."""
    return []


@pytest.fixture
def serve(scorer, queues) -> Iterator[Callable[..., str]]:
    """Starts a server of the reward model; returns its address."""
    with ExitStack() as servers:

        def start(score: Score = scorer.tokens, waiting: int = 10**6, **options: Any) -> str:
            queues.append(ScoringQueue(score, 4096, waiting))
            server = serving(MODEL, queues[-1], scorer, **options)
            return servers.enter_context(server)

        yield start


def make_judged_project(folder: Path, model: Path) -> Path:
    """A DVC project whose r0 has this reward model and metrics that pass its gate."""
    shutil.copytree(model, folder / "trained")
    (folder / "make.py").write_text(MAKE)
    stages = {}
    for name, metrics in (("reward", REWARD), ("battery", BATTERY)):
        (folder / f"{name}.json").write_text(json.dumps(metrics))
        do = {
            "cmd": f"python make.py {name}",
            "deps": ["make.py", "trained", f"{name}.json"],
            "outs": [f"rounds/r0/{name}/model", f"rounds/r0/{name}/manifest.json"],
            "metrics": [{f"rounds/r0/{name}/metrics.json": {"cache": False}}],
        }
        stages[name] = {"foreach": ["r0"], "do": do}
    stages["battery"]["do"]["deps"].append("rounds/r0/reward/model")
    (folder / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, cwd=folder, check=True)
    repro(folder)
    return folder


def repro(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "dvc", "repro", "-q", *arguments]
    subprocess.run(command, cwd=folder, check=True, env=command_environment())

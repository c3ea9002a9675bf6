"""Whole stages, with a line due at each item: every pass that takes long with a large model says
what it does.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages.annotate.__main__ import main as annotate
from stages.assets.inputs import main as inputs
from stages.battery.__main__ import main as battery
from stages.evaluate.__main__ import main as evaluate
from stages.lib.core.files import write_json
from stages.lib.core.params import Params, check_params
from stages.lib.core.progress import PROGRESS, reporting
from stages.ppo.__main__ import main as ppo
from stages.prepare.__main__ import main as prepare
from stages.replay.__main__ import main as replay
from stages.reward.__main__ import main as reward
from stages.sft.__main__ import main as sft
from tests.defects.world import world

Stage = Callable[[Params, str], None]


def passes(stage: Stage, params: Params) -> set[str]:
    """What the lines of a stage name, with the passes around; without their counts."""
    lines: list[str] = []
    with reporting("stage@r0", lines.append, quiet=0.0):
        stage(params, "r0")
    matches = [PROGRESS.match(line) for line in lines]
    assert None not in matches
    return {
        re.sub(r" \d+/\d+ [\w-]+", "", "  ".join(filter(None, (match["what"], match["details"]))))
        for match in matches
        if match
    }


@pytest.fixture
def small_round(make_round: Any) -> Params:
    """A round on disk, before SFT, and settings of which every stage takes seconds."""
    values = make_round("r0", 1.0).model_dump(mode="json")
    values["sft"] |= {"max_steps": 1, "samples_per_prompt": 1}
    values["reward"] |= {"max_steps": 1}
    values["ppo"] |= {"batch_size": 4, "mini_batch_size": 4, "micro_batch_size": 2}
    values["ppo"] |= {"total_episodes": 4, "num_ppo_epochs": 1, "save_updates": 1}
    params = check_params(values, "test")
    Path("params.yaml").write_text(yaml.safe_dump(params.model_dump(mode="json")))
    inputs(params, "r0")
    return params


def test_each_long_pass_of_the_stages_with_models_says_what_it_does(small_round: Params) -> None:
    assert passes(sft, small_round) >= {
        "counting tokens",
        "log-probabilities  base model",
        "sampling  base model",
        "training",
        "log-probabilities  SFT model",
        "sampling  SFT model",
        "hashing rounds/r0/sft/model/model.safetensors",
    }
    assert passes(reward, small_round) >= {
        "counting tokens",
        "training",
        "reward scores",
        "TF-IDF",
    }
    assert passes(battery, small_round) >= {"sampling", "reward scores", "sentiment"}
    for name in ("champion", "start"):
        write_json(Path(f"rounds/r0/champion/{name}.json"), {"round": None})
    assert passes(ppo, small_round) >= {
        "hashing weights",
        "sampling  validation",
        "scoring  validation",
        "sentiment  validation",
        "sampling",
        "scoring",
        "checking",
        "gradients  epoch 1:",
    }
    assert passes(evaluate, small_round) >= {
        "sampling  sampled  responses of base",
        "scoring  sampled  responses of base",
        "sampling  sampled  responses of ppo",
        "log-probabilities  judge fluency",
        "sentiment",
    }
    assert passes(replay, small_round) >= {"sampling", "scoring", "sentiment"}


def test_requests_to_a_language_model_are_counted(small_round: Params, chat_server: Any) -> None:
    endpoint = {"base_url": chat_server.url, "model": "wise", "max_retries": 0}
    values = small_round.model_dump(mode="json")
    values["annotate"] |= {"annotator": "judge", "judge": "endpoint", "prompts": 2, "samples": 2}
    values["annotate"]["endpoint"] |= endpoint
    chat_server.answer = lambda _: '{"reason": "so", "preference": "A"}'
    params = check_params(values, "test")
    lines: list[str] = []
    with reporting("annotate@r0", lines.append, 0.0), pytest.raises(Exception, match="no response"):
        annotate(params, "r0")
    assert any(line.startswith("[annotate@r0] asking wise 1/") for line in lines)
    assert any(line.startswith("[annotate@r0] sampling ") for line in lines)


def test_each_long_pass_of_prepare_says_what_it_does(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sources = {name: rows for name, rows in world().items() if name.startswith("train")}
    sources["train_texts.jsonl"] += [
        {"prompt": f"My walk at home with Anna after work {end}", "completion": " was nice."}
        for end in ("in May", "in Rome")  # near duplicates
    ]
    for name, rows in sources.items():
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    Path("assets/start").mkdir(parents=True)
    for folder in ("prepare/data", "replay/data"):
        Path("assets/start", folder).mkdir(parents=True)
        Path("assets/start", folder, "EMPTY").touch()
    Path("assets/data").mkdir()
    Path("assets/model").symlink_to(tiny_folder)
    listed = [{"path": name, "use": "train"} for name in sources]
    values = {"assets": {"data": "files"}, "prepare": {"sources": listed, "near_duplicate": 0.7}}
    params = check_params(values, "test")
    inputs(params, "r0")
    assert passes(prepare, params) >= {
        "reading train_pairs.jsonl",
        "near duplicates",
        "near-duplicate prompts",
        "prompt lengths",
        "words",
        "near duplicates of held-out texts",
        "languages",
        "TF-IDF",
    }

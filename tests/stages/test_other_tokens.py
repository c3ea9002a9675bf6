"""A reward model of another architecture and tokenizer through all stages that use one: it reads
texts, and its scores are those that transformers computes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer, GPT2Config

from stages.assets.inputs import main as inputs
from stages.battery.__main__ import main as battery
from stages.battery.best_of_n import sample_and_score
from stages.evaluate.__main__ import main as evaluate
from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_jsonl
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.policy import Algorithm, Critic, Engine
from stages.lib.data.rollouts import read_rollouts
from stages.lib.judging.loading import load_primary_judge
from stages.lib.lm.loading import load_causal_lm, load_tokenizer
from stages.lib.lm.scoring import RewardScorer
from stages.ppo.__main__ import main as ppo
from stages.replay.__main__ import main as replay
from stages.reward.__main__ import main as reward
from tests.paths import ROOT
from tests.tokenizers import make_boundary_tokenizer

PPO = {
    "critic": "policy",
    "batch_size": 4,
    "mini_batch_size": 4,
    "micro_batch_size": 2,
    "max_steps": 1,
    "validation_updates": 1,
    "min_kl_per_token": 0,
}


@pytest.fixture
def given(make_round: Callable[[str, float], Params], monkeypatch: pytest.MonkeyPatch) -> Params:
    """Its `reward.model` is a GPT-2 with the tokenizer of Llama 2, which pads with EOS."""
    settings = make_round("r0", 1.0).model_dump(mode="json")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    tokenizer = make_boundary_tokenizer("always")
    tokenizer.pad_token = tokenizer.eos_token
    torch.manual_seed(3)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "num_labels": 1}
    config = GPT2Config(vocab_size=len(tokenizer), initializer_range=0.5, **sizes)
    AutoModelForSequenceClassification.from_config(config).save_pretrained("mine")
    tokenizer.save_pretrained("mine")

    settings["reward"] |= {"model": "mine"}
    settings["ppo"] |= PPO
    params = check_params(settings, "test")
    Path("params.yaml").write_text(yaml.safe_dump(params.model_dump(mode="json")))
    inputs(params, "r0")
    return params


@torch.no_grad()
def score(prompt: str, response: str) -> float:
    """By transformers, in the reward stage's unit."""
    tokenizer = AutoTokenizer.from_pretrained("mine")
    model = AutoModelForSequenceClassification.from_pretrained("mine", dtype=torch.float32).eval()
    ids = [*tokenizer(prompt + response).input_ids, tokenizer.eos_token_id]
    unit = metrics("reward")
    raw = float(model(input_ids=torch.tensor([ids])).logits[0, 0])
    return (raw - unit["score_mean"]) / unit["score_std"]


def metrics(stage: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(Path(f"rounds/r0/{stage}/metrics.json").read_text())
    return values


@pytest.mark.parametrize("algorithm", ["ppo", "rloo", "dpo"])
def test_all_stages_score_the_texts(given: Params, algorithm: str) -> None:
    given.algorithm = Algorithm(algorithm)
    for stage in (reward, battery, ppo, evaluate, replay):
        stage(given, "r0")

    [pair, *_] = read_jsonl(Path("rounds/r0/prepare/data/pairs_eval.jsonl"), "")
    [row, *_] = read_jsonl(Path("rounds/r0/reward/scores.jsonl"), "")
    assert row["chosen"] == pytest.approx(score(pair["prompt"], pair["chosen"]), abs=1e-3)
    assert metrics("battery")["lineage_distance"] == 1.0  # no weight has the name of one of SFT
    episodes = [*read_rollouts(Path("rounds/r0/ppo/rollouts"))]
    samples = read_jsonl(Path("rounds/r0/evaluate/samples.jsonl"), "")
    scored = [(row["prompt"], row["response"], row["score"]) for row in episodes]
    scored += [(row["prompt"], row["ppo"], row["ppo_score"]) for row in samples]
    assert len({number for *_, number in scored}) > 4
    for prompt, response, number in scored:
        assert number == pytest.approx(score(prompt, response), abs=1e-3)
    assert metrics("replay")["badcases"] > 0


def test_the_battery_scores_the_texts_of_its_samples(given: Params) -> None:
    reward(given, "r0")
    sft = Path("rounds/r0/sft/model")
    samples = sample_and_score(
        load_causal_lm(sft, given.model),
        load_tokenizer(sft),
        RewardScorer(Path("rounds/r0/reward/model"), given),
        load_primary_judge(given, "r0"),
        [{"id": "a", "prompt": "The dinner"}, {"id": "b", "prompt": "Our meeting"}],
        2,
        given,
    )
    prompts = [prompt for prompt in samples.prompts for _ in range(2)]
    expected = [score(prompt, text) for prompt, text in zip(prompts, samples.texts, strict=True)]
    assert samples.scores == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("critic", Critic.reward, "set ppo.critic to policy"),
        ("reward_url", "http://127.0.0.1:9", "set ppo.reward_url to null"),
        ("engine", Engine.verl, "set ppo.engine to local"),
    ],
)
def test_what_needs_the_policys_tokens_is_refused_before_ppo(
    given: Params, name: str, value: Any, advice: str
) -> None:
    setattr(given.ppo, name, value)
    with pytest.raises(BadInput, match=rf"reward\.model mine: its tokens are .*Next: {advice}$"):
        reward(given, "r0")

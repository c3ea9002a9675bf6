"""Every stage in bfloat16, with the temperature, the KL controller and the mini-batches that most
tests of the stages leave at their simplest.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from stages.annotate.__main__ import main as annotate
from stages.assets.inputs import main as inputs
from stages.battery.__main__ import main as battery
from stages.evaluate.__main__ import main as evaluate
from stages.lib.core.files import read_jsonl
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.shared import LoraParams, ModelParams
from stages.lib.core.types import Prompt, TokenIds
from stages.lib.lm.loading import load_causal_lm, load_tokenizer
from stages.lib.lm.lora import add_adapters
from stages.lib.lm.responses import Responder, Response
from stages.lib.lm.saving import merge_adapter, save_model
from stages.lib.lm.scoring import RewardScorer
from stages.ppo.__main__ import main as ppo
from stages.replay.__main__ import main as replay
from stages.reward.__main__ import main as reward
from stages.sft.__main__ import main as sft
from tests.paths import ROOT

ROUND = Path("rounds/r0")
BETA, TARGET, BATCH, HORIZON = 0.1, 0.01, 4, 8
LORA = {"r": 8, "lora_alpha": 16}
CHANGES: dict[str, dict[str, Any]] = {
    "model": {"dtype": "bfloat16"},
    # SFT has to learn words that the judge of `annotate` knows
    "sft": {
        "learning_rate": 5e-3,
        "max_steps": 40,
        "samples_per_prompt": 1,
        "per_device_train_batch_size": 18,
        "lora": {"r": 0},
    },
    "annotate": {"annotator": "judge", "samples": 4},
    "reward": {"max_steps": 4, "per_device_train_batch_size": 8, "lora": LORA},
    "evaluate": {"judges": ["lexicon"]},
    "ppo": {
        "temperature": 0.7,
        "kl_control": "adaptive",
        "kl_coef": BETA,
        "target_kl_per_token": TARGET,
        "kl_horizon": HORIZON,
        "batch_size": BATCH,
        "mini_batch_size": BATCH // 2,
        "micro_batch_size": BATCH // 2,
        "total_episodes": 5 * BATCH,
        "learning_rate": 1e-2,
        "save_updates": 1,
        "max_kl_per_token": 1000.0,
        "on_danger": "warn",
        "lora": LORA,
        "critic_lora": LORA,
    },
}


def dtypes(path: str) -> set[torch.dtype]:
    return {weight.dtype for weight in load_file(ROUND / path).values()}


def metrics_of(stage: str) -> dict[str, Any]:
    return json.loads((ROUND / stage / "metrics.json").read_text())


@pytest.fixture
def params(make_round: Callable[[str, float], Params], monkeypatch: pytest.MonkeyPatch) -> Params:
    """Of a round that has prepare's outputs alone."""
    values = make_round("r0", 1.0).model_dump()
    for stage in ("annotate", "sft", "reward", "ppo"):
        shutil.rmtree(ROUND / stage)
    changed = check_params(
        values | {name: values[name] | section for name, section in CHANGES.items()}, "test"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("params.yaml").write_text(yaml.safe_dump(changed.model_dump(mode="json")))
    inputs(changed, "r0")
    return changed


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[TokenIds]:
    """Prompt, response and EOS of each response that is sampled from now on."""
    sequences: list[TokenIds] = []
    respond = Responder.__call__

    def record(self: Responder, model: Any, prompts: list[Prompt], seed: int) -> list[Response]:
        responses, eos = respond(self, model, prompts, seed), self.tokenizer.eos_token_id
        for response in responses:
            ended = response.tokens + [eos] * (response.tokens[-1] != eos)
            sequences.append(response.prompt_ids + ended)
        return responses

    monkeypatch.setattr(Responder, "__call__", record)
    return sequences


def test_every_stage_runs_in_bfloat16(
    params: Params, second_is_best: Callable[[Params], Params], sampled: list[TokenIds]
) -> None:
    sft(params, "r0")
    assert dtypes("sft/model/model.safetensors") == {torch.bfloat16}
    losses = metrics_of("sft")
    assert losses["loss_after"] < 0.5 * losses["loss_before"]
    annotate(params, "r0")
    pairs = read_jsonl(ROUND / "annotate/data/pairs_train.jsonl", "")
    assert pairs and {row["source"] for row in pairs} == {"judge"}
    reward(params, "r0")
    check_reward_model(params)
    battery(params, "r0")
    assert metrics_of("battery")["centre"] == pytest.approx(0.0, abs=0.05)
    ppo(second_is_best(params), "r0")
    check_policy()
    inputs(params, "r0")
    evaluate(params, "r0")
    evaluated = metrics_of("evaluate")
    assert evaluated["reproduced"]
    assert evaluated["sft"]["kl"] == 0.0 < evaluated["ppo"]["kl"]
    replay(params, "r0")
    check_badcases(params, sampled)


def check_reward_model(params: Params) -> None:
    assert dtypes("reward/model/model.safetensors") == {torch.bfloat16}
    assert metrics_of("reward")["reload_max_difference"] == 0.0
    folder = ROUND / "reward/model"
    scorer = RewardScorer(folder, params)
    pairs = read_jsonl(ROUND / "prepare/data/pairs_eval.jsonl", "")
    scores = {row["id"]: row["chosen"] for row in read_jsonl(ROUND / "reward/scores.jsonl", "")}
    again = scorer([row["prompt"] for row in pairs], [row["chosen"] for row in pairs])
    assert again == pytest.approx([scores[row["id"]] for row in pairs], abs=1e-4)


def check_policy() -> None:
    """The judge likes the policy after update 2 best, of 0, 2, 4 and 5. Beta follows Ziegler's
    rule, over half of the horizon in each update.
    """
    assert metrics_of("ppo")["policy_update"] == 2
    saved = {
        name: (ROUND / "ppo" / name / "adapter_model.safetensors").read_bytes()
        for name in ("policy", *(f"checkpoints/step_0000{update}" for update in range(1, 6)))
    }
    assert saved.pop("policy") == saved["checkpoints/step_00002"] and len(set(saved.values())) == 5
    assert dtypes("ppo/policy/adapter_model.safetensors") == {torch.float32}
    steps = read_jsonl(ROUND / "ppo/metrics.jsonl", "")
    expected = [BETA]
    for step in steps[:-1]:
        error = min(max(step["kl_per_token"] / TARGET - 1, -0.2), 0.2)
        expected.append(max(expected[-1] * (1 + error * BATCH / HORIZON), BETA))
    assert [step["kl_coef"] for step in steps] == pytest.approx(expected)
    assert expected[-1] > BETA and steps[0]["kl_per_token"] == pytest.approx(0.0, abs=1e-3)
    assert len({step["policy_loss"] for step in steps}) == 5


def check_badcases(params: Params, sampled: list[TokenIds]) -> None:
    """A fresh response has the score of its tokens, in other batches. Its text may have other
    tokens: the policy also writes words that its tokenizer splits otherwise.
    """
    assert metrics_of("replay")["badcases"] > 0
    folder = ROUND / "reward/model"
    scorer = RewardScorer(folder, params)
    texts = scorer.tokenizer.batch_decode(sampled, skip_special_tokens=True)
    tokens_of = dict(zip(texts, sampled, strict=True))
    fresh = [
        row
        for row in read_jsonl(ROUND / "replay/data/badcases.jsonl", "")
        if row["origin"] == "fresh"
    ]
    scores = scorer.tokens([tokens_of[row["prompt"] + row["response"]] for row in fresh])
    assert fresh and scores == pytest.approx([row["score"] for row in fresh], abs=0.1)


def test_a_merged_model_in_bfloat16_has_rotary_frequencies_in_float32(
    tiny_folder: Path, tmp_path: Path, shift: Callable[..., None]
) -> None:
    """And so the same states as its copy that is loaded from its files."""
    settings = ModelParams(dtype="bfloat16")
    model = add_adapters(load_causal_lm(tiny_folder, settings), LoraParams(r=4), "CAUSAL_LM")
    shift(model, 0.1)
    merged = merge_adapter(model, torch.bfloat16)
    assert {weight.dtype for weight in merged.parameters()} == {torch.bfloat16}
    frequencies = {name: buffer for name, buffer in merged.named_buffers() if "inv_freq" in name}
    assert {buffer.dtype for buffer in frequencies.values()} == {torch.float32}
    save_model(merged, load_tokenizer(tiny_folder), tmp_path)
    ids = torch.arange(5, 69)[None]
    with torch.no_grad():
        loaded = load_causal_lm(tmp_path, settings)(ids).logits
        assert torch.equal(merged(ids).logits, loaded)

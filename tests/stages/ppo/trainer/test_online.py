"""RLOO and GRPO: advantages and gradients against those of TRL's trainers, steps, learning."""

import copy
import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, LlamaForCausalLM
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.rloo_trainer import RLOOTrainer

from stages.assets.inputs import main as inputs
from stages.lib.core.files import read_json, read_jsonl, write_json, write_jsonl
from stages.lib.core.params import Params
from stages.lib.data.rollouts import read_rollouts
from stages.lib.lm.saving import saved_weights_hash, trainable_named
from stages.ppo.__main__ import main
from stages.ppo.common.episodes import make_episodes
from stages.ppo.trainer.advantages import ONLINE
from stages.ppo.trainer.roles import load_roles
from stages.ppo.trainer.rollout import Rollout
from stages.ppo.trainer.update import PpoTrainer

TRL: dict[str, Any] = {"rloo": (RLOOTrainer, RLOOConfig), "grpo": (GRPOTrainer, GRPOConfig)}
FOLDER = Path("rounds/r0/ppo")


def make_trainer(params: Params) -> PpoTrainer:
    roles = load_roles(params, Path("rounds/r0/sft/model"), Path("rounds/r0/reward/model"))
    rows = read_jsonl(Path("rounds/r0/prepare/data/prompts_train.jsonl"), "")
    prompts, _ = make_episodes(rows, roles.tokenizer, params)
    return PpoTrainer(roles, prompts, params.ppo, 0, ONLINE[params.algorithm](params))


def grpo_options(params: Params) -> dict[str, Any]:
    ppo, grpo = params.ppo, params.grpo
    return {
        "loss_type": grpo.loss_type.value,
        "scale_rewards": grpo.scale_rewards.value,
        "epsilon_high": ppo.cliprange_high,
        "delta": ppo.delta,
        "mask_truncated_completions": ppo.mask_truncated_completions,
    }


def make_trl_trainer(params: Params, model: Any, tokenizer: Any, samples: list[Rollout]) -> Any:
    """TRL's trainer on the prompts, responses and rewards of the last of `samples`."""
    name, ppo = params.algorithm.value, params.ppo
    trainer_class, config_class = TRL[name]

    class OnGivenSamples(trainer_class):  # type: ignore[misc]
        def _tokenize_prompts(self, _: Any) -> Any:
            return [response.prompt_ids for response in samples[-1].responses], None, {}

        def _generate_single_turn(self, *_: Any, **__: Any) -> Any:
            responses = [response.tokens for response in samples[-1].responses]
            return responses if name == "rloo" else (responses, None)

    section = getattr(params, name)
    config = config_class(
        output_dir="trl",
        per_device_train_batch_size=ppo.batch_size,
        num_generations=section.num_generations,
        num_iterations=2,  # else GRPOTrainer keeps no log-probabilities of the sampling policy
        beta=section.beta,
        epsilon=ppo.cliprange,
        temperature=ppo.temperature,
        max_completion_length=ppo.response_length,
        use_cpu=True,
        bf16=False,
        report_to=[],
        **(grpo_options(params) if name == "grpo" else {}),
    )
    return OnGivenSamples(
        model=model,
        reward_funcs=lambda completions, **_: samples[-1].scores.tolist(),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "The"}] * ppo.batch_size),
        processing_class=tokenizer,
    )


@torch.no_grad()
def copy_weights(source: Any, target: Any) -> None:
    for name, weight in trainable_named(source):
        target.get_parameter(name).copy_(weight)


@pytest.mark.parametrize(
    ("algorithm", "options", "changes"),
    [
        ("rloo", {}, {}),
        ("grpo", {}, {}),
        ("grpo", {"loss_type": "dapo", "scale_rewards": "batch"}, {"cliprange_high": 0.09}),
        ("grpo", {"loss_type": "dr_grpo", "scale_rewards": "none"}, {"delta": 1.06}),
        ("grpo", {"loss_type": "dapo"}, {"mask_truncated_completions": True}),
    ],
)
def test_advantages_and_gradients_are_those_of_trl(
    make_params, shift, monkeypatch, algorithm, options, changes
):
    """The policy differs from SFT when it samples, and has moved since, so that ratios are clipped.
    Four responses to two prompts, in micro-batches of two; one of each prompt is cut off.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    params = make_params(
        algorithm,
        {"num_generations": 2, "beta": 0.5, **options},
        temperature=0.7,
        missing_eos_penalty=0.25,
        max_grad_norm=1e9,
        cliprange=0.05,
        **changes,
    )
    trainer, samples = make_trainer(params), list[Rollout]()
    roles = trainer.roles
    # TRL copies the adapter as the reference, while it is 0
    model = copy.deepcopy(roles.policy)
    trl_trainer = make_trl_trainer(params, model, roles.tokenizer, samples)
    shift(roles.policy, 0.1)
    copy_weights(roles.policy, model)
    batch = trainer.sample_prompts()
    responses = roles.sample([tokens for _, tokens in batch], params.ppo, trainer.generator)
    for i in (0, 3):
        ended = [*responses[i].tokens[:5], roles.tokenizer.eos_token_id]
        responses[i] = replace(responses[i], tokens=ended, ended=True)
    samples.append(rollout := trainer.rollout(batch, responses))
    model.train()
    outputs = trl_trainer._generate_and_score_completions([{"prompt": "The"}] * 4)
    advantages = rollout.advantages[:, 0].tolist()
    assert advantages == pytest.approx(outputs["advantages"].tolist(), abs=2e-3)
    assert rollout.kl.sum(1).min() > 0.1 and max(map(abs, advantages)) > 0.1
    assert torch.equal(rollout.advantages, rollout.advantages[:, :1] * rollout.mask)

    shift(roles.policy, 0.02)
    copy_weights(roles.policy, model)
    trl_trainer.current_gradient_accumulation_steps = 1
    loss = trl_trainer.compute_loss(model, outputs)
    loss.backward()
    for optimizer in trainer.optimizers.values():
        optimizer.step = lambda: None
    metrics = trainer.optimizer_step(rollout, list(range(4)))
    assert 0 < metrics["clip_fraction"] < 1
    if algorithm == "rloo":  # GRPO's loss has the KL
        assert metrics["policy_loss"] == pytest.approx(float(loss.detach()), rel=1e-3)
    for name, weight in trainable_named(roles.policy):
        torch.testing.assert_close(
            weight.grad, model.get_parameter(name).grad, rtol=1e-3, atol=1e-4
        )
    assert metrics["policy_grad_norm"] > 0.1


@pytest.mark.parametrize("algorithm", TRL)
def test_an_update_takes_as_many_steps_on_a_batch_as_in_ppo(make_params, algorithm):
    params = make_params(
        algorithm,
        {"num_generations": 2},
        num_ppo_epochs=2,
        mini_batch_size=2,
        micro_batch_size=1,
        learning_rate=0.003,
    )
    main(params, "r0")
    steps = [json.loads(line) for line in (FOLDER / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert steps[0]["kl"] == pytest.approx(0.0, abs=1e-6) and steps[-1]["kl"] != 0.0
    rollouts = list(read_rollouts(FOLDER / "rollouts"))
    by_update = {
        update: list(rows) for update, rows in groupby(rollouts, lambda row: row["update"])
    }
    for update in (1, 2, 3, 4):
        rows = by_update[update][:4]
        first, second, third, fourth = (row["id"] for row in rows)
        assert first == second != third == fourth
        mean_score = fmean(row["score"] for row in rows)
        assert steps[update - 1]["score_mean"] == pytest.approx(mean_score, abs=1e-4)


@pytest.mark.parametrize("algorithm", TRL)
def test_a_users_reward_rises(make_params, monkeypatch, tmp_path, algorithm):
    """The share of vowels; the margin is five standard errors of the difference of two means of 96
    samples.
    """
    Path(f"vowels_{algorithm}.py").write_text(
        "def reward(prompts, responses):\n"
        "    return [5 * sum(c in 'aeiou' for c in r) / (len(r) + 1) for r in responses]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    params = make_params(
        algorithm,
        {"beta": 0.0},
        rewards=[{"name": "vowels", "function": f"vowels_{algorithm}:reward"}],
        reward_weight=0.0,
        missing_eos_penalty=0.0,
        batch_size=32,
        mini_batch_size=32,
        micro_batch_size=32,
        total_episodes=1280,
        num_ppo_epochs=2,
        learning_rate=0.01,
        validation_updates=100,
        on_danger="warn",
    )
    write_jsonl(
        Path("rounds/r0/prepare/data/prompts_train.jsonl"),
        [{"id": str(n), "prompt": f"Day {n}"} for n in range(40)],
    )
    write_random_model(Path("rounds/r0/sft/model"))
    inputs(params, "r0")
    main(params, "r0")
    steps = [json.loads(line) for line in (FOLDER / "metrics.jsonl").read_text().splitlines()]
    first, last = (fmean(row["reward_mean"] for row in part) for part in (steps[:3], steps[-3:]))
    assert last > first + 5 * steps[0]["reward_std"] * (2 / 96) ** 0.5


def write_random_model(folder: Path) -> None:
    """Replace a model by a random one, with weights so large that adapters can change it much."""
    config = AutoConfig.from_pretrained(folder)
    config.initializer_range, config.tie_word_embeddings = 0.3, False
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    manifest = folder.parent / "manifest.json"
    write_json(manifest, read_json(manifest, "") | {"weights": saved_weights_hash(folder)})

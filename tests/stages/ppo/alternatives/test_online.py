"""RLOO and GRPO: tokens, rewards, log-probabilities, advantages, gradients, learning."""

import json
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

from stages.assets.inputs import main as inputs
from stages.lib.core.files import read_json, write_json, write_jsonl
from stages.lib.data.prompts import encode
from stages.lib.data.rollouts import read_rollouts
from stages.lib.lm.packing import padding_free
from stages.lib.lm.saving import saved_weights_hash
from stages.lib.lm.scoring import RewardScorer
from stages.ppo.__main__ import main
from stages.ppo.alternatives import grpo, rloo
from stages.ppo.alternatives.run import load

KINDS = {"rloo": rloo, "grpo": grpo}
FOLDER = Path("rounds/r0/ppo")
BETA, TEMPERATURE = 0.5, 0.7


@pytest.fixture(params=KINDS)
def trainer(request, make_params, shift):
    """Its policy differs from SFT."""
    ppo = {"temperature": TEMPERATURE, "missing_eos_penalty": 0.25, "score_clip": 0.1}
    params = make_params(request.param, {"num_generations": 2, "beta": BETA}, **ppo)
    trainer = KINDS[request.param].make_trainer(load(params, "r0"))
    trainer.policy_callback.begin(trainer.model)
    shift(trainer.model, 0.1)
    return trainer


def all_logprobs(model, prompt, response):
    """(T, V) at each response token, by transformers' logits and the temperature."""
    ids = torch.tensor([prompt + response], device=model.device)
    states = model.base_model(ids).last_hidden_state
    logits = model.lm_head(states)[0, len(prompt) - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1)


def unpadded(outputs: dict, part: str) -> list[list[int]]:
    """The tokens of all prompts or completions in TRL's outputs."""
    return [
        ids[mask.bool()].tolist()
        for ids, mask in zip(outputs[f"{part}_ids"], outputs[f"{part}_mask"], strict=True)
    ]


def test_tokens_rewards_logprobs_and_advantages(trainer):
    callback, context = trainer.policy_callback, trainer.policy_callback.context
    batch = [trainer.train_dataset[index] for index in (0, 0, 1, 1)]
    trainer.model.train()
    with padding_free(trainer.model):
        outputs = trainer._generate_and_score_completions(batch)

    # prompts have the tokens of stages/lib/data/prompts.py
    prompts, responses = unpadded(outputs, "prompt"), unpadded(outputs, "completion")
    rows = [context.prompts[row["prompt_index"]][0] for row in batch]
    assert prompts == [
        encode(context.tokenizer, row["prompt"], None, context.params.prepare.prompt_format)[0]
        for row in rows
    ]

    # rewards: calibrated scores of tokens closed by EOS, clipped to 0.1, less 0.25 without EOS
    eos = context.tokenizer.eos_token_id
    closed = [response if response[-1] == eos else [*response, eos] for response in responses]
    scorer = RewardScorer(Path("rounds/r0/reward/model"), context.tokenizer, context.params)
    scores = scorer.tokens([p + c for p, c in zip(prompts, closed, strict=True)])
    rewards = [
        max(-0.1, min(0.1, score)) - 0.25 * (response[-1] != eos)
        for score, response in zip(scores, responses, strict=True)
    ]
    assert [row["score"] for row in callback.scored.rows] == pytest.approx(scores, abs=1e-3)
    assert [row["reward"] for row in callback.scored.rows] == pytest.approx(rewards, abs=1e-3)
    assert list(trainer._logs["rewards"]["reward"]) == pytest.approx(rewards, abs=1e-5)

    # log-probabilities are those of transformers' logits, divided by the temperature
    model, episodes = trainer.model.get_base_model(), list(zip(prompts, responses, strict=True))
    with torch.no_grad():
        policy = [all_logprobs(model, *episode) for episode in episodes]
        with trainer.model.disable_adapter():
            ref = [all_logprobs(model, *episode) for episode in episodes]
    kls = [float((p.exp() * (p - q)).sum()) for p, q in zip(policy, ref, strict=True)]
    assert [row["kl"] for row in callback.scored.rows] == pytest.approx(kls, abs=1e-3)
    assert min(kls) > 0.1
    policy_logprobs, ref_logprobs = (
        [rows[range(len(tokens)), tokens] for rows, tokens in zip(side, responses, strict=True)]
        for side in (policy, ref)
    )
    k1 = [float((p - q).sum()) for p, q in zip(policy_logprobs, ref_logprobs, strict=True)]

    # advantages of two responses to one prompt. RLOO: the difference of their rewards less KL.
    # GRPO: the distances of the rewards from their mean, standardised
    if "old_logps" in outputs:
        sums = [float(logprobs.sum()) for logprobs in policy_logprobs]
        assert outputs["old_logps"].tolist() == pytest.approx(sums, abs=1e-3)
        a, b, c, d = (reward - BETA * kl for reward, kl in zip(rewards, k1, strict=True))
        expected = [a - b, b - a, c - d, d - c]
    else:
        for column, expected_logprobs in (
            ("old_per_token_logps", policy_logprobs),
            ("ref_per_token_logps", ref_logprobs),
        ):
            for logprobs, expected_row in zip(outputs[column], expected_logprobs, strict=True):
                assert logprobs[: len(expected_row)].tolist() == pytest.approx(
                    expected_row.tolist(), abs=1e-4
                )
        pairs = [rewards[:2], rewards[2:]]
        expected = [
            (reward - fmean(pair)) / (stdev(pair) + 1e-4) for pair in pairs for reward in pair
        ]
    assert outputs["advantages"].tolist() == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("algorithm", KINDS)
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
    rollouts = list(read_rollouts(FOLDER / "rollouts", ""))
    by_update = {
        update: list(rows) for update, rows in groupby(rollouts, lambda row: row["update"])
    }
    for update in (1, 2, 3, 4):
        rows = by_update[update][:4]
        first, second, third, fourth = (row["id"] for row in rows)
        assert first == second != third == fourth
        mean_score = fmean(row["score"] for row in rows)
        assert steps[update - 1]["score_mean"] == pytest.approx(mean_score, abs=1e-6)


def test_gradients_are_those_of_the_papers(trainer):
    """At ratio r = 1, without padding or TRL's head. RLOO: -r A per response, mean over responses.
    GRPO: -r A per token and beta r k3 (DeepSeek-V3.2, which is unbiased), mean over the tokens of a
    response, then over responses.
    """
    batch, model = [trainer.train_dataset[index] for index in (0, 0, 1, 1)], trainer.model
    model.train()
    trainer.current_gradient_accumulation_steps = 1
    with padding_free(model):
        outputs = trainer._generate_and_score_completions(batch)
        trainer.compute_loss(model, outputs).backward()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    gradients = {name: weight.grad.clone() for name, weight in trained.items()}
    model.zero_grad()

    losses = []
    prompts, responses = unpadded(outputs, "prompt"), unpadded(outputs, "completion")
    for row, advantage in enumerate(outputs["advantages"].tolist()):
        response = responses[row]
        rows = all_logprobs(model.get_base_model(), prompts[row], response)
        logprobs = rows[range(len(response)), response]
        if "old_logps" in outputs:
            losses.append(-advantage * logprobs.sum())  # the gradient of r is that of log p
        else:
            ref_logprobs = outputs["ref_per_token_logps"][row, : len(responses[row])]
            log_ratio = ref_logprobs - logprobs
            k3 = log_ratio.exp() - log_ratio - 1
            losses.append(((BETA * k3.detach() - advantage) * logprobs + BETA * k3).mean())
    torch.stack(losses).mean().backward()
    for name, weight in trained.items():
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-3, atol=1e-5)
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-3


@pytest.mark.parametrize("algorithm", KINDS)
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

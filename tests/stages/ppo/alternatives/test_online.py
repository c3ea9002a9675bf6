"""What RLOO and GRPO are given and make of it: tokens, rewards, log-probabilities, advantages."""

import json
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

from stages.lib.core.files import write_jsonl
from stages.lib.data.prompts import encode
from stages.lib.data.rollouts import read_rollouts
from stages.lib.lm.packing import padding_free
from stages.lib.lm.scoring import RewardScorer
from stages.ppo.__main__ import main
from stages.ppo.alternatives import grpo, rloo
from stages.ppo.alternatives.run import load

KINDS = {"rloo": rloo, "grpo": grpo}
FOLDER = Path("rounds/r0/ppo")
BETA, TEMPERATURE = 0.5, 0.7


@pytest.fixture(params=KINDS)
def trainer(request, make_params, shift):
    """Whose policy is no longer SFT."""
    sizes = {"temperature": TEMPERATURE, "missing_eos_penalty": 0.25, "score_clip": 0.1}
    made = KINDS[request.param].make_trainer(
        load(make_params(request.param, {"num_generations": 2, "beta": BETA}, **sizes), "r0")
    )
    made.course.begin(made.model)
    shift(made.model, 0.1)
    return made


def test_tokens_rewards_logprobs_and_advantages(trainer):
    course, setting = trainer.course, trainer.course.setting
    batch = [trainer.train_dataset[place] for place in (0, 0, 1, 1)]
    trainer.model.train()
    with padding_free(trainer.model):
        made = trainer._generate_and_score_completions(batch)

    # prompts have the tokens of stages/lib/data/prompts.py
    prompts = [
        ids[mask.bool()].tolist()
        for ids, mask in zip(made["prompt_ids"], made["prompt_mask"], strict=True)
    ]
    rows = [setting.prompts[row["place"]][0] for row in batch]
    assert prompts == [
        encode(setting.tokenizer, row["prompt"], None, setting.params.prepare.prompt_format)[0]
        for row in rows
    ]

    # rewards: calibrated scores of tokens closed by EOS, clipped to 0.1, less 0.25 without EOS
    eos = setting.tokenizer.eos_token_id
    responses = [
        ids[mask.bool()].tolist()
        for ids, mask in zip(made["completion_ids"], made["completion_mask"], strict=True)
    ]
    closed = [response if response[-1] == eos else [*response, eos] for response in responses]
    scorer = RewardScorer(Path("rounds/r0/reward/model"), setting.tokenizer, setting.params, 8)
    scores = scorer.tokens([p + c for p, c in zip(prompts, closed, strict=True)])
    rewards = [
        max(-0.1, min(0.1, s)) - 0.25 * (r[-1] != eos)
        for s, r in zip(scores, responses, strict=True)
    ]
    assert [row["score"] for row in course.rows] == pytest.approx(scores, abs=1e-3)
    assert [row["reward"] for row in course.rows] == pytest.approx(rewards, abs=1e-3)
    assert list(trainer._logs["rewards"]["reward"]) == pytest.approx(rewards, abs=1e-5)

    # log-probabilities are those of transformers' logits, divided by the temperature
    inner = trainer.model.get_base_model()

    @torch.no_grad()
    def logprobs(prompt, response):
        logits = inner.lm_head(
            inner.base_model(torch.tensor([prompt + response])).last_hidden_state
        )[0, len(prompt) - 1 : -1]
        return (logits / TEMPERATURE).log_softmax(-1)[range(len(response)), response]

    own = [logprobs(*pair) for pair in zip(prompts, responses, strict=True)]
    with trainer.model.disable_adapter():
        reference = [logprobs(*pair) for pair in zip(prompts, responses, strict=True)]
    kls = [float((a - b).sum()) for a, b in zip(own, reference, strict=True)]
    assert [row["kl"] for row in course.rows] == pytest.approx(kls, abs=1e-3) and max(
        map(abs, kls)
    ) > 0.1

    # advantages of two responses to a prompt: the difference; or plus and minus what two numbers
    # are from their mean, standardised
    if "old_logps" in made:
        assert made["old_logps"].tolist() == pytest.approx(
            [float(each.sum()) for each in own], abs=1e-3
        )
        lowered = [reward - BETA * kl for reward, kl in zip(rewards, kls, strict=True)]
        expected = [
            lowered[0] - lowered[1],
            lowered[1] - lowered[0],
            lowered[2] - lowered[3],
            lowered[3] - lowered[2],
        ]
    else:
        told = zip(
            made["old_per_token_logps"], made["ref_per_token_logps"], own, reference, strict=True
        )
        for old, was, ours, theirs in told:
            assert old[: len(ours)].tolist() == pytest.approx(ours.tolist(), abs=1e-4)
            assert was[: len(theirs)].tolist() == pytest.approx(theirs.tolist(), abs=1e-4)
        pairs = [rewards[:2], rewards[2:]]
        expected = [
            (reward - fmean(pair)) / (stdev(pair) + 1e-4) for pair in pairs for reward in pair
        ]
    assert made["advantages"].tolist() == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("algorithm", KINDS)
def test_an_update_is_a_batch_of_samples_that_is_learnt_from_as_often_as_ppo_does(
    make_params, algorithm
):
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
    by_update = {
        update: list(rows)
        for update, rows in groupby(
            read_rollouts(FOLDER / "rollouts", ""), lambda row: row["update"]
        )
    }
    for update in (1, 2, 3, 4):
        rows = by_update[update][:4]
        assert [rows[0]["id"], rows[2]["id"]] == [rows[1]["id"], rows[3]["id"]] and rows[0][
            "id"
        ] != rows[2]["id"]
        assert steps[update - 1]["score_mean"] == pytest.approx(
            fmean(row["score"] for row in rows), abs=1e-6
        )


def test_gradients_are_those_of_the_papers(trainer):
    """At ratio r = 1, without padding or TRL's head. RLOO: -r A of a response, mean over them.
    GRPO: -r A of a token and beta r k3 (DeepSeek-V3.2, which is unbiased), mean over its response,
    then over responses."""
    batch, model = [trainer.train_dataset[place] for place in (0, 0, 1, 1)], trainer.model
    model.train()
    trainer.current_gradient_accumulation_steps = 1
    with padding_free(model):
        made = trainer._generate_and_score_completions(batch)
        trainer.compute_loss(model, made).backward()
    found = {
        name: weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }
    model.zero_grad()

    losses = []
    for row, advantage in enumerate(made["advantages"].tolist()):
        prompt, response = (
            made[f"{part}_ids"][row][made[f"{part}_mask"][row].bool()].tolist()
            for part in ("prompt", "completion")
        )
        states = (
            model.get_base_model().base_model(torch.tensor([prompt + response])).last_hidden_state
        )
        logits = model.get_base_model().lm_head(states)[0, len(prompt) - 1 : -1] / TEMPERATURE
        logprobs = logits.log_softmax(-1)[range(len(response)), response]
        if "old_logps" in made:
            losses.append(-advantage * logprobs.sum())  # r's gradient is that of log p
        else:
            behind = made["ref_per_token_logps"][row, : len(response)] - logprobs
            k3 = behind.exp() - behind - 1
            losses.append(((BETA * k3.detach() - advantage) * logprobs + BETA * k3).mean())
    torch.stack(losses).mean().backward()
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            torch.testing.assert_close(found[name], weight.grad, rtol=1e-3, atol=1e-5)
    assert max(float(gradient.abs().max()) for gradient in found.values()) > 1e-3


@pytest.mark.parametrize("algorithm", KINDS)
def test_a_users_reward_rises(make_params, monkeypatch, tmp_path, algorithm):
    """The share of vowels; the margin is five standard errors of the difference of two means of 96
    samples.
    """
    Path(f"vowels_{algorithm}.py").write_text(
        "def reward(prompts, responses):\n    return [5 * sum(c in 'aeiou' for c in r) / (len(r) + 1) for r in responses]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    vowels = {
        "rewards": [{"name": "vowels", "function": f"vowels_{algorithm}:reward"}],
        "reward_weight": 0.0,
        "missing_eos_penalty": 0.0,
    }
    sizes = {
        "batch_size": 32,
        "mini_batch_size": 32,
        "micro_batch_size": 32,
        "total_episodes": 1280,
        "num_ppo_epochs": 2,
    }
    params = make_params(
        algorithm,
        {"beta": 0.0},
        **sizes,
        **vowels,
        learning_rate=0.01,
        validation_updates=100,
        on_danger="warn",
    )
    write_jsonl(
        Path("rounds/r0/prepare/data/prompts_train.jsonl"),
        [{"id": str(n), "prompt": f"Day {n}"} for n in range(40)],
    )
    spread_out(Path("rounds/r0/sft/model"))
    main(params, "r0")
    steps = [json.loads(line) for line in (FOLDER / "metrics.jsonl").read_text().splitlines()]
    first, last = (fmean(row["reward_mean"] for row in part) for part in (steps[:3], steps[-3:]))
    assert last > first + 5 * steps[0]["reward_std"] * (2 / 96) ** 0.5


def spread_out(folder: Path) -> None:
    """A random model whose weights are so large that adapters can move it far."""
    config = AutoConfig.from_pretrained(folder)
    config.initializer_range, config.tie_word_embeddings = 0.3, False
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)

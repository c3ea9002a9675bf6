"""The responses that best-of-n trains on."""

from pathlib import Path

import pytest

from stages.lib.lm.lora import add_adapters
from stages.lib.lm.scoring import RewardScorer
from stages.ppo.alternatives.best_of_n import choose
from stages.ppo.alternatives.run import load
from stages.ppo.alternatives.stage import TrainedPolicy


@pytest.fixture
def context(make_params):
    """Rewards are scores, less 0.3 if EOS is missing."""
    return load(make_params("best_of_n", {"n": 4}, score_clip=100.0), "r0")


def test_each_prompts_best_rewarded_response_is_learnt(context):
    model = add_adapters(context.sft, context.params.ppo.lora, "CAUSAL_LM").eval()
    choice = choose(TrainedPolicy(model, context), context)
    eos = context.tokenizer.eos_token_id
    scorer = RewardScorer(Path("rounds/r0/reward/model"), context.params)
    assert choice.prompts == [tokens for _, tokens in context.prompts]
    assert [row["id"] for row in choice.rows] == [
        row["id"] for row, _ in context.prompts for _ in range(4)
    ]
    for index, (prompt, response) in enumerate(zip(choice.prompts, choice.responses, strict=True)):
        rows, ended = choice.rows[4 * index : 4 * index + 4], response[-1] == eos
        [score] = scorer.tokens([prompt + response + ([] if ended else [eos])])
        rewards = [
            row["score"] - (0.3 if row["finish_reason"] == "length" else 0.0) for row in rows
        ]
        assert score - (0.0 if ended else 0.3) == pytest.approx(max(rewards), abs=1e-3)
        best = rows[rewards.index(max(rewards))]
        text = context.tokenizer.decode(response, skip_special_tokens=True)
        assert text == best["response"] and best["kl"] == 0.0
        assert max(rewards) > min(rewards)

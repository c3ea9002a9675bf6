"""What best-of-n learns."""

from pathlib import Path

import pytest

from stages.lib.lm.lora import add_adapters
from stages.lib.lm.scoring import RewardScorer
from stages.ppo.alternatives.best_of_n import choose
from stages.ppo.alternatives.policy import TrainedPolicy
from stages.ppo.alternatives.run import load


@pytest.fixture
def setting(make_params):
    """Rewards here are scores, less 0.3 where EOS is missing."""
    return load(make_params("best_of_n", {"n": 4}, score_clip=100.0), "r0")


def test_each_prompts_best_rewarded_response_is_learnt(setting):
    choice = choose(
        TrainedPolicy(
            add_adapters(setting.sft, setting.params.ppo.lora, "CAUSAL_LM").eval(), setting
        ),
        setting,
    )
    eos, scorer = (
        setting.tokenizer.eos_token_id,
        RewardScorer(Path("rounds/r0/reward/model"), setting.tokenizer, setting.params, 8),
    )
    assert choice.prompts == [tokens for _, tokens in setting.prompts]
    assert [row["id"] for row in choice.rows] == [
        row["id"] for row, _ in setting.prompts for _ in range(4)
    ]
    for place, (prompt, response) in enumerate(zip(choice.prompts, choice.responses, strict=True)):
        drawn, ended = choice.rows[4 * place : 4 * place + 4], response[-1] == eos
        [score] = scorer.tokens([prompt + response + ([] if ended else [eos])])
        rewards = [
            row["score"] - (0.3 if row["finish_reason"] == "length" else 0.0) for row in drawn
        ]
        assert score - (0.0 if ended else 0.3) == pytest.approx(max(rewards), abs=1e-3)
        best = drawn[rewards.index(max(rewards))]
        assert (
            setting.tokenizer.decode(response, skip_special_tokens=True) == best["response"]
            and best["kl"] == 0.0
        )
        assert max(rewards) > min(rewards)

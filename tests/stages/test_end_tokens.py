"""A model with several end tokens: each ends a response; the reward model reads the canonical one.

All tokens are end tokens here, so that every response is one token, in place of which the reward
model reads EOS.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from stages.annotate.inputs import sample_sft
from stages.battery.best_of_n import sample_and_score
from stages.evaluate.evaluator import Evaluator
from stages.lib.core.params import Params
from stages.lib.core.rows import PromptRow
from stages.lib.judging.loading import load_primary_judge
from stages.lib.lm.loading import load_causal_lm, load_tokenizer
from stages.lib.lm.scoring import RewardScorer
from stages.ppo.alternatives.run import load
from stages.ppo.alternatives.stage import TrainedPolicy
from stages.ppo.trainer.roles import load_roles
from stages.ppo.trainer.update import PpoTrainer
from stages.replay.sampler import Sampler
from stages.sft.__main__ import generate_responses

SFT, REWARD = Path("rounds/r0/sft/model"), Path("rounds/r0/reward/model")
ROWS: list[PromptRow] = [{"id": "0", "prompt": "The dinner"}, {"id": "1", "prompt": "The walk"}]
PROMPTS = [row["prompt"] for row in ROWS]


@pytest.fixture
def params(make_round: Callable[[str, float], Params]) -> Params:
    params = make_round("r0", 1.0)
    everything = [2, *range(2), *range(3, len(AutoTokenizer.from_pretrained(SFT)))]
    GenerationConfig(eos_token_id=everything).save_pretrained(SFT)
    return params


def expected_scores(params: Params, prompts: list[Any]) -> Any:
    """Scores of empty responses, which are EOS alone."""
    scorer = RewardScorer(REWARD, params)
    return pytest.approx(scorer(prompts, [""] * len(prompts)), abs=1e-4)


def test_sft_and_annotate(params: Params) -> None:
    model, tokenizer = load_causal_lm(SFT, params.model), load_tokenizer(SFT)
    responses = generate_responses(model, tokenizer, ROWS, params)
    assert [(len(one.tokens), one.ended) for one in responses] == [(1, True)] * 2
    single = {
        tokenizer.decode([token], skip_special_tokens=True) for token in range(len(tokenizer))
    }
    sampled = sample_sft(PROMPTS, 2, params, "r0")[0]
    assert [len(texts) for texts in sampled] == [2, 2]
    assert single >= set().union(*sampled)


def test_battery(params: Params) -> None:
    model, tokenizer = load_causal_lm(SFT, params.model), load_tokenizer(SFT)
    scorer = RewardScorer(REWARD, params)
    judge = load_primary_judge(params, "r0")
    samples = sample_and_score(model, tokenizer, scorer, judge, ROWS, 1, params)
    assert samples.scores == expected_scores(params, PROMPTS)


def test_evaluate_and_replay(params: Params) -> None:
    evaluator = Evaluator(params, "r0")
    samples = evaluator.sample(evaluator.load_ppo(), 0)
    assert all((len(sample.tokens), sample.ended) == (1, True) for sample in samples)
    scores = [sample.score for sample in samples]
    assert scores == expected_scores(params, [row["prompt"] for row in evaluator.rows])
    sampler = Sampler(params, "r0")
    responses = sampler.policy(PROMPTS, 0)
    assert [response.ended for response in responses] == [True, True]
    assert [response.score for response in responses] == expected_scores(params, PROMPTS)


def test_ppo_and_the_alternatives(params: Params) -> None:
    tokenizer = load_tokenizer(SFT)
    episodes: Any = [(row, tokenizer(row["prompt"]).input_ids) for row in ROWS]
    sizes = {"batch_size": 2, "mini_batch_size": 2, "micro_batch_size": 2, "num_ppo_epochs": 1}
    params.ppo = params.ppo.model_copy(update=sizes)
    trainer = PpoTrainer(load_roles(params, SFT, REWARD), episodes, params.ppo, 0)
    rollout, metrics = trainer.step()
    endings = [(len(response.tokens), response.ended) for response in rollout.responses]
    assert endings == [(1, True), (1, True)]
    prompts = [row["prompt"] for row in rollout.rows]
    assert rollout.calibrated.tolist() == expected_scores(params, prompts)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)

    context = load(params, "r0")
    policy = TrainedPolicy(context.sft, context)
    responses = policy.sample([tokens for _, tokens in episodes], params.ppo, torch.Generator())
    rows = policy.score(0, episodes, responses).rows
    assert [row["finish_reason"] for row in rows] == ["stop", "stop"]
    assert [row["score"] for row in rows] == expected_scores(params, PROMPTS)

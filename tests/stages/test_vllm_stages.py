"""With `model.use_vllm` every stage samples by vLLM: a stand-in for it counts the requests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.annotate.inputs import sample_sft
from stages.battery.best_of_n import sample_and_score
from stages.capability.measure import sample_texts
from stages.evaluate.evaluator import Evaluator
from stages.lib.core.params import Params
from stages.lib.core.rows import PromptRow
from stages.lib.judging.loading import load_primary_judge
from stages.lib.lm.loading import load_causal_lm, load_tokenizer
from stages.lib.lm.scoring import RewardScorer
from stages.ppo.alternatives.run import load
from stages.ppo.alternatives.stage import TrainedPolicy
from stages.ppo.trainer.roles import load_roles
from stages.replay.sampler import Sampler
from stages.sft.__main__ import generate_responses
from tests.stages.lib.lm import vllm_stand_in

SFT, REWARD = Path("rounds/r0/sft/model"), Path("rounds/r0/reward/model")
ROWS: list[PromptRow] = [{"id": "0", "prompt": "The dinner"}, {"id": "1", "prompt": "The walk"}]
PROMPTS = [row["prompt"] for row in ROWS]

Requests = Callable[[], list[tuple[int, float, bool]]]


@pytest.fixture
def params(make_round: Callable[[str, float], Params], monkeypatch: pytest.MonkeyPatch) -> Params:
    params = make_round("r0", 1.0)
    vllm_stand_in.install(monkeypatch)
    params.model.use_vllm = True
    params.ppo.temperature, params.annotate.temperature = 0.9, 0.6
    return params


@pytest.fixture
def requests() -> Iterator[Requests]:
    """What vLLM received since the last call: tokens, temperature, whether with an adapter."""
    seen = 0

    def new() -> list[tuple[int, float, bool]]:
        nonlocal seen
        [llm] = vllm_stand_in.engines  # a process has one
        received, seen = llm.requests[seen:], len(llm.requests)
        return [(p.max_tokens, p.temperature, lora is not None) for p, lora in received]

    yield new


def test_sft_annotate_and_capability(params: Params, requests: Requests) -> None:
    model, tokenizer = load_causal_lm(SFT, params.model), load_tokenizer(SFT)
    responses = generate_responses(model, tokenizer, ROWS, params)
    assert requests() == [(8, 0.9, False)] * 2 and len(responses) == 2
    sample_sft(PROMPTS, 2, params, "r0")
    assert requests() == [(8, 0.6, False)] * 4
    params.capability.response_length = 5
    sample_texts(model, tokenizer, PROMPTS, params)
    assert requests() == [(5, 0.9, False)] * 2


def test_battery(params: Params, requests: Requests) -> None:
    model, tokenizer = load_causal_lm(SFT, params.model), load_tokenizer(SFT)
    scorer, judge = RewardScorer(REWARD, params), load_primary_judge(params, "r0")
    sample_and_score(model, tokenizer, scorer, judge, ROWS, 3, params)
    assert requests() == [(8, 0.9, False)] * 6


def test_evaluate_and_replay(params: Params, requests: Requests) -> None:
    evaluator = Evaluator(params, "r0")
    for model, adapter in ((evaluator.sft, False), (evaluator.load_ppo(), True)):
        first, second, again = (evaluator.sample(model, number) for number in (0, 1, 0))
        assert first == again and first != second
        assert requests() == [(8, 0.9, adapter)] * 3 * len(evaluator.rows)
    sampler = Sampler(params, "r0")
    sampler.policy(PROMPTS, 0)
    assert requests() == [(8, 0.9, True)] * 2
    sampler.sft(PROMPTS, 0)
    assert requests() == [(8, 0.9, False)] * 2


def test_ppo_and_the_alternatives(params: Params, requests: Requests) -> None:
    tokenizer = load_tokenizer(SFT)
    prompt_ids: Any = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    sizes = {"batch_size": 2, "mini_batch_size": 2, "micro_batch_size": 2}
    params.ppo = params.ppo.model_copy(update=sizes)
    roles = load_roles(params, SFT, REWARD)
    roles.sample(prompt_ids, params.ppo, torch.Generator())
    assert requests() == [(8, 0.9, True)] * 2
    context = load(params, "r0")
    policy = TrainedPolicy(context.sft, context)
    policy.sample(prompt_ids, params.ppo, torch.Generator())
    assert requests() == [(8, 0.9, False)] * 2

"""With `model.use_vllm` every stage samples by vLLM: by itself where it is installed (`make
test-engines`), else by a stand-in. The requests are counted.
"""

import shutil
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stages.annotate.inputs import sample_sft
from stages.battery.best_of_n import sample_and_score
from stages.capability.measure import sample_texts
from stages.evaluate.evaluator import Evaluator
from stages.lib.core.params import Params
from stages.lib.core.rows import PromptRow
from stages.lib.judging.loading import load_primary_judge
from stages.lib.lm import vllm_engine
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


@pytest.fixture(scope="module")
def tiny_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with longer heads: vLLM's build for CPUs has none of 16."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    shutil.copytree(tiny_folder, folder)
    config = AutoConfig.from_pretrained(folder)
    config.head_dim = 32
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def made_rounds() -> dict[float, Any]:
    """Of that model, and not of other tests'."""
    return {}


@pytest.fixture
def params(make_round: Callable[[str, float], Params]) -> Params:
    params = make_round("r0", 1.0)
    params.model.use_vllm = True
    params.ppo.temperature, params.annotate.temperature = 0.9, 0.6
    return params


@pytest.fixture(autouse=True)
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    """What vLLM received since the last call: tokens, temperature, whether with an adapter."""
    options = {}
    if find_spec("vllm"):
        options = {"enforce_eager": True}  # compilation takes minutes
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        vllm_engine._engine.cache_clear()
    else:
        vllm_stand_in.install(monkeypatch)
    import vllm

    received: list[tuple[int, float, bool]] = []

    class Recorded(vllm.LLM):  # type: ignore[misc]
        def generate(self, prompts: Any, sampling_params: Any, **rest: Any) -> Any:
            has_adapter = rest["lora_request"] is not None
            received.extend((p.max_tokens, p.temperature, has_adapter) for p in sampling_params)
            return super().generate(prompts, sampling_params, **rest)

    monkeypatch.setattr(vllm, "LLM", partial(Recorded, **options))

    def new() -> list[tuple[int, float, bool]]:
        since, received[:] = received[:], []
        return since

    return new


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

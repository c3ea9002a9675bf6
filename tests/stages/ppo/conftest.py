"""The four roles on the tiny Llama, and a round before its stage."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stages.lib.core.params import Params, check_params
from stages.lib.core.params.shared import LoraParams
from stages.lib.lm.lora import add_adapters
from stages.ppo.trainer.roles import Roles, ValueHead
from tests.stages.ppo.stage_process import OUTPUTS, double_prompts

SHORT = {
    "batch_size": 4,
    "mini_batch_size": 4,
    "micro_batch_size": 2,
    "total_episodes": 16,
    "save_updates": 2,
    "max_kl_per_token": 1000.0,
}


class ByteTokenizer:
    """The part of a tokenizer that the trainer uses; a token's text is its number."""

    eos_token_id, pad_token_id = 2, 0

    def __call__(self, text: str, add_special_tokens: bool) -> SimpleNamespace:
        return SimpleNamespace(input_ids=list(text.encode()))

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]


@pytest.fixture
def small_round(make_round: Callable[..., Params]) -> Params:
    """A round without a policy, with prompts for updates of six episodes."""
    params = make_round("r0", 1.0)
    shutil.rmtree(OUTPUTS)
    double_prompts()
    return params


@pytest.fixture
def make_roles(tiny_lm, tiny_reward_model) -> Callable[..., Roles]:
    """`lora.r` 0: all weights are trained. `value_head`: the critic is a head on the policy.
    `related`: policy and reward model share the lowest layer.
    """

    def make(
        kind: type[Roles] = Roles,
        *,
        lora: LoraParams,
        value_head: bool = False,
        related: bool = False,
        mean: float = 0.0,
        std: float = 1.0,
        gradient_checkpointing: bool = False,
    ) -> Roles:
        policy, reward = tiny_lm(spread=0.3), tiny_reward_model()
        if related:
            reward.model.embed_tokens.load_state_dict(policy.model.embed_tokens.state_dict())
            reward.model.layers[0].load_state_dict(policy.model.layers[0].state_dict())
        reward.config.mean, reward.config.std = mean, std
        torch.manual_seed(0)
        return kind(
            policy=add_adapters(policy, lora, "CAUSAL_LM").eval(),
            critic=ValueHead(policy.config.hidden_size)
            if value_head
            else add_adapters(reward, lora, "SEQ_CLS").eval(),
            tokenizer=ByteTokenizer(),
            reward_model=reward if value_head else None,
            gradient_checkpointing=gradient_checkpointing,
        )

    return make


@pytest.fixture
def make_params(make_round) -> Callable[..., Params]:
    """A round without a policy; `section`: keys of the algorithm's section, `ppo`: of `ppo`."""

    def make(algorithm: str, section: dict | None = None, **ppo: object) -> Params:
        params = make_round("r0", 1.0).model_dump()
        shutil.rmtree(Path("rounds/r0/ppo"))
        sections = {} if algorithm == "ppo" else {algorithm: params[algorithm] | (section or {})}
        return check_params(
            params | {"algorithm": algorithm, "ppo": params["ppo"] | SHORT | ppo} | sections, "test"
        )

    return make

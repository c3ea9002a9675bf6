"""The four roles: policy and reference, critic and reward model, and what else rewards.

`ppo.lora.r` and `ppo.critic_lora.r` above 0: adapters, whose absence is the reference, and the
reward model. 0: all weights are trained, beside frozen copies. `ppo.critic: policy`: the critic is
a linear head on the policy's last states (Santacroce et al. 2023).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stages.lib.core.params import Params
from stages.lib.core.params.policy import Critic, PpoParams
from stages.lib.core.types import TokenIds
from stages.lib.lm.generation import sample_responses
from stages.lib.lm.loading import load_causal_lm, load_reward_model, load_tokenizer
from stages.lib.lm.logprobs import response_logits, response_logprobs, selective_log_softmax
from stages.lib.lm.lora import add_adapters
from stages.lib.lm.packing import Packed, hidden_states
from stages.lib.lm.reward_ensemble import calibrate_scores, ensemble_members, ensemble_scores
from stages.lib.lm.scoring import last_scores, score_head
from stages.lib.lm.shared_layers import forward_layers, num_shared_layers
from stages.ppo.common.reference import FrozenModel, ReferenceView, reference_view
from stages.ppo.common.rewards import Rewards, load_rewards


class PolicyCriticOutput(NamedTuple):
    """What policy and critic say of responses, with gradients: logprobs (nats), values (B, T);
    logits (N, V), raw.
    """

    logprobs: Tensor
    logits: Tensor
    values: Tensor


class ValueHead(torch.nn.Linear):
    """(N, H) states of the policy to (N,) values; 0 before it has learnt."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, bias=False)
        torch.nn.init.zeros_(self.weight)

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states.float()).squeeze(-1)


class SamplingEngine(Protocol):
    def sample(self, prompt_ids: list[TokenIds], _: torch.Generator) -> list[TokenIds]:
        """One response a prompt by the policy as it is now."""
        ...


@dataclass
class Roles:
    """`policy` and `critic` are trained. `reward_model`: only where the critic is a ValueHead; else
    the critic is made of it.

    `engine`: what samples instead of stages/lib/lm/generation.py, if anything.
    """

    policy: Any
    critic: Any
    tokenizer: PreTrainedTokenizerBase
    reward_model: Any = None
    rewards: Rewards = field(default_factory=Rewards)
    engine: SamplingEngine | None = None

    def __post_init__(self) -> None:
        self.policy_trunk = reference_view(self.policy)
        self.critic_trunk = None if self.reward_model else reference_view(self.critic)
        self.reward_trunk = self.critic_trunk or FrozenModel(self.reward_model)
        with (
            self.policy_trunk.reference() as reference,
            self.reward_trunk.reference() as reward_model,
        ):
            self.common = num_shared_layers(reference, *ensemble_members(reward_model))

    def sample(
        self, prompt_ids: list[TokenIds], ppo: PpoParams, generator: torch.Generator
    ) -> list[TokenIds]:
        """One response a prompt by the policy as it is now, in one batch."""
        if self.engine:
            return self.engine.sample(prompt_ids, generator)
        return sample_responses(
            self.policy, self.tokenizer, prompt_ids, ppo, generator, len(prompt_ids)
        )

    def reference(self) -> AbstractContextManager[Any]:
        """The policy before it learnt."""
        return self.policy_trunk.reference()

    def live(
        self,
        packed: Packed,
        policy_states: Sequence[Tensor],
        critic_states: Sequence[Tensor],
        temperature: float,
    ) -> PolicyCriticOutput:
        """`policy_states`, `critic_states`: of each row, from `ref_logprobs` and `raw_scores`."""
        hidden = self.policy_trunk.adapted(packed, torch.cat([*policy_states]))
        logits = response_logits(self.policy, packed, hidden)
        if self.critic_trunk:
            values = self.calibrated(
                score_head(
                    self.critic,
                    self.critic_trunk.adapted(packed, torch.cat([*critic_states]))[packed.predicts],
                )
            )
        else:
            values = self.critic(hidden[packed.predicts])
        return PolicyCriticOutput(
            packed.to_rows(selective_log_softmax(logits, packed.targets, temperature)),
            logits,
            packed.to_rows(values),
        )

    @torch.no_grad()
    def ref_logprobs(
        self, packed: Packed, temperature: float
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """(B, T) log-probabilities under the reference; for each row the states from which the
        policy starts; what `raw_scores` shares.
        """
        with self.policy_trunk.reference() as reference:
            hidden, [shared, *entering] = forward_layers(
                reference, packed, keep=[self.common, *kept_layers(self.policy_trunk)]
            )
            logprobs = response_logprobs(reference, packed, hidden, temperature)
        return logprobs, by_row(packed, entering), shared

    @torch.no_grad()
    def whole_logprobs(self, packed: Packed, temperature: float) -> Tensor:
        """(B, T) log-probabilities under the policy, through all of its layers."""
        return response_logprobs(
            self.policy, packed, hidden_states(self.policy, packed), temperature
        )

    @torch.no_grad()
    def raw_scores(self, packed: Packed, shared: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(B,) raw scores of the reward model or its ensemble, and for each row the states from
        which the critic starts.
        """
        with self.reward_trunk.reference() as reward_model:
            start = shared if self.common else None
            hidden, entering = forward_layers(
                reward_model, packed, start, self.common, keep=kept_layers(self.reward_trunk)
            )
            own = score_head(reward_model, hidden[packed.last])
            read = partial(last_scores, packed=packed, entering=start, first=self.common)
            scores = ensemble_scores(
                reward_model, lambda member: own if member is reward_model else read(member)
            )
        return scores, by_row(packed, entering)

    def calibrated(self, raw: Tensor) -> Tensor:
        """Raw scores, and values with them, in the units of the reward stage's calibration."""
        return calibrate_scores(raw, self.reward_model or self.critic)


def kept_layers(trunk: ReferenceView | FrozenModel) -> list[int]:
    """The layer whose entering states are kept, if any."""
    return [] if trunk.first is None else [trunk.first]


def by_row(packed: Packed, states: list[Tensor]) -> list[Tensor]:
    """The (M, H) states of `kept_layers`, for each row; nothing for each row where there are none."""
    return list(
        (states[0] if states else packed.input_ids.new_empty(len(packed.input_ids), 0)).split(
            packed.lengths
        )
    )


def load_roles(params: Params, sft: Path, reward: Path) -> Roles:
    """From the SFT model and the reward model of a round."""
    ppo = params.ppo
    policy = load_causal_lm(sft, params.model)
    whole_critic = ppo.critic is Critic.reward
    reward_model = load_reward_model(reward, params.model)
    reward_model.score.float()
    policy = add_adapters(policy, ppo.lora, "CAUSAL_LM").eval()
    tokenizer, engine = load_tokenizer(sft), None
    if ppo.use_vllm:
        from stages.ppo.trainer.vllm import Vllm  # with TRL, seconds that others need not wait

        engine = Vllm(policy, tokenizer, ppo)
    head = ValueHead(policy.config.get_text_config().hidden_size).to(policy.device)
    return Roles(
        policy=policy,
        critic=add_adapters(reward_model, ppo.critic_lora, "SEQ_CLS").eval()
        if whole_critic
        else head,
        tokenizer=tokenizer,
        reward_model=None if whole_critic else reward_model,
        rewards=load_rewards(params),
        engine=engine,
    )

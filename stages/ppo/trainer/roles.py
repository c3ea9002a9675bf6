"""The four roles of PPO: policy and reference, critic and reward model; and any further rewards.

`ppo.lora.r` and `ppo.critic_lora.r` above 0: policy and critic are adapters; without its adapter
the policy is the reference and the critic is the reward model. 0: all weights are trained, and the
reference or reward model is a frozen copy. `ppo.critic: policy`: the critic is a linear head on the
policy's last states (Santacroce et al. 2023).

Dimensions: B rows, T response tokens, N response tokens of all rows, M prompt and response tokens
of all rows, V vocabulary, H hidden size.
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
    """The outputs of policy and critic on responses, with gradients: logprobs (nats) and values
    (B, T), raw logits (N, V).
    """

    logprobs: Tensor
    logits: Tensor
    values: Tensor


class ValueHead(torch.nn.Linear):
    """(N, H) states of the policy to (N,) values; 0 before training."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, bias=False)
        torch.nn.init.zeros_(self.weight)

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states.float()).squeeze(-1)


class SamplingEngine(Protocol):
    """Samples responses in place of stages/lib/lm/generation.py."""

    def sample(self, prompt_ids: list[TokenIds], _: torch.Generator) -> list[TokenIds]:
        """One response per prompt by the current policy."""
        ...


@dataclass
class Roles:
    """The models of PPO. `policy` and `critic` are trained.

    reward_model: set only if the critic is a ValueHead; otherwise the critic without its training
    is the reward model. rewards: further rewards. engine: samples in place of
    stages/lib/lm/generation.py, if set.
    """

    policy: Any
    critic: Any
    tokenizer: PreTrainedTokenizerBase
    reward_model: Any = None
    rewards: Rewards = field(default_factory=Rewards)
    engine: SamplingEngine | None = None

    def __post_init__(self) -> None:
        self.policy_view = reference_view(self.policy)
        self.critic_view = None if self.reward_model else reference_view(self.critic)
        self.reward_view = self.critic_view or FrozenModel(self.reward_model)
        with (
            self.policy_view.reference() as reference,
            self.reward_view.reference() as reward_model,
        ):
            # layers that reference and reward model share: these run once for both
            self.num_shared_layers = num_shared_layers(reference, *ensemble_members(reward_model))

    def sample(
        self, prompt_ids: list[TokenIds], ppo: PpoParams, generator: torch.Generator
    ) -> list[TokenIds]:
        """One response per prompt by the current policy, in one batch."""
        if self.engine:
            return self.engine.sample(prompt_ids, generator)
        return sample_responses(
            self.policy, self.tokenizer, prompt_ids, ppo, generator, len(prompt_ids)
        )

    def reference(self) -> AbstractContextManager[Any]:
        """A context in which the policy is as it was before training."""
        return self.policy_view.reference()

    def policy_and_critic(
        self,
        packed: Packed,
        policy_states: Sequence[Tensor],
        critic_states: Sequence[Tensor],
        temperature: float,
    ) -> PolicyCriticOutput:
        """Run the trained layers of policy and critic.

        Args:
            packed: B prompts with their responses.
            policy_states: per row, the states from `ref_logprobs`.
            critic_states: per row, the states from `raw_scores`.
            temperature: divides the logits, as in sampling.
        """
        hidden = self.policy_view.trained_states(packed, torch.cat([*policy_states]))
        logits = response_logits(self.policy, packed, hidden)
        if self.critic_view:
            critic_hidden = self.critic_view.trained_states(packed, torch.cat([*critic_states]))
            # the critic starts as the reward head, so its values have the units of the scores
            values = self.calibrate(score_head(self.critic, critic_hidden[packed.predicts]))
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
        """Run the reference.

        Returns:
            (B, T) log-probabilities in nats; per row the states that enter the policy's first
            trained layer; (M, H) states after the layers shared with the reward model, for
            `raw_scores`.
        """
        with self.policy_view.reference() as reference:
            hidden, [shared, *entering] = forward_layers(
                reference, packed, keep=[self.num_shared_layers, *layers_to_keep(self.policy_view)]
            )
            logprobs = response_logprobs(reference, packed, hidden, temperature)
        return logprobs, split_rows(packed, entering), shared

    # not used in training: `check_initial_ratio` compares it with `policy_and_critic`
    @torch.no_grad()
    def whole_logprobs(self, packed: Packed, temperature: float) -> Tensor:
        """(B, T) log-probabilities under the policy, computed through all of its layers."""
        return response_logprobs(
            self.policy, packed, hidden_states(self.policy, packed), temperature
        )

    @torch.no_grad()
    def raw_scores(self, packed: Packed, shared: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Run the reward model or its ensemble, from the `shared` states of `ref_logprobs`.

        Returns:
            (B,) raw scores; per row the states that enter the critic's first trained layer.
        """
        with self.reward_view.reference() as reward_model:
            start = shared if self.num_shared_layers else None
            hidden, entering = forward_layers(
                reward_model,
                packed,
                start,
                self.num_shared_layers,
                keep=layers_to_keep(self.reward_view),
            )
            # the first member has already run, to keep its states for the critic
            first_scores = score_head(reward_model, hidden[packed.last])
            member_scores = partial(
                last_scores, packed=packed, entering=start, first=self.num_shared_layers
            )
            scores = ensemble_scores(
                reward_model,
                lambda member: first_scores if member is reward_model else member_scores(member),
            )
        return scores, split_rows(packed, entering)

    def calibrate(self, raw: Tensor) -> Tensor:
        """Scores or values in the units of the reward stage's calibration."""
        return calibrate_scores(raw, self.reward_model or self.critic)


def layers_to_keep(view: ReferenceView | FrozenModel) -> list[int]:
    """The layer whose entering states are kept for training, if any."""
    return [] if view.first_trained_layer is None else [view.first_trained_layer]


def split_rows(packed: Packed, states: list[Tensor]) -> list[Tensor]:
    """The (M, H) states of `layers_to_keep`, split by row; empty tensors if none were kept."""
    kept = states[0] if states else packed.input_ids.new_empty(len(packed.input_ids), 0)
    return list(kept.split(packed.lengths))


def load_roles(params: Params, sft: Path, reward: Path) -> Roles:
    """The roles for a round, from the folders of its SFT model and its reward model."""
    ppo = params.ppo
    policy = load_causal_lm(sft, params.model)
    reward_model = load_reward_model(reward, params.model)
    # in bfloat16 a score near 3 changes in steps of 0.016
    reward_model.score.float()
    policy = add_adapters(policy, ppo.lora, "CAUSAL_LM").eval()
    tokenizer, engine = load_tokenizer(sft), None
    if ppo.use_vllm:
        # imported here: TRL takes seconds to import, and only vLLM needs it
        from stages.ppo.trainer.vllm import VllmEngine

        engine = VllmEngine(policy, tokenizer, ppo)
    # created in every case: its initialisation draws from torch's global generator
    head = ValueHead(policy.config.get_text_config().hidden_size).to(policy.device)
    critic_is_reward_model = ppo.critic is Critic.reward
    return Roles(
        policy=policy,
        critic=add_adapters(reward_model, ppo.critic_lora, "SEQ_CLS").eval()
        if critic_is_reward_model
        else head,
        tokenizer=tokenizer,
        reward_model=None if critic_is_reward_model else reward_model,
        rewards=load_rewards(params),
        engine=engine,
    )

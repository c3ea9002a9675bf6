"""The four roles of PPO: policy and reference, critic and reward model; and any further rewards.

`ppo.lora.r` and `ppo.critic_lora.r` above 0: policy and critic are adapters; without its adapter
the policy is the reference and the critic is the reward model. 0: all weights are trained, and the
reference or reward model is a frozen copy. `ppo.critic: policy`: the critic is a linear head on the
policy's last states (Santacroce et al. 2023).

Dimensions: B episodes, T tokens of the longest response, L prompt and response tokens of one
episode, N response tokens of all episodes, M prompt and response tokens of all, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stages.lib.core.params import Params
from stages.lib.core.params.policy import Critic
from stages.lib.lm import world
from stages.lib.lm.end_tokens import EndTokens, end_tokens
from stages.lib.lm.loading import (
    default_device,
    load_causal_lm,
    load_tokenizer,
)
from stages.lib.lm.logprobs import compare_states, response_logprobs
from stages.lib.lm.lora import add_adapters
from stages.lib.lm.packing import Packed, forward_layers, num_shared_layers
from stages.lib.lm.scoring import (
    calibrate_scores,
    ensemble_members,
    ensemble_scores,
    last_scores,
    load_reward_model_for,
    reads_texts,
    score_head,
)
from stages.lib.lm.vllm_engine import VllmEngine, sampling_engine
from stages.lib.lm.world import shard
from stages.ppo.common.reference import ReferenceView, SampledPolicy, load_weights
from stages.ppo.common.rewards import Rewards, load_rewards
from stages.ppo.trainer.advantages import ONLINE

# A forward pass with gradients: (M, H) last states of the policy, (B, T) log-probabilities, values
Pass = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class RoleOutputs:
    """What the roles compute on B episodes, without gradients. (B, T) tensors are 0 outside the
    mask.
    """

    # (B,) the reward model's, of responses closed by EOS; 0 if it is served, or there is none
    raw_scores: Tensor
    logprobs: Tensor  # (B, T) nats, under the policy that sampled
    entropies: Tensor  # (B, T) nats
    ref_logprobs: Tensor  # (B, T) nats
    kl: Tensor  # (B, T) nats: exact KL of the policy to the reference at each token
    values: Tensor  # (B, T) the critic's estimate before each token; 0 without a critic
    mask: Tensor  # (B, T) bool: true on response tokens
    # (L, H) states below the adapters per episode, which are the same in every epoch; empty for the
    # episodes of other processes
    policy_states: list[Tensor]
    critic_states: list[Tensor]

    def select(self, episodes: list[int]) -> "RoleOutputs":
        """The outputs on some of the episodes, by index."""
        columns: Any = {
            name: [column[i] for i in episodes] if isinstance(column, list) else column[episodes]
            for name, column in vars(self).items()
        }
        return RoleOutputs(**columns)


def concat_outputs(parts: list[RoleOutputs]) -> RoleOutputs:
    """The outputs of all micro-batches of all processes, one after the other; states stay in the
    process that trains on them.
    """
    columns: dict[str, Any] = {
        name: concat_padded([getattr(part, name) for part in parts]) for name in vars(parts[0])
    }
    if world.size() > 1:
        device = columns["mask"].device
        for name, column in columns.items():
            if isinstance(column, Tensor):
                columns[name] = concat_padded(world.gather([column.cpu()])).to(device)
        count, nothing = len(columns["mask"]), torch.empty(0, device=device)
        own = world.share(count)
        for name in ("policy_states", "critic_states"):
            others = [nothing] * own.start, [nothing] * (count - own.stop)
            columns[name] = others[0] + columns[name] + others[1]
    return RoleOutputs(**columns)


def concat_padded(parts: list[Any]) -> Any:
    """Concatenate along rows: lists, (b,) tensors, or (b, t) tensors padded to the longest t."""
    if isinstance(parts[0], list):
        return list(chain(*parts))
    if parts[0].dim() == 1:
        return torch.cat(parts)
    width = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])


class ValueHead(torch.nn.Linear):
    """(N, H) states of the policy to (N,) values; 0 before training."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, bias=False)
        torch.nn.init.zeros_(self.weight)

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states.float()).squeeze(-1)


class Roles(SampledPolicy):
    """The models of an online algorithm. Policy and critic are trained.

    Args:
        policy: the policy.
        critic: None: the algorithm has none.
        tokenizer: of the policy.
        reward_model: None: it is served, or the critic without its training is the reward model, or
            there is none.
        rewards: further rewards, and the served one.
        engine: samples in place of stages/lib/lm/generation.py.
        gradient_checkpointing: compute activations again in the backward pass.
        starts_as_reference: the policy's KL from the reference is 0 at first.
        sharded: all weights are trained, and layers divided among the processes.
    """

    def __init__(
        self,
        policy: Any,
        critic: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        reward_model: Any = None,
        rewards: Rewards | None = None,
        engine: VllmEngine | None = None,
        gradient_checkpointing: bool = False,
        starts_as_reference: bool = True,
        sharded: bool = False,
    ) -> None:
        super().__init__(policy, tokenizer, engine, gradient_checkpointing)
        self.critic, self.reward_model, self.rewards = critic, reward_model, rewards or Rewards()
        self.starts_as_reference, self.sharded = starts_as_reference, sharded
        if sharded:  # here, so that not all models are whole at the same time
            shard_models(self.policy_view)
        has_layers = critic is not None and not isinstance(critic, ValueHead)
        self.critic_view = ReferenceView(critic, gradient_checkpointing) if has_layers else None
        frozen = ReferenceView(reward_model, is_trained=False) if reward_model else None
        self.reward_view = self.critic_view or frozen
        self.num_shared_layers = 0
        if self.reward_view and sharded:
            shard_models(self.reward_view)
        elif self.reward_view:
            with self.reference() as reference, self.reward_view.reference() as reward:
                # layers that reference and reward model share: these run once for both
                self.num_shared_layers = num_shared_layers(reference, *ensemble_members(reward))

    @property
    def ends(self) -> EndTokens:
        """The tokens that end a response."""
        return end_tokens(self.policy, self.tokenizer)

    def sampler_log_ratios(self, logprobs: Tensor, mask: Tensor) -> Tensor | None:
        """(B, T) log p - log p_engine of the tokens sampled last, in nats; None without an engine.

        Args:
            logprobs: (B, T) log-probabilities p of the sampled tokens under the policy.
            mask: (B, T) bool, true on response tokens.

        Raises:
            RondoError: the samples are not of the policy.
        """
        if self.engine is None:
            return None
        self.engine.check(self.engine.logprobs, logprobs[mask])
        sampled = logprobs.clone()
        sampled[mask] = logprobs.new_tensor(self.engine.logprobs)
        return logprobs - sampled

    def policy_hidden(self, packed: Packed, policy_states: Sequence[Tensor]) -> Tensor:
        """(M, H) last states of the policy, with gradients: run its trained layers.

        Args:
            packed: B prompts with their responses.
            policy_states: per row, the states from `run_reference`.
        """
        return self.policy_view.trained_states(packed, torch.cat([*policy_states]))

    def values(
        self, packed: Packed, critic_states: Sequence[Tensor], policy_hidden: Tensor
    ) -> Tensor:
        """(B, T) values of response tokens, with gradients: run the trained layers of the critic; 0
        without a critic.

        Args:
            packed: B prompts with their responses.
            critic_states: per row, the states from `raw_scores`.
            policy_hidden: (M, H) last states of the policy, which a ValueHead reads.
        """
        if self.critic is None:
            values = torch.zeros(len(packed.targets), device=policy_hidden.device)
        elif self.critic_view is None:
            values = self.critic(policy_hidden[packed.predicts])
        else:
            hidden = self.critic_view.trained_states(packed, torch.cat([*critic_states]))
            # the critic starts as the reward head, so its values have the units of the scores
            values = self.calibrate(score_head(self.critic, hidden[packed.predicts]))
        return packed.to_rows(values)

    def forward(
        self, packed: Packed, temperature: float, keep_gradients: bool
    ) -> tuple[RoleOutputs, Pass | None]:
        """Run the roles together on B episodes, since the layers that they share run once.

        keep_gradients: also return the pass of policy and critic, for the first optimizer step.
        """
        ref_hidden, policy_states, shared = self.run_reference(packed)
        raw_scores, critic_states = self.raw_scores(packed, shared)
        kept = None
        with torch.set_grad_enabled(keep_gradients):
            hidden = self.policy_hidden(packed, policy_states)
            values = self.values(packed, critic_states, hidden)
            if keep_gradients:
                logprobs = response_logprobs(self.policy, packed, hidden, temperature)
                kept = (hidden, logprobs, values)
        statistics = compare_states(
            self.policy, self.reference, packed, hidden, ref_hidden, temperature
        )
        outputs = RoleOutputs(
            raw_scores=raw_scores,
            **statistics._asdict(),
            values=values.detach(),
            mask=packed.response_mask,
            policy_states=policy_states,
            critic_states=critic_states,
        )
        return outputs, kept

    @torch.no_grad()
    def run_reference(self, packed: Packed) -> tuple[Tensor, list[Tensor], Tensor]:
        """Run the layers of the reference.

        Returns:
            (M, H) last states; per row the states that enter the policy's first trained layer;
            (M, H) states after the layers that are shared with the reward model.
        """
        keep = [self.num_shared_layers, *layers_to_keep(self.policy_view)]
        with self.policy_view.reference() as reference:
            hidden, [shared, *entering] = forward_layers(reference, packed, keep=keep)
        return hidden, split_rows(packed, entering), shared

    @torch.no_grad()
    def raw_scores(self, packed: Packed, shared: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Run the reward model or its ensemble, from the `shared` states of `run_reference`.

        Returns:
            (B,) raw scores, 0 without a reward model here; per row the states that enter the
            critic's first trained layer.
        """
        if self.reward_view is None:
            return shared.new_zeros(len(packed.lengths)).float(), split_rows(packed, [])
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


def shard_models(view: ReferenceView) -> None:
    """Divide a model that is trained as a whole and its frozen copy, or a frozen model, among the
    processes; with the further members of an ensemble.
    """
    is_trained = view.model is not view.frozen
    for model in [view.model, view.frozen] if is_trained else [view.frozen]:
        for member in ensemble_members(model):
            shard(member)


def layers_to_keep(view: ReferenceView) -> list[int]:
    """The layer whose entering states are kept for training, if any."""
    return [] if view.first_trained_layer is None else [view.first_trained_layer]


def split_rows(packed: Packed, states: list[Tensor]) -> list[Tensor]:
    """The (M, H) states of `layers_to_keep`, split by row; empty tensors if none were kept."""
    kept = states[0] if states else packed.input_ids.new_empty(len(packed.input_ids), 0)
    return list(kept.split(packed.lengths))


def load_roles(params: Params, sft: Path, reward: Path, start: Path | None = None) -> Roles:
    """The roles for a round.

    Args:
        sft: folder of the round's SFT model.
        reward: folder of the round's reward model, or its placeholder; not read if it is served.
        start: folder of a policy whose weights the policy starts from; None: it starts as SFT.

    Raises:
        BadInput: a model is missing or damaged, or the reward model has fewer tokens than the
            policy's tokenizer.
    """
    ppo, sharded = params.ppo, params.launcher.shard
    # whole models may not fit on a GPU
    device = torch.device("cpu") if sharded else default_device()
    policy, tokenizer = load_causal_lm(sft, params.model, device), load_tokenizer(sft)
    reward_model = None
    if not ppo.reward_url:
        reward_model = load_reward_model_for(tokenizer, reward, params.model, device)
    if reward_model is not None:
        # in bfloat16 a score near 3 changes in steps of 0.016
        reward_model.score.float()
    policy = add_adapters(policy, ppo.lora, "CAUSAL_LM").eval()
    # created in every case: its initialisation draws from torch's global generator
    head = ValueHead(policy.config.get_text_config().hidden_size).to(default_device())
    critic: Any = head if ONLINE[params.algorithm](params).has_critic else None
    if critic is not None and ppo.critic is Critic.reward:
        critic, reward_model = add_adapters(reward_model, ppo.critic_lora, "SEQ_CLS").eval(), None
    roles = Roles(
        policy=policy,
        critic=critic,
        tokenizer=tokenizer,
        reward_model=reward_model,
        rewards=load_rewards(params, reward if reads_texts(reward, tokenizer) else None),
        engine=sampling_engine(params.model),
        gradient_checkpointing=ppo.gradient_checkpointing,
        starts_as_reference=start is None,
        sharded=sharded,
    )
    if start:  # after Roles has copied the reference, if all weights are trained
        load_weights(policy, start, params.model)
    return roles

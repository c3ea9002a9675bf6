"""The four roles in two models: the policy (adapter off: the reference), the critic (adapter off: the reward model)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stages.generation import Packed, hidden_states, logprobs_of, response_logits, scalar_head
from stages.models import load_causal_lm, load_reward_model, load_tokenizer, lora_config
from stages.params import Params


@dataclass
class Roles:
    """`policy` is a PeftModel on the SFT model; `critic` a PeftModel on the reward model with a value head of its own.

    score_mean and score_std calibrate the reward model's raw scores, and the critic's values with them.
    """

    policy: Any
    critic: Any
    tokenizer: PreTrainedTokenizerBase
    score_mean: float
    score_std: float

    def logprobs(self, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        """(B, T) log-probabilities in nats of the responses under the policy, and the (N, V) logits they come from."""
        logits = response_logits(self.policy, packed, temperature)
        return packed.rows(logprobs_of(logits, packed.targets)), logits

    @torch.no_grad()
    def ref_logprobs(self, packed: Packed, temperature: float) -> Tensor:
        """(B, T) log-probabilities under the reference: the policy with its adapter off."""
        with self.policy.disable_adapter():
            return packed.rows(logprobs_of(response_logits(self.policy, packed, temperature), packed.targets))

    def values(self, packed: Packed) -> Tensor:
        """(B, T) the critic's value before each response token, in calibrated score units."""
        states = hidden_states(self.critic, packed)[packed.predicts]
        return packed.rows((scalar_head(self.critic, states) - self.score_mean) / self.score_std)

    @torch.no_grad()
    def raw_scores(self, packed: Packed) -> Tensor:
        """(B,) raw scores of the reward model: the critic with its adapter off."""
        rows = torch.arange(len(packed.last), device=packed.last.device)
        with self.critic.disable_adapter():
            return scalar_head(self.critic, hidden_states(self.critic, packed)[rows, packed.last])


def load_roles(params: Params, sft: Path, reward: Path) -> Roles:
    """Lay fresh adapters over the SFT model and the reward model."""
    policy = load_causal_lm(sft, params.model)
    reward_model = load_reward_model(reward, params.model)
    config = reward_model.config
    reward_model.score.float()
    return Roles(
        policy=get_peft_model(policy, lora_config(params.ppo.lora, "CAUSAL_LM", policy)).eval(),
        critic=get_peft_model(reward_model, lora_config(params.ppo.critic_lora, "SEQ_CLS", reward_model)).eval(),
        tokenizer=load_tokenizer(sft),
        score_mean=config.mean,
        score_std=config.std,
    )

"""The four roles in two models: the policy (adapter off: the reference), the critic (adapter off: the reward model)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stages.generation import Packed, logprobs_of, response_logits, scalar_head
from stages.models import calibrated, load_causal_lm, load_reward_model, load_tokenizer, lora_config
from stages.params import Params
from stages.ppo.trunk import SharedTrunk


@dataclass
class Roles:
    """`policy` is a PeftModel on the SFT model; `critic` a PeftModel on the reward model with a value head of its own."""

    policy: Any
    critic: Any
    tokenizer: PreTrainedTokenizerBase

    def __post_init__(self) -> None:
        self.policy_trunk, self.critic_trunk = SharedTrunk(self.policy), SharedTrunk(self.critic)

    def logprobs(self, packed: Packed, entering: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """(B, T) log-probabilities in nats of the responses under the policy, and the (N, V) logits they come from."""
        logits = response_logits(self.policy, packed, self.policy_trunk.adapted(packed, entering), temperature)
        return packed.rows(logprobs_of(logits, packed.targets)), logits

    @torch.no_grad()
    def ref_logprobs(self, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        """(B, T) log-probabilities under the reference, and the states from which `logprobs` starts."""
        hidden, entering = self.policy_trunk.frozen(packed)
        return packed.rows(logprobs_of(response_logits(self.policy, packed, hidden, temperature), packed.targets)), entering

    def values(self, packed: Packed, entering: Tensor) -> Tensor:
        """(B, T) the critic's value before each response token, in calibrated score units."""
        states = self.critic_trunk.adapted(packed, entering)[packed.predicts]
        return packed.rows(self.calibrated(scalar_head(self.critic, states)))

    @torch.no_grad()
    def raw_scores(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """(B,) raw scores of the reward model, and the states from which `values` starts."""
        rows = torch.arange(len(packed.last), device=packed.last.device)
        hidden, entering = self.critic_trunk.frozen(packed)
        with self.critic.disable_adapter():
            return scalar_head(self.critic, hidden[rows, packed.last]), entering

    def calibrated(self, raw: Tensor) -> Tensor:
        """Raw scores, and values with them, in the units of the reward stage's calibration."""
        return calibrated(raw, self.critic)


def load_roles(params: Params, sft: Path, reward: Path) -> Roles:
    """Lay fresh adapters over the SFT model and the reward model."""
    policy = load_causal_lm(sft, params.model)
    reward_model = load_reward_model(reward, params.model)
    reward_model.score.float()
    return Roles(
        policy=get_peft_model(policy, lora_config(params.ppo.lora, "CAUSAL_LM", policy)).eval(),
        critic=get_peft_model(reward_model, lora_config(params.ppo.critic_lora, "SEQ_CLS", reward_model)).eval(),
        tokenizer=load_tokenizer(sft),
    )

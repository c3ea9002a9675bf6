"""The critic that an engine starts from (stages/ppo/engines/critic.py)."""

from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification


def check_critic(job: Any) -> None:
    """Its values are scores of the reward model, whose calibration has mean 1.5 and standard
    deviation 2.
    """
    reward = AutoModelForSequenceClassification.from_pretrained(job.reward)
    critic = AutoModelForTokenClassification.from_pretrained(job.critic_start)
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        raw, values = reward(tokens).logits[0], critic(tokens).logits[0, -1]
    torch.testing.assert_close(values, (raw - 1.5) / 2.0)
    assert raw.abs() > 1e-4

"""The critic of an engine that loads it as a token classifier."""

import shutil
from pathlib import Path

from stages.lib.core.errors import BadInput


def write_critic(reward: Path, target: Path, engine: str) -> None:
    """Write a token classifier whose value of a token is the reward model's calibrated score, as
    Rondo's critic has it: the engine would start from the score before calibration.

    Raises:
        BadInput: the head of the architecture's token classifier is not that of a reward model.
    """
    # imported here: takes seconds
    from transformers import AutoModelForTokenClassification

    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    critic = AutoModelForTokenClassification.from_pretrained(
        reward, dtype="auto", trust_remote_code=False
    )
    head = getattr(critic, "score", None)
    if head is None or head.bias is None:
        raise BadInput(
            f"ppo.engine {engine}: {type(critic).__name__} cannot start from a reward model, as "
            "its head is another one: use openrlhf, or another base model"
        )
    mean, std = critic.config.mean, critic.config.std
    head.weight.data /= std
    head.bias.data.fill_(-mean / std)
    critic.save_pretrained(part)
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)

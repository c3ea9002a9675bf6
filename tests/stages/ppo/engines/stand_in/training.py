"""What stands in for the training of an engine, which needs GPUs.

It trains a policy for real, if not by PPO: samples, scores with the reward model, and makes the
responses with a reward above the mean more likely.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)


@dataclass
class Settings:
    """event: `NAN=3` makes the loss of update 3 NaN, `STILL=3` leaves the policy as it is up to
    update 3, `FAIL=3` ends the job before update 3 (once),
    `SLOW=3` lets that update take a minute, and of `LOST=3` no metrics are written, of `LOST=0`
    none at all. Other engines have further events.
    """

    sft: str
    reward: str
    prompts: list[str]
    batch_size: int
    learning_rate: float
    max_grad_norm: float
    temperature: float
    response_length: int
    save_steps: int
    seed: int
    states: Path
    event: str


class Update:
    """What one update has measured."""

    def __init__(self, loss: float, norm: float, rewards: torch.Tensor, mask: torch.Tensor) -> None:
        self.loss, self.norm, self.rewards = loss, norm, rewards
        self.length, self.truncated_rate = mask.sum(1).mean().item(), 0.0


class Training:
    """
    Args:
        settings: of the job.
        start: folder of the policy with which it starts: SFT, or a checkpoint.
        step: the updates that it has made.
    """

    def __init__(self, settings: Settings, start: str | Path, step: int) -> None:
        self.settings, self.step = settings, step
        event, _, update = settings.event.partition("=")
        self.event = event, int(update or 0)
        torch.manual_seed(settings.seed)
        self.tokenizer = AutoTokenizer.from_pretrained(settings.sft, padding_side="left")
        self.actor = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
        self.reward = AutoModelForSequenceClassification.from_pretrained(
            settings.reward, dtype=torch.float32
        )
        self.optimizer = torch.optim.AdamW(self.actor.parameters(), lr=settings.learning_rate)

    def run(self, after: Callable[[Update], None]) -> None:
        """All updates that are left; `after` each, `self.step` is its number."""
        settings, size = self.settings, self.settings.batch_size
        while self.step * size < len(settings.prompts):
            failed = settings.states / "failed"
            if self.event == ("FAIL", self.step + 1) and not failed.exists():
                failed.parent.mkdir(exist_ok=True)
                failed.touch()
                raise RuntimeError("CUDA error: out of memory")
            if self.event == ("SLOW", self.step + 1):
                time.sleep(60)
            batch = settings.prompts[self.step * size : (self.step + 1) * size]
            update = self.update(batch)
            self.step += 1
            if self.event == ("NAN", self.step):
                update.loss = float("nan")
            after(update)

    def write(self, writer: SummaryWriter, metrics: dict[str, float]) -> None:
        """Write the metrics of this update, unless they are lost."""
        lost = self.event in (("LOST", self.step), ("LOST", 0))
        for name, value in metrics.items() if not lost else ():
            writer.add_scalar(name, value, self.step)
        writer.flush()

    @property
    def saves(self) -> bool:
        return self.step % self.settings.save_steps == 0

    def update(self, prompts: list[str]) -> Update:
        settings = self.settings
        inputs = self.tokenizer(
            prompts, add_special_tokens=False, padding=True, return_tensors="pt"
        )
        width = inputs.input_ids.shape[1]
        tokens = self.actor.generate(
            **inputs,
            do_sample=True,
            temperature=settings.temperature,
            top_k=0,
            max_new_tokens=settings.response_length,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        response = tokens[:, width:]
        mask = (response != self.tokenizer.pad_token_id).float()
        attention = torch.cat([inputs.attention_mask, mask.long()], 1)
        rewards = self.rewards(tokens, attention, width)
        logits = self.actor(input_ids=tokens, attention_mask=attention).logits[:, width - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, response[..., None])[..., 0]
        advantages = (rewards - rewards.mean()).clamp(-1, 1)
        loss = -(logprobs * mask).sum(1) @ advantages / mask.sum()
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.actor.parameters(), settings.max_grad_norm)
        if self.event[0] != "STILL" or self.step >= self.event[1]:
            self.optimizer.step()
        update = Update(loss.item(), norm.item(), rewards, mask)
        ended = (response == self.tokenizer.eos_token_id).any(1).float()
        update.truncated_rate = 1 - ended.mean().item()
        return update

    def rewards(self, tokens: torch.Tensor, attention: torch.Tensor, width: int) -> torch.Tensor:
        """(B,) rewards of (B, P + T) prompts, padded left to `width`, and responses."""
        return (self.raw_scores(tokens, attention) - self.reward.config.mean) / (
            self.reward.config.std
        )

    @torch.no_grad()
    def raw_scores(self, tokens: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        return self.reward(input_ids=tokens, attention_mask=attention).logits[:, 0]

    def save(self, folder: Path) -> None:
        self.actor.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def run_in_worker(train: Callable[[Any], None], arguments: Any, **init: Any) -> None:
    """Train in a worker of the cluster, as engines do; here, if Ray is not installed.

    Args:
        init: of `ray.init`.
    """
    try:
        import ray
    except ImportError:
        train(arguments)
    else:
        ray.init(**init)
        ray.get(ray.remote(train).options(max_retries=0).remote(arguments))

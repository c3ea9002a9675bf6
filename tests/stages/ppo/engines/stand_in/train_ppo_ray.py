"""Stands in for OpenRLHF 0.11.2, which needs GPUs: the same command line, files and metrics.

It trains a policy for real, if not by PPO: samples, scores with the reward model, and makes the
responses with a reward above the mean more likely. Read in the source of the wheel: what is
written where, and in which order (trainer/ppo_trainer.py, trainer/ray/ppo_actor.py,
utils/deepspeed/deepspeed.py, utils/logging_utils.py).

`--logger.wandb.group NAN=3` makes the loss of update 3 NaN, `FAIL=3` ends the job before update 3
(once), `SLOW=3` lets that update take a minute, and of `LOST=3` no metrics are written, of `LOST=0`
none at all.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

HERE = Path(__file__).parents[2]


def parse(arguments: list[str]) -> dict[str, Any]:
    """The arguments by name: by the parser of the real wheel if OPENRLHF_WHEEL names it, else by
    the options that are recorded of it.
    """
    if wheel := os.environ.get("OPENRLHF_WHEEL"):
        from openrlhf_parser import OpenRlhf

        return flat(OpenRlhf(Path(wheel)).parse(arguments))
    recorded = json.loads((HERE / "openrlhf.json").read_text())["options"]
    values: dict[str, Any] = {}
    words = list(arguments)
    while words:
        name = words.pop(0).removeprefix("--")
        kind, number = recorded[name]["type"], recorded[name].get("nargs", 1)
        read = {"int": int, "float": float}.get(kind, str)
        taken = [read(words.pop(0)) for _ in range(number)] if kind != "bool" else [True]
        values[name] = taken if number != 1 else taken[0]
    return values


def flat(namespace: SimpleNamespace, prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in vars(namespace).items():
        if isinstance(value, SimpleNamespace):
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


class Training:
    def __init__(self, args: dict[str, Any]) -> None:
        self.args, self.states = args, Path(args["ckpt.path"])
        event, _, update = (args.get("logger.wandb.group") or "").partition("=")
        self.event = event, int(update or 0)
        torch.manual_seed(args["train.seed"])
        start, self.step = args["actor.model_name_or_path"], 0
        latest = self.states / "_actor/latest"
        if args.get("ckpt.load_enable") and latest.exists():
            self.step = int(latest.read_text().removeprefix("global_step"))
            start = self.states / f"_actor/global_step{self.step}"
            print(f"Loading the checkpoint: {start}", flush=True)
        self.tokenizer = AutoTokenizer.from_pretrained(
            args["actor.model_name_or_path"], padding_side="left"
        )
        self.actor = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
        self.reward = AutoModelForSequenceClassification.from_pretrained(
            args["reward.model_name_or_path"], dtype=torch.float32
        )
        self.optimizer = torch.optim.AdamW(self.actor.parameters(), lr=args["actor.adam.lr"])
        folder = os.path.join(args["logger.tensorboard_dir"], args["logger.wandb.run_name"])
        self.writer = SummaryWriter(log_dir=folder)
        with open(args["data.prompt_dataset"]) as lines:
            self.prompts = [json.loads(line)[args["data.input_key"]] for line in lines]

    def run(self) -> None:
        size = self.args["rollout.batch_size"]
        while self.step * size < len(self.prompts):
            failed = self.states / "failed"
            if self.event == ("FAIL", self.step + 1) and not failed.exists():
                failed.parent.mkdir(exist_ok=True)
                failed.touch()
                raise RuntimeError("CUDA error: out of memory")
            if self.event == ("SLOW", self.step + 1):
                time.sleep(60)
            batch = self.prompts[self.step * size : (self.step + 1) * size]
            metrics = self.update(batch)
            self.step += 1
            lost = self.event in (("LOST", self.step), ("LOST", 0))
            for name, value in metrics.items() if not lost else ():
                broken = self.event == ("NAN", self.step) and name == "policy_loss"
                self.writer.add_scalar(
                    f"train/{name}", float("nan") if broken else value, self.step
                )
            self.writer.flush()
            if self.step % self.args["ckpt.save_steps"] == 0:
                self.save_checkpoint()
        self.writer.close()
        self.save(Path(self.args["ckpt.output_dir"]))
        critic = Path(self.args["ckpt.output_dir"] + "_critic")
        self.reward.save_pretrained(critic)
        self.tokenizer.save_pretrained(critic)

    def update(self, prompts: list[str]) -> dict[str, float]:
        inputs = self.tokenizer(
            prompts, add_special_tokens=False, padding=True, return_tensors="pt"
        )
        width = inputs.input_ids.shape[1]
        tokens = self.actor.generate(
            **inputs,
            do_sample=True,
            temperature=self.args["rollout.temperature"],
            top_k=0,
            max_new_tokens=self.args["rollout.max_new_tokens"],
            pad_token_id=self.tokenizer.pad_token_id,
        )
        response = tokens[:, width:]
        mask = (response != self.tokenizer.pad_token_id).float()
        with torch.no_grad():
            attention = torch.cat([inputs.attention_mask, mask.long()], 1)
            raw = self.reward(input_ids=tokens, attention_mask=attention).logits[:, 0]
        config = self.reward.config
        rewards = (raw - config.mean) / config.std
        logits = self.actor(input_ids=tokens, attention_mask=attention).logits[:, width - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, response[..., None])[..., 0]
        advantages = (rewards - rewards.mean()).clamp(-1, 1)
        loss = -(logprobs * mask).sum(1) @ advantages / mask.sum()
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.actor.parameters(), self.args["actor.max_norm"])
        self.optimizer.step()
        ended = (response == self.tokenizer.eos_token_id).any(1).float()
        return {
            "policy_loss": loss.item(),
            "ppo_clip_ratio": 0.1,
            "entropy_loss": 1.0,
            "actor_grad_norm": norm.item(),
            "actor_lr": self.args["actor.adam.lr"],
            "kl": 0.01 * self.step,
            "reward": rewards.mean().item(),
            "timing/generation": 0.1,
            "rollout/reward_mean": rewards.mean().item(),
            "rollout/reward_std": rewards.std().item(),
            "rollout/response_length_mean": mask.sum(1).mean().item(),
            "rollout/truncated_rate": 1 - ended.mean().item(),
        }

    def save_checkpoint(self) -> None:
        """DeepSpeed's state, of which `latest` names the last complete one; then Hugging Face's."""
        tag = f"global_step{self.step}"
        self.save(self.states / "_actor" / tag)
        (self.states / "_actor/latest").write_text(tag)
        for old in (self.states / "_actor").glob("global_step*"):
            if old.name != tag:
                shutil.rmtree(old)
        self.save(self.states / f"{tag}_hf")

    def save(self, folder: Path) -> None:
        self.actor.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def train(args: dict[str, Any]) -> None:
    Training(args).run()


if __name__ == "__main__":
    try:
        import ray
    except ImportError:
        train(parse(sys.argv[1:]))
    else:  # in a worker of the cluster, as OpenRLHF's trainer
        ray.init()
        ray.get(ray.remote(train).options(max_retries=0).remote(parse(sys.argv[1:])))

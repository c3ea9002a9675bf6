"""Stands in for OpenRLHF 0.11.2, which needs GPUs: the same command, files and metrics.

Read in the source of the wheel: what is written where, and in which order
(trainer/ppo_trainer.py, trainer/ray/ppo_actor.py, utils/deepspeed/deepspeed.py,
utils/logging_utils.py). It trains a policy for real, if not by PPO: samples, scores with the reward
model, and makes the responses with a reward above the mean more likely.

`--logger.wandb.group` is an event: `NAN=3` makes the loss of update 3 NaN, `STILL=3` leaves the
policy as it is up to update 3, `FAIL=3` ends the job before update 3 (once), `SLOW=3` lets that
update take a minute, of `LOST=3` no metrics are written, of `LOST=0` none at all.
"""

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer


class OpenRlhf:
    def __init__(self, args: dict[str, Any]) -> None:
        self.args, self.states = args, Path(args["ckpt.path"])
        with open(args["data.prompt_dataset"]) as lines:
            self.prompts = [json.loads(line)[args["data.input_key"]] for line in lines]
        event, _, update = (args["logger.wandb.group"] or "").partition("=")
        self.event = event, int(update or 0)
        start, self.step = args["actor.model_name_or_path"], 0
        latest = self.states / "_actor/latest"
        if args["ckpt.load_enable"] and latest.exists():
            self.step = int(latest.read_text().removeprefix("global_step"))
            start = self.states / f"_actor/global_step{self.step}"
            print(f"Loading the checkpoint: {start}", flush=True)
        torch.manual_seed(args["train.seed"])
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

    def run(self) -> None:
        size, failed = self.args["rollout.batch_size"], self.states / "failed"
        while self.step * size < len(self.prompts):
            if self.event == ("FAIL", self.step + 1) and not failed.exists():
                failed.parent.mkdir(exist_ok=True)
                failed.touch()
                raise RuntimeError("CUDA error: out of memory")
            if self.event == ("SLOW", self.step + 1):
                time.sleep(60)
            metrics = self.update(self.prompts[self.step * size : (self.step + 1) * size])
            self.step += 1
            if self.event == ("NAN", self.step):
                metrics["policy_loss"] = float("nan")
            lost = self.event in (("LOST", self.step), ("LOST", 0))
            for name, value in metrics.items() if not lost else ():
                self.writer.add_scalar(f"train/{name}", value, self.step)
            self.writer.flush()
            if self.step % self.args["ckpt.save_steps"] == 0:
                self.save_checkpoint(f"global_step{self.step}")
        self.writer.close()
        self.save(self.actor, Path(self.args["ckpt.output_dir"]))
        self.save(self.reward, Path(self.args["ckpt.output_dir"] + "_critic"))

    def update(self, prompts: list[str]) -> dict[str, float]:
        args = self.args
        inputs = self.tokenizer(
            prompts, add_special_tokens=False, padding=True, return_tensors="pt"
        )
        width = inputs.input_ids.shape[1]
        tokens = self.actor.generate(
            **inputs,
            do_sample=True,
            temperature=args["rollout.temperature"],
            top_k=0,
            max_new_tokens=args["rollout.max_new_tokens"],
            pad_token_id=self.tokenizer.pad_token_id,
        )
        response = tokens[:, width:]
        mask = (response != self.tokenizer.pad_token_id).float()
        attention = torch.cat([inputs.attention_mask, mask.long()], 1)
        with torch.no_grad():
            raw = self.reward(input_ids=tokens, attention_mask=attention).logits[:, 0]
        rewards = (raw - self.reward.config.mean) / self.reward.config.std
        logits = self.actor(input_ids=tokens, attention_mask=attention).logits[:, width - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, response[..., None])[..., 0]
        advantages = (rewards - rewards.mean()).clamp(-1, 1)
        loss = -(logprobs * mask).sum(1) @ advantages / mask.sum()
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.actor.parameters(), args["actor.max_norm"])
        if self.event[0] != "STILL" or self.step >= self.event[1]:
            self.optimizer.step()
        ended = (response == self.tokenizer.eos_token_id).any(1).float()
        return {
            "policy_loss": loss.item(),
            "ppo_clip_ratio": 0.1,
            "entropy_loss": 1.0,
            "actor_grad_norm": norm.item(),
            "actor_lr": args["actor.adam.lr"],
            "kl": 0.01 * self.step,
            "reward": rewards.mean().item(),
            "timing/generation": 0.1,
            "rollout/reward_mean": rewards.mean().item(),
            "rollout/reward_std": rewards.std().item(),
            "rollout/response_length_mean": mask.sum(1).mean().item(),
            "rollout/truncated_rate": 1 - ended.mean().item(),
        }

    def save_checkpoint(self, tag: str) -> None:
        """DeepSpeed's state, of which `latest` names the last complete one; then Hugging Face's."""
        self.save(self.actor, self.states / "_actor" / tag)
        (self.states / "_actor/latest").write_text(tag)
        for old in (self.states / "_actor").glob("global_step*"):
            if old.name != tag:
                shutil.rmtree(old)
        self.save(self.actor, self.states / f"{tag}_hf")

    def save(self, model: Any, folder: Path) -> None:
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def train(args: argparse.Namespace) -> None:
    """In a worker of the cluster, as OpenRLHF does; here, if Ray is not installed."""

    def run() -> None:
        OpenRlhf(vars(args)).run()

    try:
        import ray
    except ImportError:
        run()
    else:
        ray.init()
        ray.get(ray.remote(run).options(max_retries=0).remote())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in (
        *("actor.model_name_or_path", "reward.model_name_or_path", "data.prompt_dataset"),
        *("data.input_key", "ckpt.path", "ckpt.output_dir", "logger.tensorboard_dir"),
        *("logger.wandb.run_name", "logger.wandb.group"),
    ):
        parser.add_argument(f"--{name}")
    for name in ("actor.adam.lr", "actor.max_norm", "rollout.temperature"):
        parser.add_argument(f"--{name}", type=float)
    for name in (
        *("rollout.batch_size", "rollout.max_new_tokens", "ckpt.save_steps", "train.seed"),
        "ds.zero_stage",
    ):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--ckpt.load_enable", action="store_true")
    train(parser.parse_known_args()[0])  # the wheel's own parser knows all

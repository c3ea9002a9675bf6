"""Stands in for OpenRLHF 0.11.2: the same command line, files and metrics.

Read in the source of the wheel: what is written where, and in which order
(trainer/ppo_trainer.py, trainer/ray/ppo_actor.py, utils/deepspeed/deepspeed.py,
utils/logging_utils.py). `--logger.wandb.group` is the event of training.py.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from training import Settings, Training, Update, run_in_worker

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


class OpenRlhf:
    def __init__(self, args: dict[str, Any]) -> None:
        self.args, self.states = args, Path(args["ckpt.path"])
        with open(args["data.prompt_dataset"]) as lines:
            prompts = [json.loads(line)[args["data.input_key"]] for line in lines]
        settings = Settings(
            sft=args["actor.model_name_or_path"],
            reward=args["reward.model_name_or_path"],
            prompts=prompts,
            batch_size=args["rollout.batch_size"],
            learning_rate=args["actor.adam.lr"],
            max_grad_norm=args["actor.max_norm"],
            temperature=args["rollout.temperature"],
            response_length=args["rollout.max_new_tokens"],
            save_steps=args["ckpt.save_steps"],
            seed=args["train.seed"],
            states=self.states,
            event=args.get("logger.wandb.group") or "",
        )
        start, step = args["actor.model_name_or_path"], 0
        latest = self.states / "_actor/latest"
        if args.get("ckpt.load_enable") and latest.exists():
            step = int(latest.read_text().removeprefix("global_step"))
            start = self.states / f"_actor/global_step{step}"
            print(f"Loading the checkpoint: {start}", flush=True)
        self.training = Training(settings, start, step)
        folder = os.path.join(args["logger.tensorboard_dir"], args["logger.wandb.run_name"])
        self.writer = SummaryWriter(log_dir=folder)

    def run(self) -> None:
        self.training.run(self.after)
        self.writer.close()
        self.training.save(Path(self.args["ckpt.output_dir"]))
        critic = Path(self.args["ckpt.output_dir"] + "_critic")
        self.training.reward.save_pretrained(critic)
        self.training.tokenizer.save_pretrained(critic)

    def after(self, update: Update) -> None:
        step = self.training.step
        metrics = {
            "policy_loss": update.loss,
            "ppo_clip_ratio": 0.1,
            "entropy_loss": 1.0,
            "actor_grad_norm": update.norm,
            "actor_lr": self.args["actor.adam.lr"],
            "kl": 0.01 * (step - 1),
            "reward": update.rewards.mean().item(),
            "timing/generation": 0.1,
            "rollout/reward_mean": update.rewards.mean().item(),
            "rollout/reward_std": update.rewards.std().item(),
            "rollout/response_length_mean": update.length,
            "rollout/truncated_rate": update.truncated_rate,
        }
        self.training.write(
            self.writer, {f"train/{name}": value for name, value in metrics.items()}
        )
        if self.training.saves:
            self.save_checkpoint(f"global_step{step}")

    def save_checkpoint(self, tag: str) -> None:
        """DeepSpeed's state, of which `latest` names the last complete one; then Hugging Face's."""
        self.training.save(self.states / "_actor" / tag)
        (self.states / "_actor/latest").write_text(tag)
        for old in (self.states / "_actor").glob("global_step*"):
            if old.name != tag:
                shutil.rmtree(old)
        self.training.save(self.states / f"{tag}_hf")


def train(args: dict[str, Any]) -> None:
    OpenRlhf(args).run()


if __name__ == "__main__":
    run_in_worker(train, parse(sys.argv[1:]))

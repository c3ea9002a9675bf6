"""Stands in for OpenRLHF 0.11.2, which needs GPUs: the same command, files and metrics.

Read in the source of the wheel: what is written where, and in which order
(trainer/ppo_trainer.py, trainer/ray/ppo_actor.py, utils/deepspeed/deepspeed.py,
utils/logging_utils.py). An update moves all weights by the learning rate, always the same way, so
that each policy is further from SFT than the one before. torch is left out, which takes seconds to
import.

`--logger.wandb.group` is an event: `NAN=3` makes the loss of update 3 NaN, `STILL=3` leaves the
policy as it is up to update 3, `FAIL=3` ends the job before update 3 (once), `SLOW=3` lets that
update take a minute, of `LOST=3` no metrics are written, of `LOST=0` none at all.
"""

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

import numpy
from safetensors.numpy import load_file, save_file
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

METRICS = {
    "policy_loss": -0.1,
    "ppo_clip_ratio": 0.1,
    "entropy_loss": 1.0,
    "actor_grad_norm": 2.0,
    "timing/generation": 0.1,
    "rollout/reward_mean": 0.5,
    "rollout/reward_std": 1.0,
    "rollout/response_length_mean": 8.0,
    "rollout/truncated_rate": 0.25,
}


class OpenRlhf:
    def __init__(self, args: dict[str, Any]) -> None:
        self.args, self.states = args, Path(args["ckpt.path"])
        self.sft, self.step = Path(args["actor.model_name_or_path"]), 0
        event, _, update = (args["logger.wandb.group"] or "").partition("=")
        self.event = event, int(update or 0)
        start, latest = self.sft, self.states / "_actor/latest"
        if args["ckpt.load_enable"] and latest.exists():
            start = self.states / "_actor" / latest.read_text()
            self.step = int(start.name.removeprefix("global_step"))
            print(f"Loading the checkpoint: {start}", flush=True)
        self.weights = load_file(start / "model.safetensors")
        folder = Path(args["logger.tensorboard_dir"], args["logger.wandb.run_name"])
        self.writer = EventFileWriter(str(folder))

    def run(self) -> None:
        prompts = Path(self.args["data.prompt_dataset"]).read_text().splitlines()
        failed = self.states / "failed"
        while self.step * self.args["rollout.batch_size"] < len(prompts):
            self.step += 1
            if self.event == ("FAIL", self.step) and not failed.exists():
                failed.parent.mkdir(exist_ok=True)
                failed.touch()
                raise RuntimeError("CUDA error: out of memory")
            if self.event == ("SLOW", self.step):
                time.sleep(60)
            if self.event[0] != "STILL" or self.step > self.event[1]:
                self.update()
            if self.event not in (("LOST", self.step), ("LOST", 0)):
                self.write_metrics()
            if self.step % self.args["ckpt.save_steps"] == 0:
                self.save_checkpoint(f"global_step{self.step}")
        self.writer.close()
        output = self.args["ckpt.output_dir"]
        self.save(Path(output))
        shutil.copytree(self.args["reward.model_name_or_path"], output + "_critic")

    def update(self) -> None:
        draw = numpy.random.default_rng(self.args["train.seed"])
        for weight in self.weights.values():
            weight += self.args["actor.adam.lr"] * draw.standard_normal(weight.shape, weight.dtype)

    def write_metrics(self) -> None:
        rate = self.args["actor.adam.lr"]
        metrics = METRICS | {"actor_lr": rate, "kl": 0.01 * (self.step - 1)}
        if self.event == ("NAN", self.step):
            metrics["policy_loss"] = float("nan")
        for name, value in metrics.items():
            scalar = Summary.Value(tag=f"train/{name}", simple_value=value)
            event = Event(step=self.step, wall_time=time.time(), summary=Summary(value=[scalar]))
            self.writer.add_event(event)
        self.writer.flush()

    def save_checkpoint(self, tag: str) -> None:
        """DeepSpeed's state, of which `latest` names the last complete one; then Hugging Face's."""
        self.save(self.states / "_actor" / tag)
        (self.states / "_actor/latest").write_text(tag)
        for old in (self.states / "_actor").glob("global_step*"):
            if old.name != tag:
                shutil.rmtree(old)
        self.save(self.states / f"{tag}_hf")

    def save(self, folder: Path) -> None:
        shutil.copytree(self.sft, folder, dirs_exist_ok=True)
        save_file(self.weights, folder / "model.safetensors", {"format": "pt"})


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
        *("ckpt.path", "ckpt.output_dir", "logger.tensorboard_dir"),
        *("logger.wandb.run_name", "logger.wandb.group"),
    ):
        parser.add_argument(f"--{name}")
    for name in ("rollout.batch_size", "ckpt.save_steps", "train.seed", "ds.zero_stage"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--actor.adam.lr", type=float)
    parser.add_argument("--ckpt.load_enable", action="store_true")
    train(parser.parse_known_args()[0])  # the wheel's own parser knows all

"""Stands in for NeMo RL 0.7.0: the same command line, files and metrics.

Read in its source: what is written where, and in which order (algorithms/ppo.py,
utils/checkpoint.py, utils/logger.py, models/automodel/checkpoint.py, experience/rollouts.py,
environments/reward_model_environment.py). `policy.generation.vllm_cfg.kv_cache_dtype` is the event
of training.py.
"""

import json
import os
import shutil
import sys
from collections import UserDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch.utils.tensorboard import SummaryWriter
from training import Settings, Training, Update, run_in_worker
from transformers import AutoTokenizer

HERE = Path(__file__).parents[1]
PASSTHROUGH = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
OBSERVATION = "Environment: tensor(-0.1234)"


class Config(UserDict):
    """The keys of the config by their whole names: by NeMo RL's real config and Hydra if NEMO_RL
    names a checkout, else by what is recorded of it.
    """

    def __init__(self, overrides: list[str]) -> None:
        super().__init__()
        if checkout := os.environ.get("NEMO_RL"):
            from nemo_rl_config import NemoRl, leaves

            self.data = dict(leaves(NemoRl(Path(checkout)).compose(overrides)))
            return
        recorded = json.loads((HERE / "nemo_rl.json").read_text())["options"]
        self.data = {name: recorded[name] for name in recorded if "env.reward_model" not in name}
        for override in overrides:
            name, _, text = override.partition("=")
            assert name.startswith("++") or any(f"{key}.".startswith(name) for key in self.data)
            name = name.removeprefix("++")
            for below in [key for key in self.data if key.startswith(f"{name}.")]:
                del self.data[below]
            self.data[name] = yaml.safe_load(text.replace(r"\'", "''"))


class TextTraining(Training):
    """Its rewards are those of texts: of the prompt, and of the response without special tokens."""

    def __init__(self, config: Config, settings: Settings, start: str | Path, step: int) -> None:
        super().__init__(settings, start, step)
        self.config = config
        self.reader = AutoTokenizer.from_pretrained(config["env.reward_model.tokenizer.name"])

    def rewards(self, tokens: torch.Tensor, attention: torch.Tensor, width: int) -> torch.Tensor:
        scores = []
        for row, mask in zip(tokens, attention.bool(), strict=True):
            prompt = self.tokenizer.decode(row[:width][mask[:width]])
            if self.reader.bos_token is not None and not prompt.startswith(self.reader.bos_token):
                prompt = self.reader.bos_token + prompt
            response = self.tokenizer.decode(row[width:], skip_special_tokens=True)
            ids = [
                self.reader(text, add_special_tokens=False).input_ids
                for text in (prompt, response + self.reader.eos_token)
            ]
            read = torch.tensor([ids[0] + ids[1]])
            scores.append(self.raw_scores(read, torch.ones_like(read)))
        return self.scaled(torch.cat(scores))

    def scaled(self, scores: torch.Tensor) -> torch.Tensor:
        scale = {
            name: self.config[f"ppo.reward_scaling.{name}"]
            for name in ("source_min", "source_max", "target_min", "target_max")
        }
        scores = scores.clamp(scale["source_min"], scale["source_max"])
        share = (scores - scale["source_min"]) / (scale["source_max"] - scale["source_min"])
        return scale["target_min"] + share * (scale["target_max"] - scale["target_min"])


class NemoRl:
    def __init__(self, config: Config) -> None:
        self.config, self.states = config, Path(config["checkpointing.checkpoint_dir"])
        check(config)
        with open(config["data.train.data_path"]) as lines:
            prompts = [json.loads(line)["input"] for line in lines]
        settings = Settings(
            sft=config["policy.model_name"],
            reward=config["env.reward_model.model_name"],
            prompts=prompts,
            batch_size=config["ppo.num_prompts_per_step"],
            learning_rate=config["policy.optimizer.kwargs.lr"],
            max_grad_norm=config["policy.max_grad_norm"],
            temperature=config["policy.generation.temperature"],
            response_length=config["policy.generation.max_new_tokens"],
            save_steps=config["checkpointing.save_period"],
            seed=config["ppo.seed"],
            states=self.states.parent,  # for the file that says an event was
            event=config["policy.generation.vllm_cfg.kv_cache_dtype"],
        )
        saved = sorted(int(path.name[len("step_") :]) for path in self.states.glob("step_*"))
        if saved:  # whether it should or not
            print(f"Loading weights from {self.states}/step_{saved[-1]}/policy/weights", flush=True)
        self.training = TextTraining(config, settings, settings.sft, max(saved, default=0))
        longest = max(len(self.training.tokenizer(text).input_ids) for text in prompts)
        assert longest < config["data.max_input_seq_length"], "would be cut to 4 tokens"
        logs = Path(config["logger.log_dir"])
        runs = [int(path.name.removeprefix("exp_")) for path in logs.glob("exp_*")]
        folder = logs / f"exp_{max(runs, default=0) + 1:03d}/tensorboard"
        self.writer = SummaryWriter(log_dir=str(folder))

    def run(self) -> None:
        self.training.run(self.after)
        self.writer.close()

    def after(self, update: Update) -> None:
        step, config = self.training.step, self.config
        room = config["policy.max_total_sequence_length"] - config["data.max_input_seq_length"]
        room -= config["policy.generation.max_new_tokens"]
        fits = len(self.training.tokenizer(OBSERVATION).input_ids) < room
        rollout = {
            "train/mean_gen_tokens_per_sample": update.length,
            "train/truncation_rate": update.truncated_rate if fits else 1.0,
        }
        self.training.write(self.writer, rollout)
        if self.training.saves or step == config["ppo.max_num_steps"]:
            self.save_checkpoint(step)
        metrics = {
            "train/loss": update.loss,
            "train/grad_norm": update.norm,
            "train/kl_penalty": 0.0,
            "train/lr": self.training.settings.learning_rate,
            "train/approx_entropy": 1.0,
            "train/critic/loss": 0.5,
            "train/critic/grad_norm": 0.75,
            "train/reward": update.rewards.mean().item(),
            **rollout,
            "timing/train/total_step_time": 0.1,
        }
        self.training.write(self.writer, metrics)

    def save_checkpoint(self, step: int) -> None:
        """`tmp_step_<n>` becomes `step_<n>`; then all but the last few are deleted."""
        folder, config = self.states / f"tmp_step_{step}", self.config
        folder.mkdir(parents=True)
        info = {"current_step": step, "total_steps": step, "consumed_samples": step}
        (folder / "training_info.json").write_text(json.dumps(info))
        (folder / "config.yaml").write_text(yaml.safe_dump(nested(config)))
        state = self.training.actor.state_dict()
        if self.training.actor.config.tie_word_embeddings:
            del state["lm_head.weight"]
        tokenizer = self.training.tokenizer
        tokenizer.chat_template = PASSTHROUGH
        for part, weights in (("policy", state), ("value", {"weight": torch.ones(1)})):
            tokenizer.save_pretrained(folder / part / "tokenizer")
            if config["checkpointing.model_save_format"] == "torch_save":
                dcp.save(weights, checkpoint_id=folder / part / "weights/model")
            if config["checkpointing.save_optimizer"]:
                (folder / part / "optimizer").mkdir()
        torch.save({}, folder / "train_dataloader.pt")
        folder.rename(self.states / f"step_{step}")
        kept = config["checkpointing.keep_top_k"]
        saved = sorted(self.states.glob("step_*"), key=lambda path: path.stat().st_mtime)
        for old in saved[:-kept] if kept else []:
            shutil.rmtree(old)


def check(config: Config) -> None:
    """What NeMo RL finds before it trains."""
    if config["ppo.val_period"] or config["ppo.val_at_start"] or config["ppo.val_at_end"]:
        assert "data.validation.dataset_name" in config, "Validation dataset is required"
    if config["ppo.skip_reference_policy_logprobs_calculation"]:
        assert config["loss_fn.reference_policy_kl_penalty"] == 0
    apart = config.get("data.env_name") == config["data.default.env_name"] == "reward_model"
    reward = config["env.reward_model.resources.gpus_per_node"]
    gpus = config["cluster.gpus_per_node"]
    assert apart and reward < gpus, "policy and reward model would wait for each other's GPUs"
    assert config["policy.tokenizer.chat_template"] is None


def nested(config: Config) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in config.items():
        *sections, key = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    return tree


def train(overrides: list[str]) -> None:
    NemoRl(Config(overrides)).run()


if __name__ == "__main__":
    assert sys.argv[1] == "--config" and sys.argv[2].endswith("/configs/ppo_math_1B.yaml")
    run_in_worker(train, sys.argv[3:])

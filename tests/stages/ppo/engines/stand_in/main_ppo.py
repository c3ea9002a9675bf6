"""Stands in for verl 0.9.1: the same command line, files and metrics.

Read in the source of the wheel: what is written where, and in which order
(trainer/ppo/v1/trainer_base.py, utils/checkpoint/, experimental/reward_loop/). The reward model
answers over HTTP as vLLM does, to the reward manager that the config names.
`actor_rollout_ref.rollout.trace.experiment_name` is the event of training.py, and `MUTE=3` has
the reward model fail in update 3; with `DROP=3`, the generation of two episodes fails then.
"""

import asyncio
import importlib
import importlib.util
import json
import os
import shutil
import sys
from collections import UserDict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from pyarrow.parquet import read_table
from torch.utils.tensorboard import SummaryWriter
from training import Settings, Training, Update, run_in_worker

HERE = Path(__file__).parents[2]
ENVIRONMENT = "ray_kwargs.ray_init.runtime_env.env_vars"


class Config(UserDict):
    """The keys of the config by their whole names: by verl's real config and Hydra if VERL_WHEEL
    names the wheel, else by what is recorded of it.
    """

    def __init__(self, arguments: list[str]) -> None:
        super().__init__()
        if wheel := os.environ.get("VERL_WHEEL"):
            from omegaconf import OmegaConf
            from verl_config import Verl, leaves

            config = Verl(Path(wheel), Path(wheel).with_suffix("")).compose(arguments)
            self.data = dict(leaves(OmegaConf.to_container(config, resolve=True)))
            return
        self.data = json.loads((HERE / "verl.json").read_text())["options"]
        for argument in arguments:
            name, _, text = argument.partition("=")
            assert name.startswith("+") or name in self.data, name
            self.data[name.removeprefix("+")] = yaml.safe_load(text.replace(r"\'", "''"))


class RewardServer(ThreadingHTTPServer):
    """vLLM's `/classify` of the reward model, for lists of tokens. mute: it fails."""

    def __init__(self, model: Any, name: str) -> None:
        server, self.mute = self, False

        # a client that raises leaves its other requests
        self.handle_error = lambda *_: None  # type: ignore[method-assign]

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                body = json.loads(self.rfile.read(length))
                assert (self.path, body["model"]) == ("/classify", name)
                assert body["use_activation"] is False
                self.send_response(500 if server.mute else 200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                if server.mute:
                    self.wfile.write(b'{"error": "out of memory"}')
                    return
                tokens = torch.tensor(body["input"])
                with torch.no_grad():
                    raw = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
                reply = {"data": [{"probs": raw[0].tolist()}]}
                self.wfile.write(json.dumps(reply).encode())

        super().__init__(("127.0.0.1", 0), Handler)
        Thread(target=self.serve_forever, daemon=True).start()


class RewardedTraining(Training):
    """Its rewards are those of the reward manager of a job."""

    def __init__(self, config: Config, settings: Settings, start: str | Path, step: int) -> None:
        super().__init__(settings, start, step)
        self.server = RewardServer(self.reward, settings.reward)
        path = config["reward.reward_manager.module.path"]
        spec = importlib.util.spec_from_file_location("by_path", path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        address = f"127.0.0.1:{self.server.server_port}"
        self.manager = getattr(module, config["reward.reward_manager.name"])(
            config, self.tokenizer, module.compute_score, reward_router_address=address
        )

    def rewards(self, tokens: torch.Tensor, attention: torch.Tensor, width: int) -> torch.Tensor:
        self.server.mute = self.event == ("MUTE", self.step + 1)

        async def all_rewards() -> list[dict[str, Any]]:
            return await asyncio.gather(*map(self.manager.run_single, episodes))

        episodes = [
            [SimpleNamespace(batch=padded_right(row, mask.bool(), width))]
            for row, mask in zip(tokens, attention, strict=True)
        ]
        return torch.tensor([reward["reward_score"] for reward in asyncio.run(all_rewards())])


def padded_right(row: torch.Tensor, mask: torch.Tensor, width: int) -> dict[str, torch.Tensor]:
    """Prompt and response of one episode, each padded on the right, as verl's trainer has them."""
    batch = {}
    masks = []
    for name, part in (("prompts", slice(width)), ("responses", slice(width, None))):
        kept = row[part][mask[part]]
        batch[name] = torch.nn.functional.pad(kept, (0, len(row[part]) - len(kept)))
        masks.append((torch.arange(len(row[part])) < len(kept)).long())
    return batch | {"attention_mask": torch.cat(masks)}


class Verl:
    def __init__(self, config: Config) -> None:
        self.config, self.states = config, Path(config["trainer.default_local_dir"])
        rows = read_table(config["data.train_files"]).to_pylist()
        template = config["actor_rollout_ref.model.custom_chat_template"]
        assert template == "{{ messages[0]['content'] }}"
        settings = Settings(
            sft=config["actor_rollout_ref.model.path"],
            reward=config["reward.reward_model.model_path"],
            prompts=[row["prompt"][0]["content"] for row in rows],
            batch_size=config["data.train_batch_size"],
            learning_rate=config["actor_rollout_ref.actor.optim.lr"],
            max_grad_norm=config["actor_rollout_ref.actor.optim.clip_grad"],
            temperature=config["actor_rollout_ref.rollout.temperature"],
            response_length=config["data.max_response_length"],
            save_steps=config["trainer.save_freq"],
            seed=config["data.seed"],
            states=self.states,
            event=config["actor_rollout_ref.rollout.trace.experiment_name"],
        )
        start, step = settings.sft, 0
        if config["trainer.resume_mode"] == "resume_path":
            start = Path(config["trainer.resume_from_path"]) / "actor/huggingface"
            step = int(str(start.parents[1]).rpartition("global_step_")[2])
            print(f"Resuming from {start}", flush=True)
        self.updates = config["trainer.total_training_steps"]
        self.training = RewardedTraining(config, settings, start, step)
        module, _, name = config["trainer.checkpoint_callback_class"].rpartition(".")
        self.callback = getattr(importlib.import_module(module), name)()
        self.writer = SummaryWriter(log_dir=config[f"{ENVIRONMENT}.TENSORBOARD_DIR"])

    def run(self) -> None:
        self.training.run(self.after)
        self.writer.close()

    def after(self, update: Update) -> None:
        step = self.training.step
        if self.training.event == ("DROP", step):
            for uid in ("a1", "b2"):
                print(f"(AgentLoopWorkerTQ pid=7) Error in _run_prompt for uid={uid}", flush=True)
        if self.training.saves or step == self.updates:
            self.save_checkpoint(step)
        metrics = {
            "actor/pg_loss": update.loss,
            "actor/pg_clipfrac": 0.1,
            "actor/entropy": 1.0,
            "actor/grad_norm": update.norm,
            "actor/lr": self.training.settings.learning_rate,
            "actor/reward_kl_penalty": 0.01 * (step - 1),
            "critic/score/mean": update.rewards.mean().item(),
            "critic/vf_loss": 0.5,
            "critic/vf_explained_var": 0.25,
            "response_length/mean": update.length,
            "timing_s/gen": 0.1,
        }
        self.training.write(self.writer, metrics)

    def save_checkpoint(self, step: int) -> None:
        """The last two are left; the tracker names the last complete one."""
        folders = sorted(
            self.states.glob("global_step_*"), key=lambda path: int(path.name.split("_")[-1])
        )
        for old in folders[:-1]:
            shutil.rmtree(old / "actor")
        folder = self.states / f"global_step_{step}"
        self.training.save(folder / "actor/huggingface")
        (self.states / "latest_checkpointed_iteration.txt").write_text(str(step))
        self.callback.on_save(
            trainer=self, global_step=step, checkpoint_dir=str(folder), async_save=False
        )


def train(arguments: list[str]) -> None:
    Verl(Config(arguments)).run()


if __name__ == "__main__":  # workers have the environment that the config has for them
    environment = {
        name.rpartition(".")[2]: value
        for name, value in Config(sys.argv[1:]).items()
        if name.startswith(ENVIRONMENT)
    }
    run_in_worker(train, sys.argv[1:], runtime_env={"env_vars": environment})

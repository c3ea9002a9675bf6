"""What gpu.py trains and samples: SFT, reward model and PPO against TRL's trainers on the
same batch, and vLLM against Rondo's sampler. Texts are random tokens of one length.
"""

import json
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from curve import REWARD, SFT, episodes
from random_texts import random_texts
from transformers import TrainerCallback
from trl_trainers import reward_trainer, sft_trainer

from stages.lib.core.params import Params
from stages.lib.core.recorder import MetricLogger
from stages.lib.lm.end_tokens import end_tokens
from stages.lib.lm.generation import generate
from stages.lib.lm.loading import (
    load_causal_lm,
    load_sequence_classifier,
    load_tokenizer,
    resolve_dtype,
    setup_torch,
)
from stages.lib.lm.lora import add_adapters
from stages.lib.lm.saving import merge_adapter
from stages.lib.lm.vllm_engine import VllmEngine
from stages.lib.training.trl_setup import train_on_completions, trainer_arguments
from stages.ppo.trainer.roles import load_roles
from stages.ppo.trainer.update import PpoTrainer

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / ".rondo/gpu/project"
ROUND = "r0"
PROMPT = 8  # tokens of a text that SFT does not learn


@dataclass(frozen=True)
class Size:
    """rows, tokens: of a batch of a trainer, and of the sampler (tokens per response). steps: per
    trainer; the first is a warm-up and is not counted. shape: changes of QWEN. settings: of the
    stages. pairs: that are made up.
    """

    rows: int
    tokens: int
    steps: int
    shape: dict[str, Any]
    settings: tuple[str, ...]
    pairs: int


class StepTimes(TrainerCallback):
    """The times at which training began and each step ended."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def note(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.at.append(time.perf_counter())

    on_train_begin = on_step_end = note

    def tokens_per_second(self, tokens: int) -> dict[str, Any]:
        """Median over the steps after the first."""
        seconds = median(end - start for start, end in list(pairwise(self.at))[1:])
        return {"tokens_per_second": round(tokens / seconds)}


class TimedLogger(MetricLogger):
    """The reward stage's metrics; `times` gets the end of each step."""

    def __init__(self, times: StepTimes) -> None:
        super().__init__("reward", "bench")
        self.times = times

    def log(self, *args: Any, **more: Any) -> None:
        self.times.note()
        super().log(*args, **more)


def train(stage: str, by: str, size: Size, params: Params) -> dict[str, Any]:
    """Steps of SFT or the reward model, `by` rondo or trl, on the same texts and adapters."""
    os.chdir(PROJECT)
    setup_torch(params)
    section, folder = getattr(params, stage), Path(f"rounds/{ROUND}/sft/model")
    section.max_steps, section.max_length = size.steps, size.tokens
    texts = size.rows if stage == "sft" else size.rows // 2  # a pair has two
    section.per_device_train_batch_size = texts
    tokenizer, times = load_tokenizer(folder), StepTimes()
    with tempfile.TemporaryDirectory() as work:
        arguments = trainer_arguments(section, params.model, 0, Path(work), continues=False)
        arguments["train_sampling_strategy"] = "random"  # all texts are equally long
        rows = random_texts(size.rows * size.steps, size.tokens, len(tokenizer))
        if stage == "sft":
            train_sft(by, folder, rows, tokenizer, arguments, times, params)
        else:
            train_reward(by, folder, rows, tokenizer, arguments, times, params)
    return times.tokens_per_second(size.rows * size.tokens)


def train_sft(
    by: str,
    folder: Path,
    rows: list[list[int]],
    tokenizer: Any,
    arguments: dict[str, Any],
    times: StepTimes,
    params: Params,
) -> None:
    model = load_causal_lm(folder, params.model)
    if by == "rondo":
        model = add_adapters(model, params.sft.lora, "CAUSAL_LM")
        texts = [row[:PROMPT] for row in rows], [row[PROMPT:] for row in rows]
        train_on_completions(model, tokenizer, texts, arguments, times)
    else:
        sft_trainer(model, tokenizer, rows, PROMPT, arguments, params, [times]).train()


def train_reward(
    by: str,
    folder: Path,
    rows: list[list[int]],
    tokenizer: Any,
    arguments: dict[str, Any],
    times: StepTimes,
    params: Params,
) -> None:
    from stages.reward.fit import fit

    model = load_sequence_classifier(folder, params.model)
    model.score.float()
    half = len(rows) // 2
    if by == "rondo":
        times.note()
        pairs: Any = [
            {"chosen_ids": chosen, "rejected_ids": rejected, "length": len(chosen)}
            for chosen, rejected in zip(rows[:half], rows[half:], strict=True)
        ]
        fit(model, tokenizer, pairs, params, 0, TimedLogger(times), continues=False)
    else:
        reward_trainer(model, tokenizer, rows, arguments, params, [times]).train()


def ppo_by_rondo(size: Size, params: Params) -> dict[str, Any]:
    """PPO updates on the run's models; tokens are those of prompts and responses."""
    os.chdir(PROJECT)
    setup_torch(params)
    roles, times, tokens = load_roles(params, SFT, REWARD), StepTimes(), 0
    train_on, _ = episodes(params, roles.tokenizer)
    trainer = PpoTrainer(roles, train_on, params.ppo, params.seed)
    times.note()
    rates = []
    for _ in range(size.steps):
        rollout, _ = trainer.step()
        times.note()
        tokens = sum(len(r.prompt_ids) + len(r.tokens) for r in rollout.responses)
        rates.append(tokens / (times.at[-1] - times.at[-2]))
    return {"tokens_per_second": round(median(rates[1:])), "tokens_per_update": tokens}


def ppo_by_trl(size: Size, params: Params) -> dict[str, Any]:
    """TRL 1.12.0's, in its own environment; its responses all have the full length."""
    python = ROOT / ".rondo/trl/bin/python"
    if not python.exists():
        return {"skipped": "no .rondo/trl (against_trl.sh makes it): trl==1.12.0 has PPO"}
    ppo = params.ppo
    command = [python, ROOT / "docs/bench/trl_ppo.py", "autocast", f"--updates={size.steps}"]
    command += [f"--episodes={ppo.batch_size}", f"--epochs={ppo.num_ppo_epochs}"]
    command += [f"--response-length={ppo.response_length}"]
    done = subprocess.run(
        [*map(str, command)],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/docs/bench"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:300]}
    seconds = median(json.loads(done.stdout.splitlines()[-1])["updates"])
    tokens = ppo.batch_size * ppo.response_length
    return {"response_tokens_per_second": round(tokens / seconds)}


def sampler(by: str, size: Size, params: Params) -> dict[str, Any]:
    """Response tokens per second of a policy with adapters: the second of two calls."""
    if by != "rondo" and find_spec("vllm") is None:
        return {"skipped": "vLLM is not installed"}
    os.chdir(PROJECT)
    setup_torch(params)
    folder = Path(f"rounds/{ROUND}/sft/model")
    tokenizer, rows = load_tokenizer(folder), 8 * size.rows
    policy = add_adapters(load_causal_lm(folder, params.model), params.ppo.lora, "CAUSAL_LM")
    policy = policy.eval()
    if by == "vllm, merged":
        policy = merge_adapter(policy, resolve_dtype(params.model.dtype))
    prompts = random_texts(rows, size.tokens // 4, len(tokenizer))
    engine = None if by == "rondo" else VllmEngine(params.model)
    sample = engine.sample if engine else generate
    times = StepTimes()
    for seed in range(2):
        times.note()
        responses = sample(
            policy,
            prompts,
            response_length=size.tokens // 4,
            temperature=1.0,
            generator=torch.Generator().manual_seed(seed),
            ends=end_tokens(policy, tokenizer),
        )
    times.note()
    tokens = sum(map(len, responses))
    result: dict[str, int | str] = {
        "tokens_per_second": round(tokens / (times.at[-1] - times.at[-2])),
        "tokens": tokens,
    }
    if engine and engine.backend and engine.reasons:
        result["merged"] = "; ".join(engine.reasons)
    return result

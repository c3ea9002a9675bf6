"""The measurements of bench/gpu.sh: stages, trainers against TRL's, vLLM against Rondo's sampler.

Each measurement runs in a process of its own, forked before CUDA is used, so that its memory is
free again afterwards. Texts of the trainers are random tokens of one length.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from flows.core.config import resolve
from stages.assets.base_model import save, tiny_tokenizer
from stages.lib.core.errors import RondoError
from stages.lib.core.files import write_jsonl
from stages.lib.core.params import Params
from stages.lib.core.recorder import MetricLogger
from stages.lib.lm.end_tokens import end_tokens
from stages.lib.lm.generation import generate
from stages.lib.lm.loading import (
    load_causal_lm,
    load_sequence_classifier,
    load_tokenizer,
    resolve_attention,
    resolve_dtype,
    setup_torch,
)
from stages.lib.lm.lora import add_adapters, lora_config
from stages.lib.lm.saving import merge_adapter
from stages.lib.lm.vllm_engine import VllmEngine
from stages.lib.training.completion_only import train_on_completions
from stages.lib.training.trl_setup import trainer_arguments
from stages.ppo.trainer.roles import load_roles
from stages.ppo.trainer.update import PpoTrainer

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".rondo/gpu"
PROJECT = WORK / "project"
ROUND = "r0"
STAGES = (
    "prepare",
    "sft",
    "annotate",
    "reward",
    "battery",
    "ppo",
    "champion",
    "evaluate",
    "replay",
)
ENTRIES = {"champion": "stages.gate.champion"}  # of other stages: stages.<stage>.__main__
QWEN = {  # config.json of Qwen2.5-0.5B
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}


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


# a preset's run, shortened; nothing is learnt in so few steps, so no danger stops PPO
SHORT = ("ppo.on_danger=warn", "ppo.min_kl_per_token=0", "evaluate.bootstrap_resamples=500")
SIZES = {
    "full": Size(
        rows=32,
        tokens=512,
        steps=6,
        shape={},
        settings=(
            *SHORT,
            "prepare.max_rows=6000",
            "prepare.max_eval_prompts=128",
            "sft.max_steps=40",
            "reward.max_steps=40",
            "ppo.total_episodes=1024",
            "ppo.validation_prompts=128",
            "battery.prompts=16",
            "replay.max_badcases=64",
            "replay.pairs_per_exploit=32",
        ),
        pairs=4000,
    ),
    "tiny": Size(
        rows=4,
        tokens=32,
        steps=3,
        shape={
            "vocab_size": 2048,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        settings=(
            *SHORT,
            "model.threads=1",
            "prepare.max_rows=60",
            "prepare.max_eval_prompts=8",
            *(f"{stage}.max_steps=2" for stage in ("sft", "reward")),
            *(f"{stage}.per_device_train_batch_size=4" for stage in ("sft", "reward")),
            *(f"ppo.{name}batch_size=4" for name in ("", "mini_", "micro_")),
            "ppo.total_episodes=8",
            "ppo.response_length=8",
            "ppo.validation_prompts=4",
            "battery.prompts=2",
            "battery.pairs=8",
            "battery.best_of=[1,2]",
            "replay.max_badcases=4",
            "replay.best_of=2",
            "replay.pairs_per_exploit=4",
        ),
        pairs=60,
    ),
}


# Measuring --------------------------------------------------------------------------------------


def measured(name: str, function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `function` returns in a process of its own, with seconds and peak memory."""
    print(f"{name} ...", flush=True)
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        start = time.perf_counter()
        try:
            result = function()
        except Exception as error:
            if not isinstance(error, RondoError):
                traceback.print_exc()
            result = {"failed": f"{type(error).__name__}: {error}"[:300]}
        result["seconds"] = round(time.perf_counter() - start, 1)
        if torch.cuda.is_available():
            result["allocated_mib"] = torch.cuda.max_memory_allocated() >> 20
            result["reserved_mib"] = torch.cuda.max_memory_reserved() >> 20
        result["process_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        sender.send(result)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    sender.close()
    with NvidiaSmi() as smi:
        process.join()
    try:
        result: dict[str, Any] = receiver.recv()
    except EOFError:
        result = {"failed": f"exit code {process.exitcode}"}
    result |= {"name": name} | ({"nvidia_smi_mib": smi.peak} if smi.peak else {})
    print(json.dumps(result), flush=True)
    return result


class NvidiaSmi:
    """Peak MiB of the GPU's memory that nvidia-smi reports; 0 without it."""

    def __init__(self) -> None:
        self.peak, self.stop = 0, threading.Event()
        self.thread = threading.Thread(target=self.watch)

    def watch(self) -> None:
        if not shutil.which("nvidia-smi"):
            return
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self.stop.wait(0.5):
            used = subprocess.run(command, capture_output=True, text=True).stdout.split()
            self.peak = max([self.peak, *map(int, used)])

    def __enter__(self) -> "NvidiaSmi":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()


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


# 1. The stages ----------------------------------------------------------------------------------


def make_project(options: argparse.Namespace, size: Size) -> tuple[Params, list[str]]:
    """The project folder with assets and params.yaml; what was used as model and data."""
    PROJECT.mkdir(parents=True)
    (PROJECT / "slices").symlink_to(ROOT / "slices")
    os.chdir(ROOT)
    preset = "qwen2.5-0.5b-hh"
    named = {"assets.model": options.model, "assets.data": options.data}
    settings = [f"{key}={value}" for key, value in named.items() if value] + [*size.settings]
    if options.data:
        settings.append("assets.data_config=null")
    used: list[str] = []
    if options.size == "full" or options.model or options.data:
        params = resolve(preset, 1, settings)
        result = measured("assets", lambda: run_stage("assets", params))
        if "failed" not in result:
            return params, [f"model {params.assets.model}, data {params.assets.data}"]
        if options.model or options.data:
            sys.exit(f"bench/gpu.sh: MODEL or DATA cannot be read: {result['failed']}")
        used.append(f"NO HUB ({result['failed']})")
    used.append("RANDOM WEIGHTS in the shape of Qwen2.5-0.5B and MADE-UP conversations")
    model, data = WORK / "model", WORK / "data"
    write_random_model(model, size)
    write_conversations(data, size.pairs)
    fallback = [f"assets.model={model}", f"assets.data={data}", "assets.data_config=null"]
    params = resolve(preset, 1, [*size.settings, *fallback])
    if "failed" in (result := measured("assets", lambda: run_stage("assets", params))):
        sys.exit(f"bench/gpu.sh: {result['failed']}")
    return params, used


def run_stage(stage: str, params: Params) -> dict[str, Any]:
    os.chdir(PROJECT)
    values = params.model_dump(mode="json")
    Path("params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    if stage == "assets":
        import_module("stages.assets.inputs").main(params, ROUND)
    import_module(ENTRIES.get(stage, f"stages.{stage}.__main__")).main(params, ROUND)
    metrics = Path(f"rounds/{ROUND}/{stage}/metrics.json")
    return {"metrics": sorted(json.loads(metrics.read_text()))} if metrics.exists() else {}


def write_random_model(folder: Path, size: Size) -> None:
    torch.manual_seed(0)
    save(Qwen2ForCausalLM(Qwen2Config(**QWEN | size.shape)), tiny_tokenizer(), folder, "none")


def write_conversations(folder: Path, pairs: int) -> None:
    """Pairs in the form of Anthropic/hh-rlhf, from a few words; the better answer is kind."""
    draw = random.Random(0)
    things = ("bread", "rain", "music", "paper", "stone", "river", "light", "glass", "tea", "sand")
    kind, unkind = ("gladly", "carefully", "kindly", "happily"), ("never", "badly", "rudely", "no")

    def text(words: Sequence[str], length: int) -> str:
        return " ".join(draw.choice(words) for _ in range(length))

    def row(number: int) -> dict[str, str]:
        question = f"\n\nHuman: Number {number}: what of {text(things, 24)}?\n\nAssistant: "
        answers = (text((*things, *words), 32) for words in (kind, unkind))
        return dict(zip(("chosen", "rejected"), (question + a for a in answers), strict=True))

    rows = [row(number) for number in range(pairs)]
    cut = pairs // 5
    folder.mkdir(parents=True)
    write_jsonl(folder / "test.jsonl", rows[:cut])
    write_jsonl(folder / "train.jsonl", rows[cut:])


# 2. SFT, reward model and PPO against TRL's trainers ---------------------------------------------


def random_texts(rows: int, tokens: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, vocabulary, (rows, tokens), generator=generator).tolist()


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
        texts = [row[:8] for row in rows], [row[8:] for row in rows]
        train_on_completions(model, tokenizer, texts, arguments, times)
        return
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    masks = [[0] * 8 + [1] * (len(row) - 8) for row in rows]
    SFTTrainer(
        model=with_trls_attention(model),
        args=SFTConfig(**arguments, completion_only_loss=True),
        train_dataset=Dataset.from_dict({"input_ids": rows, "completion_mask": masks}),
        processing_class=tokenizer,
        peft_config=pefts_lora(params.sft.lora, "CAUSAL_LM", model),
        callbacks=[times],
    ).train()


def train_reward(
    by: str,
    folder: Path,
    rows: list[list[int]],
    tokenizer: Any,
    arguments: dict[str, Any],
    times: StepTimes,
    params: Params,
) -> None:
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    model = load_sequence_classifier(folder, params.model)
    model.score.float()
    half = len(rows) // 2
    if by == "rondo":
        from stages.reward.fit import fit

        times.note()
        pairs: Any = [
            {"chosen_ids": chosen, "rejected_ids": rejected, "length": len(chosen)}
            for chosen, rejected in zip(rows[:half], rows[half:], strict=True)
        ]
        fit(model, tokenizer, pairs, params, 0, TimedLogger(times), continues=False)
        return
    RewardTrainer(
        model=with_trls_attention(model),
        args=RewardConfig(
            **arguments, center_rewards_coefficient=params.reward.center_rewards_coefficient
        ),
        train_dataset=Dataset.from_dict({"chosen_ids": rows[:half], "rejected_ids": rows[half:]}),
        processing_class=tokenizer,
        peft_config=pefts_lora(params.reward.lora, "SEQ_CLS", model),
        callbacks=[times],
    ).train()


def with_trls_attention(model: Any) -> Any:
    """The model with what TRL's users have by default."""
    model.set_attn_implementation("sdpa")
    return model


def pefts_lora(lora: Any, task: str, model: Any) -> Any:
    """The stage's adapters with peft's own layers."""
    from peft import LoraConfig

    config = lora_config(lora, task, model)
    names = ("r", "lora_alpha", "lora_dropout", "target_modules", "task_type")
    return LoraConfig(**{name: getattr(config, name) for name in (*names, "layers_to_transform")})


def ppo_by_rondo(size: Size, params: Params) -> dict[str, Any]:
    """PPO updates on the run's models; tokens are those of prompts and responses."""
    from stages.lib.core.files import read_jsonl
    from stages.ppo.common.episodes import make_episodes

    os.chdir(PROJECT)
    setup_torch(params)
    rows: Any = read_jsonl(Path(f"rounds/{ROUND}/prepare/data/prompts_train.jsonl"), "")
    folders = [Path(f"rounds/{ROUND}/{stage}/model") for stage in ("sft", "reward")]
    roles, times, tokens = load_roles(params, *folders), StepTimes(), 0
    train_on, _ = make_episodes(rows, roles.tokenizer, params)
    trainer = PpoTrainer(roles, train_on, params.ppo, params.seed)
    times.note()
    rates = []
    for _ in range(size.steps):
        rollout, _ = trainer.step()
        times.note()
        tokens = sum(map(len, [*rollout.prompts, *rollout.responses]))
        rates.append(tokens / (times.at[-1] - times.at[-2]))
    return {"tokens_per_second": round(median(rates[1:])), "tokens_per_update": tokens}


def ppo_by_trl(size: Size, params: Params) -> dict[str, Any]:
    """TRL 1.12.0's, in its own environment; its responses all have the full length."""
    python = ROOT / ".rondo/trl/bin/python"
    if not python.exists():
        return {"skipped": "no .rondo/trl (bench/against_trl.sh makes it): trl==1.12.0 has PPO"}
    ppo = params.ppo
    command = [python, ROOT / "bench/trl_ppo.py", "autocast", f"--updates={size.steps}"]
    command += [f"--episodes={ppo.batch_size}", f"--epochs={ppo.num_ppo_epochs}"]
    command += [f"--response-length={ppo.response_length}"]
    done = subprocess.run(
        [*map(str, command)],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/bench"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:300]}
    seconds = median(json.loads(done.stdout.splitlines()[-1])["updates"])
    tokens = ppo.batch_size * ppo.response_length
    return {"response_tokens_per_second": round(tokens / seconds)}


# 3. vLLM against Rondo's sampler -----------------------------------------------------------------


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
    result = {"tokens_per_second": round(tokens / (times.at[-1] - times.at[-2])), "tokens": tokens}
    if engine and engine.backend and engine.reasons:
        result["merged"] = "; ".join(engine.reasons)
    return result


# The report ---------------------------------------------------------------------------------------


def table(results: dict[str, Any]) -> str:
    memory = ("allocated_mib", "reserved_mib", "nvidia_smi_mib", "process_mib")
    titles = ["measurement", "tokens per second", "seconds", *memory, "note"]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for row in results["measurements"]:
        speed = row.get("tokens_per_second", row.get("response_tokens_per_second", ""))
        note = row.get("failed") or row.get("skipped") or ""
        if "response_tokens_per_second" in row:
            note = "response tokens alone"
        cells = [row["name"], speed, row.get("seconds", ""), *(row.get(m, "") for m in memory)]
        lines.append(f"| {' | '.join(map(str, [*cells, note]))} |")
    return "\n".join([*(f"{key}: {results[key]}  " for key in ("machine", "used")), "", *lines, ""])


def machine(params: Params) -> str:
    name = "CPU"
    if torch.cuda.is_available():  # in a child: CUDA must not be used before the forks
        name = torch.cuda.get_device_name()
    dtype, attention = resolve_dtype(params.model.dtype), resolve_attention(params.model)
    return f"{name}, torch {torch.__version__}, {dtype}, attention {attention}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--model", help="folder or hub id")
    parser.add_argument("--data", help="folder or hub id of preference pairs")
    options = parser.parse_args()
    size, rows = SIZES[options.size], []
    params, used = make_project(options, size)
    described = measured("machine", lambda: {"machine": machine(params)})
    for stage in STAGES:
        rows.append(measured(stage, lambda stage=stage: run_stage(stage, params)))
    for stage in ("sft", "reward"):
        for by in ("rondo", "trl"):
            name = f"{stage}, {by}, {size.rows} x {size.tokens}"
            rows.append(measured(name, lambda s=stage, b=by: train(s, b, size, params)))
    rows.append(measured("ppo, rondo", lambda: ppo_by_rondo(size, params)))
    rows.append(measured("ppo, trl", lambda: ppo_by_trl(size, params)))
    for by in ("rondo", "vllm", "vllm, merged"):
        rows.append(measured(f"sampler, {by}", lambda by=by: sampler(by, size, params)))
    results = {"machine": described.get("machine"), "used": "; ".join(used), "measurements": rows}
    (WORK / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    (WORK / "results.md").write_text(table(results))
    print(table(results))
    sys.exit(any("failed" in row for row in rows))


if __name__ == "__main__":
    main()

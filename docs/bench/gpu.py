"""The measurements of gpu.sh: stages, trainers against TRL's, vLLM against Rondo's sampler.

Each measurement runs in a process of its own, so that its memory is free again afterwards. They are
forked from a server that only imports: a child of this process, which computes, has failed on a GPU
(docs/log.md, 2026-11-26).
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
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import yaml
from gpu_trainers import PROJECT, ROOT, ROUND, Size, ppo_by_rondo, ppo_by_trl, sampler, train
from transformers import Qwen2Config, Qwen2ForCausalLM

from flows.core.config import resolve
from stages.assets.base_model import save, tiny_tokenizer
from stages.lib.core.errors import RondoError
from stages.lib.core.files import write_jsonl
from stages.lib.core.params import Params
from stages.lib.lm.loading import (
    resolve_attention,
    resolve_dtype,
)

WORK = PROJECT.parent
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["gpu_trainers"])
STAGES = (
    "prepare",
    "sft",
    "annotate",
    "reward",
    "battery",
    "champion",
    "ppo",
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
            "prepare.max_eval_prompts=64",
            "sft.max_steps=20",
            "reward.max_steps=20",
            "ppo.total_episodes=512",
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
    """What `function` returns in a process of its own, with seconds and peak memory.

    function: of this module or of gpu_trainers.py, or a `partial` of one.
    """
    print(f"{name} ...", flush=True)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = FORK_SERVER.Process(target=run_and_send, args=(function, sender))
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


def run_and_send(function: Callable[[], dict[str, Any]], sender: Connection) -> None:
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


# The stages -------------------------------------------------------------------------------------


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
        result = measured("assets", partial(run_stage, "assets", params))
        if "failed" not in result:
            return params, [f"model {params.assets.model}, data {params.assets.data}"]
        if options.model or options.data:
            sys.exit(f"docs/bench/gpu.sh: MODEL or DATA cannot be read: {result['failed']}")
        used.append(f"NO HUB ({result['failed']})")
    used.append("RANDOM WEIGHTS in the shape of Qwen2.5-0.5B and MADE-UP conversations")
    model, data = WORK / "model", WORK / "data"
    write_random_model(model, size)
    write_conversations(data, size.pairs)
    fallback = [f"assets.model={model}", f"assets.data={data}", "assets.data_config=null"]
    params = resolve(preset, 1, [*size.settings, *fallback])
    if "failed" in (result := measured("assets", partial(run_stage, "assets", params))):
        sys.exit(f"docs/bench/gpu.sh: {result['failed']}")
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


def machine(params: Params) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    dtype, attention = resolve_dtype(params.model.dtype), resolve_attention(params.model)
    return {"machine": f"{name}, torch {torch.__version__}, {dtype}, attention {attention}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--model", help="folder or hub id")
    parser.add_argument("--data", help="folder or hub id of preference pairs")
    options = parser.parse_args()
    size, rows = SIZES[options.size], []
    params, used = make_project(options, size)
    described = measured("machine", partial(machine, params))
    for stage in STAGES:
        rows.append(measured(stage, partial(run_stage, stage, params)))
    for stage in ("sft", "reward"):
        for by in ("rondo", "trl"):
            name = f"{stage}, {by}, {size.rows} x {size.tokens}"
            rows.append(measured(name, partial(train, stage, by, size, params)))
    rows.append(measured("ppo, rondo", partial(ppo_by_rondo, size, params)))
    rows.append(measured("ppo, trl", partial(ppo_by_trl, size, params)))
    for by in ("rondo", "vllm", "vllm, merged"):
        rows.append(measured(f"sampler, {by}", partial(sampler, by, size, params)))
    results = {"machine": described.get("machine"), "used": "; ".join(used), "measurements": rows}
    (WORK / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    (WORK / "results.md").write_text(table(results))
    print(table(results))
    sys.exit(any("failed" in row for row in rows))


if __name__ == "__main__":
    main()

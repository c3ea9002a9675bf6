"""Measures the peak memory of SFT, the reward model's training and PPO, each point in a process of
its own.

    python bench/memory.py growth        PPO: response lengths by rollouts
    python bench/memory.py reward        training of the reward model, 64 and 256 tokens per text
    python bench/memory.py trainers      each trainer against TRL's, 32 texts of 256 tokens
    python bench/memory.py vocabulary    a small model with Qwen2.5's vocabulary
    python bench/memory.py time          PPO: CPU time per token, with and without attention

It needs assets/model (`python -m stages.assets`); `trainers` also needs the environment of TRL's
PPO, which bench/against_trl.sh makes. Each point is a line of JSON in .rondo/memory.jsonl and on
standard output; points that are there already are not measured again. The models are untrained:
texts are random tokens of exactly the given length, the score head is random, and EOS is never
sampled. Peaks are resident memory, with libraries and weights.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# No library that is imported here may be large: a child's ru_maxrss begins with its parent's.
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / ".rondo/memory.jsonl"
CHILD = ROOT / "bench/memory_point.py"


@dataclass(frozen=True)
class Point:
    """What one process measures.

    rows: texts per batch (a pair has two), episodes per rollout. tokens: per text; of PPO, per
    response. micro: episodes per micro-batch. attention: false replaces attention by its values,
    which takes no time. settings: with the pipeline's settings of glibc and oneDNN.
    """

    stage: str
    trainer: str = "rondo"
    rows: int = 32
    tokens: int = 256
    micro: int = 8
    gradient_checkpointing: bool = False
    model: str = "SmolLM2-135M"
    updates: int = 1
    threads: int = 2
    attention: bool = True
    settings: bool = True


def growth() -> Iterator[Point]:
    for tokens in (24, 128, 512):
        for rows in (8, 32, 128):
            yield Point("ppo", rows=rows, tokens=tokens)


def reward() -> Iterator[Point]:
    for recompute in (False, True):
        for tokens in (64, 256):
            yield Point("reward", tokens=tokens, gradient_checkpointing=recompute)


def trainers() -> Iterator[Point]:
    """TRL's without and with our settings, ours without and with gradient checkpointing."""
    for stage in ("sft", "reward", "ppo"):
        for settings in (False, True):
            yield Point(stage, "trl", micro=32, gradient_checkpointing=True, settings=settings)
        for recompute in (False, True):
            yield Point(stage, micro=32, gradient_checkpointing=recompute)


def vocabulary() -> Iterator[Point]:
    for model in ("vocabulary of 49,152", "vocabulary of 151,936"):
        for tokens in (128, 512):
            yield Point("ppo", rows=32, tokens=tokens, model=model)


def times() -> Iterator[Point]:
    for tokens in (24, 128, 512):
        for attention in (True, False):
            yield Point("ppo", rows=16, tokens=tokens, threads=1, updates=2, attention=attention)


TABLES: dict[str, Callable[[], Iterator[Point]]] = {
    "growth": growth,
    "reward": reward,
    "trainers": trainers,
    "vocabulary": vocabulary,
    "time": times,
}


def run(point: Point) -> dict[str, Any]:
    """The point's JSON, from a process of its own."""
    folder, command = ROOT, [sys.executable, str(CHILD), "measure", json.dumps(asdict(point))]
    environment = {"OMP_NUM_THREADS": str(point.threads), "PYTHONPATH": str(ROOT)}
    if (point.stage, point.trainer) == ("ppo", "trl"):
        folder = Path(output([sys.executable, str(CHILD), "project", json.dumps(asdict(point))]))
        command = [str(ROOT / ".rondo/trl/bin/python"), str(ROOT / "bench/trl_ppo.py"), "bf16-lora"]
        command += ["--episodes", str(point.rows), "--response-length", str(point.tokens)]
        command += ["--updates", "1", "--epochs", "1", "--gradient-checkpointing"]
    if point.settings:
        settings = "import json; from flows.execution.dvc_stages import SETTINGS; "
        command_line = [sys.executable, "-c", settings + "print(json.dumps(SETTINGS))"]
        environment |= json.loads(output(command_line))
    try:
        report = json.loads(output(command, folder, environment))
    except subprocess.CalledProcessError as error:
        report = {"failed": error.returncode}
    return {**asdict(point), **report}


def output(
    command: list[str], folder: Path = ROOT, environment: dict[str, str] | None = None
) -> str:
    """The last line on standard output of a command that runs in `folder`."""
    variables = {**os.environ, **(environment or {})}
    process = subprocess.run(
        command, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True, check=True
    )
    return process.stdout.splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=TABLES)
    options = parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.touch()
    measured = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    for point in TABLES[options.table]():
        if any(asdict(point).items() <= line.items() for line in measured):
            continue
        line = json.dumps(run(point))
        print(line, flush=True)
        with RESULTS.open("a") as stream:
            stream.write(line + "\n")


if __name__ == "__main__":
    main()

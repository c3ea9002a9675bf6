"""Time and memory of a run on this machine, before it starts.

FLOPs of a transformer with N weights, per token: 2N forward (Kaplan et al. 2020, section 2.1), 4N
backward, of which 2N go to the weights' gradients; LoRA trains next to none, so its step is 2N + 2N
= 4N (less where only upper layers have adapters, since the backward pass ends below them), and full
training's 6N. Generation reads all weights once a token and a batch, so it is slower than its FLOPs
say: `GENERATION`.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from flows.core.addresses import split_address
from flows.execution import fork_server
from stages.lib.core.params import Params
from stages.lib.core.params.judging import Annotator, JudgeName
from stages.lib.core.params.policy import Algorithm
from stages.lib.core.params.shared import InitFrom, LoraParams, TrainParams
from stages.lib.data.slices import read_slices
from stages.ppo.alternatives import NUM_DESCRIBED_SAMPLES

# Calibration: the share of the measured matrix-product rate that each kind of work reaches, from a
# measured run of the defaults.
TRAINING = {"sft": 0.24, "reward": 0.4}  # SFT's vocabulary head is not counted in its FLOPs
PPO_LEARNING, FORWARD, GENERATION = 0.75, 0.7, 0.28
STAGE_SECONDS = 4.0  # DVC, loading and saving of models; per stage
START_SECONDS = {
    "assets": 25.0,
    "gate_sft": 1.0,
    "annotate": 1.0,
    "gate_reward": 1.0,
    "gate_promote": 1.0,
}  # stages that do nothing else
ANSWER_SECONDS = 2.0  # of a language model as judge, guessed: it depends on the server
# texts scored of each pair in the battery, without its listed endings: its own two, five probes,
# mined phrases
TRIALS = 11
LAYERS = 30  # of the embedded model; the presets' have 24 to 32
BYTES_PER_WEIGHT = {"float32": 4, "bfloat16": 2}
# of a role whose weights are all trained: weights, frozen copy, gradient, float32 master, two
# moments of Adam
FULL_BYTES = 20
WORKSPACE_GB = 2.8  # interpreter, activations of a micro batch, logits
DISK_COPIES = 4  # model files a round: SFT, reward model, DVC's cache of both

# Weights, and rows of data (demonstrations, pairs, prompts), of what the params can name; others
# are looked at as the embedded ones.
WEIGHTS = {
    "tiny": 1e5,
    "embedded": 135e6,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 362e6,
    "Qwen/Qwen2.5-0.5B-Instruct": 494e6,
    "EleutherAI/pythia-410m": 405e6,
}
ROWS = {
    "tiny": (64, 64, 64),
    "embedded": (936, 1195, 483),
    "Anthropic/hh-rlhf": (42_000, 42_000, 42_000),
}


@dataclass(frozen=True)
class Machine:
    """rates: FLOP/s by dtype. auto: the dtype that the stages choose here. memory (of the GPU where
    there is one), disk: bytes.
    """

    device: str
    rates: dict[str, float]
    auto: str
    memory: float
    disk: float


@dataclass(frozen=True)
class Estimate:
    """Seconds of one round by stage, bytes of memory and disk at the most."""

    seconds: dict[str, float]
    memory: float
    disk: float


def measure() -> Machine:
    """Multiply matrices for a second."""
    probe = subprocess.run(
        [fork_server.python(), "-m", "flows.execution.matmul_speed"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(probe.stdout)
    free = found["memory"] or psutil.virtual_memory().available
    return Machine(
        found["device"], found["rates"], found["auto"], free, shutil.disk_usage(".").free
    )


def dtype_of(params: Params, machine: Machine) -> str:
    asked = params.model.dtype.value
    return machine.auto if asked == "auto" else asked


def weights_of(model: str) -> float:
    """Number of weights; of a local folder from the size of its safetensors (2 bytes each)."""
    files = list(Path(model).glob("*.safetensors"))
    return (
        sum(file.stat().st_size for file in files) / 2
        if files
        else WEIGHTS.get(model, WEIGHTS["embedded"])
    )


def estimate(params: Params, machine: Machine, continues: bool = False) -> Estimate:
    """Seconds of one round, and memory, from the params' token counts and the machine's rate;
    `continues`: a round after the first.
    """
    weights, dtype = weights_of(params.assets.model), dtype_of(params, machine)
    rate = machine.rates[dtype]
    demonstrations, pairs, prompts = (
        min(rows, params.prepare.max_rows or rows)
        for rows in ROWS.get(params.assets.data, ROWS["embedded"])
    )
    prompt = (
        1.5 * params.prepare.prompt_words
        if params.assets.data == "embedded"
        else params.prepare.max_prompt_tokens / 2
    )
    length = prompt + params.ppo.response_length
    ppo = params.ppo
    updates = _updates(params, pairs, prompts)
    checkpoints, sampled = updates // ppo.save_updates, params.evaluate.samples_per_prompt
    evaluated = params.prepare.max_eval_prompts * (
        4 * sampled + checkpoints + 1
    )  # base, SFT, policy, champion; the policy once more
    compared = params.prepare.max_eval_prompts * (3 * sampled + checkpoints)
    slices = sum(len(rows) for rows in read_slices().values())
    answered = params.battery.prompts * max(params.battery.best_of)
    tried = (
        params.battery.pairs * (TRIALS + len(params.battery.endings)) / 2
    )  # human texts, some cut, are half as long
    work = {
        "prepare": 0.0,
        "sft": _training(params.sft, demonstrations, 1, weights, rate * TRAINING["sft"], continues),
        "reward": params.reward.ensemble
        * _training(params.reward, pairs, 2, weights, rate * TRAINING["reward"], continues),
        "battery": weights * answered * length * (2 / GENERATION + 2 / FORWARD) / rate
        + weights * tried * length * 2 / FORWARD / rate,
        "ppo": _policy_flops(params, updates, prompts, length) * weights / rate,
        "evaluate": evaluated * length * weights * (2 / GENERATION + 3 * 2 / FORWARD) / rate
        + _asking(params, compared),
        "capability": 2
        * slices
        * (prompt + params.capability.response_length)
        * weights
        * 2
        / GENERATION
        / rate,  # tasks: not known
        "replay": params.replay.max_badcases
        * (params.replay.best_of + 8)
        * length
        * weights
        * (2 / GENERATION + 2 / FORWARD)
        / rate
        + _asking(
            params,
            params.replay.max_badcases
            * (params.replay.best_of * (params.replay.best_of - 1) // 2 + 3),
        ),
    }
    if params.annotate.annotator is Annotator.judge:
        work["annotate"] = _annotating(params, length, weights, rate)
    bytes_per_weight = BYTES_PER_WEIGHT[dtype]
    return Estimate(
        seconds={stage: STAGE_SECONDS + seconds for stage, seconds in work.items()},
        memory=weights
        * sum(
            FULL_BYTES if lora.r == 0 else 1.5 * bytes_per_weight
            for lora in (ppo.lora, ppo.critic_lora)
        )
        + WORKSPACE_GB * 1e9,
        disk=len(params.rounds) * DISK_COPIES * weights * bytes_per_weight + weights * 4,
    )


def _training(
    section: TrainParams, rows: int, texts_a_row: int, weights: float, rate: float, continues: bool
) -> float:
    """Seconds of one training stage; rows fill about a third of max_length."""
    epochs = section.num_train_epochs
    if continues and section.init_from is InitFrom.previous:
        epochs = section.continue_epochs or epochs
    batch = section.per_device_train_batch_size * section.gradient_accumulation_steps * texts_a_row
    texts = min(rows * texts_a_row * epochs, batch * (section.max_steps or sys.maxsize))
    return (
        texts
        * section.max_length
        / 3
        * weights
        * (_lora_flops(section.lora) if section.lora.r else 6)
        / rate
    )


def _updates(params: Params, pairs: int, prompts: int) -> int:
    """Of the policy: rollouts, or optimiser steps on texts that are there."""
    ppo, algorithm = params.ppo, params.algorithm
    if algorithm is Algorithm.dpo:
        updates = pairs * params.dpo.num_train_epochs / params.dpo.per_device_train_batch_size
    elif algorithm is Algorithm.best_of_n:
        updates = (
            prompts
            * params.best_of_n.num_train_epochs
            / params.best_of_n.per_device_train_batch_size
        )
    else:
        updates = ppo.total_episodes // ppo.batch_size
    return min(max(int(updates), 1), ppo.max_steps or sys.maxsize)


def _policy_flops(params: Params, updates: int, prompts: int, length: float) -> float:
    """For each weight; at the rate of a matrix product."""
    ppo, algorithm = params.ppo, params.algorithm
    # a sample is read twice: by reference and reward model, or by policy and reference
    sampled = 2 / GENERATION + 2 * 2 / FORWARD
    validated = (updates // ppo.validation_updates + 1) * ppo.validation_prompts * length * sampled
    if algorithm is Algorithm.dpo:  # chosen and rejected, read by the reference too
        texts = 2 * updates * params.dpo.per_device_train_batch_size
        learnt = texts * length * (_lora_flops(ppo.lora) / TRAINING["sft"] + 2 / FORWARD)
    elif algorithm is Algorithm.best_of_n:
        texts = updates * params.best_of_n.per_device_train_batch_size
        learnt = length * (
            prompts * params.best_of_n.n * sampled + texts * _lora_flops(ppo.lora) / TRAINING["sft"]
        )
    # the adapted layers of policy and critic learn from a rollout num_ppo_epochs times; of TRL's,
    # the policy's and those below
    else:
        own = algorithm is Algorithm.ppo
        learning = (
            _adapted_flops(ppo.lora) + _adapted_flops(ppo.critic_lora)
            if own
            else _lora_flops(ppo.lora)
        )
        read_more = (
            0 if own else 3 * 2 / FORWARD
        )  # by TRL's policy and reference, and by the policy for the KL
        learnt = (
            updates
            * ppo.batch_size
            * length
            * (sampled + read_more + ppo.num_ppo_epochs * learning / PPO_LEARNING)
        )
    drawn = (
        0
        if algorithm is Algorithm.ppo
        else 2 * min(NUM_DESCRIBED_SAMPLES, prompts) * length * sampled
    )
    return learnt + validated + drawn


def _asking(params: Params, compared: int) -> float:
    """Seconds that the language models among evaluate.judges take for comparisons, each in both
    orders.
    """
    return sum(
        2 * compared * ANSWER_SECONDS / endpoint.concurrency
        for _, endpoint in params.language_models().values()
    )


def _annotating(params: Params, length: float, weights: float, rate: float) -> float:
    """Seconds of sampling, and of a language model's answers to both orders of every two samples;
    the lexicon takes none.
    """
    asked = params.annotate
    seconds = asked.prompts * asked.samples * length * weights * 2 / GENERATION / rate
    if asked.judge is JudgeName.endpoint:
        questions = asked.prompts * asked.samples * (asked.samples - 1) + 2 * asked.agreement_pairs
        seconds += questions * ANSWER_SECONDS / asked.endpoint.concurrency
    return seconds


def _adapted_flops(lora: LoraParams) -> float:
    """For each weight and token: 2 forward and 2 backward, in the layers that have adapters or lie
    above one.
    """
    return 4 * min((lora.top_layers or LAYERS) / LAYERS, 1.0)


def _lora_flops(lora: LoraParams) -> float:
    """The same, with the forward pass through the layers below."""
    return 2 + _adapted_flops(lora) / 2


def report(params: Params, addresses: list[str], waiting: set[str]) -> list[str]:
    """Lines to print: what this machine does, how long what is `waiting` will take, what it needs."""
    machine = measure()
    guess, first = estimate(params, machine), next(iter(params.rounds))
    later = estimate(params, machine, continues=True)
    todo = [split_address(address) for address in addresses if address in waiting]
    seconds = [
        (guess if round_ == first else later).seconds.get(
            stage, START_SECONDS.get(stage, STAGE_SECONDS)
        )
        for stage, round_ in todo
    ]
    rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in machine.rates.items())
    lines = [
        f"machine: {machine.device}, {psutil.cpu_count()} cores; GFLOP/s: {rates}; trains in {dtype_of(params, machine)}",
        f"to do: {len(seconds)} of {len(addresses)} stages of {len(params.rounds)} round(s); the others are up to date",
        f"estimate: {sum(seconds) / 60:.0f} min; {guess.memory / 1e9:.1f} GB of memory, {guess.disk / 1e9:.1f} GB of disk",
        "minutes a round: "
        + ", ".join(f"{stage} {time / 60:.1f}" for stage, time in guess.seconds.items()),
    ]
    for name, needed, free in (
        ("memory", guess.memory, machine.memory),
        ("disk", guess.disk, machine.disk),
    ):
        if needed > free:
            lines.append(
                f"warning: {needed / 1e9:.1f} GB of {name} wanted, {free / 1e9:.1f} GB free"
            )
    return lines

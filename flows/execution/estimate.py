"""Estimates the time of a run on this machine, before it starts, and reports it with its memory
(memory.py) and disk.

FLOPs of a transformer with N weights, per token: 2N forward (Kaplan et al. 2020, section 2.1) and
4N backward, of which 2N are the weights' gradients. LoRA has nearly no weight gradients, so its
step takes 2N + 2N = 4N (less if only the upper layers have adapters, since the backward pass ends
below them); full training takes 6N. Generation reads all weights once per token and batch, so it is
slower than its FLOPs suggest: `GENERATION`.
"""

import math
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
from rich.filesize import decimal

from flows.core.addresses import split_address
from flows.execution import disk, memory, memory_check, text_lengths
from flows.execution.machine import Machine, dtype_of
from flows.execution.memory import BYTES_PER_NUMBER, MemoryModel
from flows.execution.model_shape import KNOWN, ModelShape, read_shape
from flows.execution.text_lengths import TextLengths
from stages.lib.core.errors import RondoError
from stages.lib.core.params import Params
from stages.lib.core.params.data import START
from stages.lib.core.params.judging import Annotator, EndpointParams
from stages.lib.core.params.policy import Algorithm, Engine, PolicySelection, PpoParams
from stages.lib.core.params.shared import InitFrom, LoraParams, TrainParams
from stages.ppo.alternatives import NUM_DESCRIBED_SAMPLES
from stages.ppo.common import SCALING_SAMPLES

# Calibration: the share of the measured matrix-product rate that each kind of work reaches, from a
# measured run of the defaults.
TRAINING = {"sft": 0.27, "reward": 0.45}  # SFT's vocabulary head is not counted in its FLOPs
PPO_LEARNING, FORWARD, GENERATION = 0.75, 0.7, 0.28
STAGE_SECONDS = 4.0  # per stage: DVC, loading and saving of models
START_SECONDS = {  # stages that compute nothing worth estimating
    "assets": 25.0,
    "gate_sft": 1.0,
    "annotate": 1.0,
    "gate_reward": 1.0,
    "gate_promote": 1.0,
}
ANSWER_SECONDS = 2.0  # per answer of a language-model judge; a guess, it depends on the server
# Texts that the battery scores per pair, without the endings that params.yaml lists: the pair's own
# two, five probes, mined phrases.
TEXTS_PER_PAIR = 11
# Rows of data (demonstrations, pairs, prompts) of the names that params.yaml accepts; anything else
# is estimated as `embedded`.
ROWS = {
    "tiny": (64, 64, 64),
    "embedded": (936, 1195, 483),
    "Anthropic/hh-rlhf": (42_000, 42_000, 42_000),
}
EXPLOITS = 4  # that a round finds, on the default task 4 to 6


def shape_or_embedded(params: Params) -> ModelShape:
    """The shape of the base model; that of the embedded one if it is unknown."""
    return read_shape(params.assets.model) or KNOWN["embedded"]


def without_revision(named: str) -> str:
    """The name of a data set of the hub without its `@commit`."""
    return named.partition("@")[0]


def stage_seconds(
    params: Params, machine: Machine, continues: bool = False, shape: ModelShape | None = None
) -> dict[str, float]:
    """Seconds per stage of one round, from the token counts of the params and the rate of the
    machine.

    Args:
        continues: whether the round is a later one, which may continue training earlier models.
        shape: of the base model; None: read it.
    """
    shape = shape or shape_or_embedded(params)
    weights, rate = shape.weights, machine.rates[dtype_of(params, machine)]
    ppo, replay = params.ppo, params.replay
    demonstrations, pairs, prompts = _rows(params)
    if continues:
        pairs += _replayed_pairs(params, pairs)
    prompt = _prompt_tokens(params)
    length = prompt + ppo.response_length
    updates = _updates(params, pairs, prompts)
    checkpoints, sampled = updates // ppo.save_updates, params.evaluate.samples_per_prompt
    # `sampled` responses per prompt of base, SFT and policy, and in later rounds of champion and
    # policy at equal KL; one of each checkpoint, and of the policy again
    models, comparisons = (5, 4) if continues else (3, 2)
    evaluated = params.prepare.max_eval_prompts * (models * sampled + checkpoints + 1)
    compared = params.prepare.max_eval_prompts * (comparisons * sampled + checkpoints)
    best_of_responses = params.battery.prompts * max(params.battery.best_of)
    # human texts, some of them cut, are half as long as a prompt with a full response
    texts_per_pair = TEXTS_PER_PAIR + len(params.battery.endings) + 2 * len(params.battery.edits)
    probe_texts = params.battery.pairs * texts_per_pair / 2
    # the policy's responses to a prompt: fresh ones, and those of PPO's updates
    episodes = updates * ppo.batch_size / max(prompts, 1)
    replay_comparisons = replay.max_badcases * (math.comb(replay.best_of, 2) + 3)
    # a third of two responses are alike in length (docs/log.md)
    replay_comparisons += replay.policy_pairs * math.comb(replay.best_of + round(episodes), 2) // 3
    sample_and_score = 2 / GENERATION + 2 / FORWARD  # FLOPs per weight and token
    work = {
        "prepare": 0.0,
        "sft": _training_seconds(
            params.sft, demonstrations, 1, shape, rate * TRAINING["sft"], continues
        ),
        "reward": params.reward.ensemble
        * _training_seconds(params.reward, pairs, 2, shape, rate * TRAINING["reward"], continues),
        "battery": weights * best_of_responses * length * sample_and_score / rate
        + weights * probe_texts * length * 2 / FORWARD / rate,
        "ppo": _policy_flops(params, updates, prompts, length, shape.layers) * weights / rate,
        "evaluate": evaluated * length * weights * (2 / GENERATION + 3 * 2 / FORWARD) / rate
        + _judge_seconds(params, compared),
        # prompts of slices only: the size of other capability tasks is not known here
        "capability": 2
        * text_lengths.slice_prompts()
        * (prompt + params.capability.response_length)
        * weights
        * 2
        / GENERATION
        / rate,
        "replay": (
            replay.max_badcases * (replay.best_of + 8) * sample_and_score
            + replay.policy_pairs * replay.best_of * 2 / GENERATION
        )
        * length
        * weights
        / rate
        + _judge_seconds(params, replay_comparisons),
    }
    for stage, seconds in _primary_judge_seconds(params, updates).items():
        work[stage] += seconds
    if params.annotate.annotator is Annotator.judge or params.annotate.revisions:
        work["annotate"] = _annotation_seconds(params, length, weights, rate)
    return {stage: STAGE_SECONDS + seconds for stage, seconds in work.items()}


def _rows(params: Params) -> tuple[int, int, int]:
    """Demonstrations, pairs and prompts."""
    rows = ROWS.get(without_revision(params.assets.data), ROWS["embedded"])
    demonstrations, pairs, prompts = (min(n, params.prepare.max_rows or n) for n in rows)
    return demonstrations, pairs, prompts


def _replayed_pairs(params: Params, pairs: int) -> int:
    """Pairs that the second round gets from the replay of the first."""
    replay, share = params.replay, params.replay.max_share
    made = replay.weight * (replay.max_badcases + EXPLOITS * replay.pairs_per_exploit)
    return made if share == 1 else min(made, int(share * pairs / (1 - share)))


def disk_bytes(params: Params, waiting: set[str]) -> float:
    """Bytes of disk that the models of the stages of `waiting` take."""
    (_, pairs, prompts), shape = _rows(params), shape_or_embedded(params)
    by_stage = disk.model_bytes(
        params,
        shape.weights,
        BYTES_PER_NUMBER.get(params.model.dtype.value, 2),
        shape.layers,
        _updates(params, pairs, prompts) // params.ppo.save_updates,
    )
    return sum(by_stage.get(split_address(address)[0], 0.0) for address in waiting)


def check_disk(needed: float, waiting: set[str]) -> None:
    """
    Raises:
        RondoError: the models of the stages of `waiting` take more disk than is free.
    """
    free = disk.free_bytes()
    if needed > free:
        raise RondoError(
            f"the models of the {len(waiting)} stages to run take about {decimal(int(needed))} of "
            f"disk, and {decimal(free)} are free in {Path.cwd()}: `rondo gc --cache` removes what "
            "nothing refers to; fewer checkpoints (ppo.save_updates) and uploads (mlflow.upload) "
            "take less (docs/running.md, Disk)"
        )


def stage_memory(
    params: Params, machine: Machine, shape: ModelShape, lengths: TextLengths | None = None
) -> dict[str, float]:
    """Peak bytes of each stage on this machine; lengths: None: those that the params admit."""
    attention = params.model.attn_implementation
    model = MemoryModel(
        shape,
        BYTES_PER_NUMBER[dtype_of(params, machine)],
        machine.device,
        machine.attention if attention == "auto" else attention,
        machine.limits,
    )
    return memory.stage_memory(params, lengths or text_lengths.admitted(params), model)


def check_memory(params: Params, waiting: set[str], machine: Machine) -> Mapping[str, float] | None:
    """Bytes by stage that runs on this machine; None if the shape of the base model is unknown.

    Raises:
        RondoError: a stage of `waiting` needs more memory than this machine has.
    """
    if (shape := read_shape(params.assets.model)) is None:
        return None
    prepared = [name for name in params.rounds if f"prepare@{name}" not in waiting]
    counts = text_lengths.count(prepared[0]) if prepared else None

    def measure(changed: Params) -> Mapping[str, float]:
        lengths = text_lengths.measured(changed, counts) if counts else None
        sizes = stage_memory(changed, machine, shape, lengths)
        return {stage: size for stage, size in sizes.items() if not params.cluster(stage)}

    stages = {split_address(address)[0] for address in waiting}
    return memory_check.check(params, stages, machine.total, measure)


def _prompt_tokens(params: Params) -> float:
    """The mean length of a prompt; 1.5 tokens per word, and half of the limit for other data."""
    if params.assets.data == "embedded":
        return 1.5 * params.prepare.prompt_words
    return params.prepare.max_prompt_tokens / 2


def _training_seconds(
    section: TrainParams,
    rows: int,
    texts_per_row: int,
    shape: ModelShape,
    rate: float,
    continues: bool,
) -> float:
    """Seconds of one training stage; texts are taken to fill a quarter of max_length."""
    epochs = section.num_train_epochs
    if continues and section.init_from is InitFrom.previous:
        epochs = section.continue_epochs or epochs
    batch = section.per_device_train_batch_size * section.gradient_accumulation_steps
    batch_texts = batch * texts_per_row
    texts = min(rows * texts_per_row * epochs, batch_texts * (section.max_steps or sys.maxsize))
    flops = _lora_flops(section.lora, shape.layers) if section.lora.r else 6
    return texts * section.max_length / 4 * shape.weights * flops / rate


def _updates(params: Params, pairs: int, prompts: int) -> int:
    """Updates of the policy: rollouts, or optimiser steps of DPO and best-of-n."""
    ppo, algorithm = params.ppo, params.algorithm
    updates: float
    if algorithm is Algorithm.dpo:
        updates = pairs * params.dpo.num_train_epochs / params.dpo.per_device_train_batch_size
    elif algorithm is Algorithm.best_of_n:
        config = params.best_of_n
        updates = prompts * config.num_train_epochs / config.per_device_train_batch_size
    else:
        updates = ppo.total_episodes // ppo.batch_size
    return min(max(int(updates), 1), ppo.max_steps or sys.maxsize)


def _policy_flops(params: Params, updates: int, prompts: int, length: float, layers: int) -> float:
    """FLOPs of the policy's training per weight, divided by the share of the rate it reaches."""
    ppo, algorithm = params.ppo, params.algorithm
    # a sample is read twice: by reference and reward model, or by policy and reference
    sampled = 2 / GENERATION + 2 * 2 / FORWARD
    samples = SCALING_SAMPLES + _validations(ppo, updates) + _scaled(ppo) * (SCALING_SAMPLES - 1)
    validation = samples * ppo.validation_prompts * length * sampled
    if ppo.engine is not Engine.local:  # the engine's own time is not known
        training: float = 0
    elif algorithm is Algorithm.dpo:  # chosen and rejected, which the reference reads too
        texts = 2 * updates * params.dpo.per_device_train_batch_size
        training = texts * length * (_lora_flops(ppo.lora, layers) / TRAINING["sft"] + 2 / FORWARD)
    elif algorithm is Algorithm.best_of_n:
        texts = updates * params.best_of_n.per_device_train_batch_size
        learning = texts * _lora_flops(ppo.lora, layers) / TRAINING["sft"]
        training = length * (prompts * params.best_of_n.n * sampled + learning)
    else:
        # PPO trains only the adapted layers, num_ppo_epochs times per rollout. TRL's trainers also
        # run the layers below them, and read each sample three times more: with policy and
        # reference, and with the policy for the KL.
        if algorithm is Algorithm.ppo:
            learning = _adapted_flops(ppo.lora, layers) + _adapted_flops(ppo.critic_lora, layers)
            more_reading: float = 0
        else:
            learning = _lora_flops(ppo.lora, layers)
            more_reading = 3 * 2 / FORWARD
        epochs = ppo.num_ppo_epochs * learning / PPO_LEARNING
        training = updates * ppo.batch_size * length * (sampled + more_reading + epochs)
    # The alternatives sample once more to describe their policy; PPO describes its rollouts.
    description: float = 0
    if algorithm is not Algorithm.ppo or ppo.engine is not Engine.local:
        description = 2 * min(NUM_DESCRIBED_SAMPLES, prompts) * length * sampled
    return training + validation + description


def _validations(ppo: PpoParams, updates: int) -> int:
    """Validated policies after SFT."""
    return updates // ppo.validation_updates + _scaled(ppo)


def _scaled(ppo: PpoParams) -> int:
    """Validated policies that are scaled: one or two, in most runs (docs/ppo.md)."""
    return 2 if ppo.policy_selection is PolicySelection.target_kl else 0


def _judge_seconds(params: Params, compared: int) -> float:
    """Seconds that the language models of evaluate.judges take to compare, in both orders."""
    endpoints = params.language_models().values()
    return sum(_answer_seconds(endpoint, 2 * compared) for _, endpoint in endpoints)


def _primary_judge_seconds(params: Params, updates: int) -> dict[str, float]:
    """Seconds by stage that the primary judge takes to compare, if it is a language model."""
    primary, ppo = params.evaluate.judges[0], params.ppo
    if primary not in params.language_models():
        return {}
    _, endpoint = params.language_models()[primary]
    compared = {
        "sft": params.prepare.max_eval_prompts * params.sft.samples_per_prompt,
        "battery": params.battery.pairs + params.battery.prompts * len(params.battery.best_of),
        "ppo": _validations(ppo, updates) * ppo.validation_prompts,
    }
    return {stage: _answer_seconds(endpoint, 2 * number) for stage, number in compared.items()}


def _answer_seconds(endpoint: EndpointParams, answers: int) -> float:
    return answers * ANSWER_SECONDS / endpoint.concurrency


def _annotation_seconds(params: Params, length: float, weights: float, rate: float) -> float:
    """Seconds to sample; to compare every two samples in both orders with a language model, and to
    criticise and revise.

    The lexicon takes no time worth estimating.
    """
    config = params.annotate
    labelled = config.prompts if config.annotator is Annotator.judge else 0
    samples, answers = labelled * config.samples + config.revisions, 2 * config.revisions
    if config.asks_language_model:
        answers += labelled * config.samples * (config.samples - 1) + 2 * config.agreement_pairs
    sampling = samples * length * weights * 2 / GENERATION / rate
    return sampling + _answer_seconds(config.endpoint, answers)


def _adapted_flops(lora: LoraParams, layers: int) -> float:
    """FLOPs of a training step per weight and token, from the lowest adapted layer upwards.

    2 forward and 2 backward, times the share of these layers.
    """
    return 4 * min((lora.top_layers or layers) / layers, 1.0)


def _lora_flops(lora: LoraParams, layers: int) -> float:
    """FLOPs of a training step per weight and token, with the forward pass of all layers."""
    return 2 + _adapted_flops(lora, layers) / 2


def report(
    params: Params,
    addresses: list[str],
    waiting: set[str],
    disk_needed: float,
    machine: Machine | None,
    sizes: Mapping[str, float] | None,
) -> list[str]:
    """Lines to print: the speed of this machine, and time, memory and disk of the `waiting` stages.

    machine: None if no stage waits. sizes: bytes of memory by stage; None if the shape of
    the base model is unknown.
    """
    if not waiting or machine is None:
        return [f"to do: nothing; all {len(addresses)} stages are up to date"]
    starts = {name for name, entry in params.rounds.items() if entry.previous == START}
    shape = shape_or_embedded(params)
    first, later = (stage_seconds(params, machine, continues, shape) for continues in (False, True))
    todo = [split_address(address) for address in addresses if address in waiting]
    seconds = [
        (first if round_ in starts else later).get(stage, START_SECONDS.get(stage, STAGE_SECONDS))
        for stage, round_ in todo
    ]
    rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in machine.rates.items())
    minutes = ", ".join(f"{stage} {time / 60:.1f}" for stage, time in first.items())
    needed = {stage: sizes[stage] for stage, _ in todo if stage in sizes} if sizes else {}
    lines = [
        f"machine: {machine.device}, {psutil.cpu_count()} cores; GFLOP/s: {rates}; "
        f"trains in {dtype_of(params, machine)}",
        f"to do: {len(seconds)} of {len(addresses)} stages of {len(params.rounds)} round(s); "
        "the others are up to date",
        f"estimate: {sum(seconds) / 60:.0f} min; {max(needed.values(), default=0) / 1e9:.1f} GB of "
        f"memory, {disk_needed / 1e9:.1f} GB of disk",
        f"minutes per round: {minutes}",
    ]
    if needed:
        by_stage = ", ".join(f"{stage} {size / 1e9:.1f}" for stage, size in needed.items())
        lines.append(f"GB of memory: {by_stage}")
    if params.ppo.engine is not Engine.local and "ppo" in dict(todo):
        engine = params.ppo.engine.value
        lines.append(f"ppo: minutes and memory are this machine's, without those of {engine}")
    if there := dict.fromkeys(stage for stage, _ in todo if params.cluster(stage)):
        lines.append(f"{', '.join(there)}: on the Ray cluster; minutes are those of this machine")
    return lines + memory_check.warnings(params, needed, sizes is not None, machine.memory)

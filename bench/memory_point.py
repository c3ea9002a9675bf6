"""Measures one point of bench/memory.py in this process, and prints its JSON.

Libraries are imported by the functions that need them, so that a point has only those of its stage.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from typing import Any

import psutil
from memory import ROOT, Point

from stages.lib.core.ram import peak_bytes

NEVER_SAMPLED = "<jupyter_start>"  # a token of SmolLM2 that does not occur in ordinary text
WORDS = ("the", "a", "in", "on", "at", "it", "is", "was")  # of the prompts of TRL's PPO
PROMPT_TOKENS = len(WORDS)


class Peaks:
    """Peak MiB and CPU seconds by phase."""

    def __init__(self) -> None:
        self.mib = {"load": peak_bytes() >> 20}
        self.seconds: dict[str, float] = {}
        self.start = psutil.Process().memory_info().rss >> 20
        self._reset()

    def _reset(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        self.since = time.process_time()

    def end(self, phase: str) -> None:
        self.mib[phase] = max(self.mib.get(phase, 0), peak_bytes() >> 20)
        self.seconds[phase] = round(time.process_time() - self.since, 2)  # of the last update
        self._reset()

    def after(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which ends a phase."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.end(phase)
            return result

        return wrapper


def params_of(point: Point) -> Any:
    import yaml

    from stages.lib.core.params import check_params

    values = yaml.safe_load((ROOT / "params.yaml").read_text())
    values["model"]["threads"] = point.threads
    for section, rows in (("sft", point.rows), ("reward", point.rows // 2)):
        values[section] |= {
            "per_device_train_batch_size": rows,
            "max_steps": point.updates,
            "max_length": max(point.tokens, 8),
            "gradient_checkpointing": point.gradient_checkpointing,
        }
    values["ppo"] |= {
        "batch_size": point.rows,
        "mini_batch_size": point.rows,
        "micro_batch_size": min(point.micro, point.rows),
        "num_ppo_epochs": 1,
        "response_length": point.tokens,
        "gradient_checkpointing": point.gradient_checkpointing,
    }
    return check_params(values, "bench/memory.py")


def folders(point: Point) -> tuple[Path, Path]:
    """Folders of a causal language model, and of a reward model with a random head; made once."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config

    embedded = ROOT / "assets/model"
    work = ROOT / ".rondo/memory" / point.model.replace(" ", "_").replace(",", "")
    lm, scorer = work / "lm", work / "reward"
    if scorer.exists():
        return lm, scorer
    torch.manual_seed(0)
    shutil.copytree(embedded, lm)
    if point.model != "SmolLM2-135M":
        config = Qwen2Config(
            vocab_size=int(point.model.split()[-1].replace(",", "")),
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            pad_token_id=0,
            eos_token_id=2,
        )
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(lm)
    model = AutoModelForSequenceClassification.from_pretrained(lm, num_labels=1)
    model.config.mean, model.config.std = 0.0, 1.0
    shutil.copytree(lm, work / "new", ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(work / "new")
    (work / "new").rename(scorer)
    return lm, scorer


def project_folder(point: Point) -> Path:
    """A project folder whose round r0 has these models and prompts, for bench/trl_ppo.py."""
    import yaml
    from transformers import AutoTokenizer

    lm, scorer = folders(point)
    tokenizer, folder = AutoTokenizer.from_pretrained(lm), lm.parent / "project"
    shutil.rmtree(folder, ignore_errors=True)
    for name, model in (("sft", lm), ("reward", scorer)):
        (folder / "rounds/r0" / name).mkdir(parents=True)
        (folder / "rounds/r0" / name / "model").symlink_to(model)
    prompts = [" ".join(words) for words in permutations(WORDS)][: point.rows + 1]
    lengths = {len(tokenizer(prompt, add_special_tokens=False).input_ids) for prompt in prompts}
    assert lengths == {PROMPT_TOKENS}
    (folder / "rounds/r0/prepare/data").mkdir(parents=True)
    lines = [json.dumps({"id": str(n), "prompt": p}) for n, p in enumerate(prompts)]
    path = folder / "rounds/r0/prepare/data/prompts_train.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    values = params_of(point).model_dump(mode="json")
    values["ppo"]["validation_prompts"] = 1
    (folder / "params.yaml").write_text(yaml.safe_dump(values))
    return folder


def texts_of(point: Point, tokens: int) -> list[list[int]]:
    from random_texts import random_texts

    rows: list[list[int]] = random_texts(point.rows, tokens, 40_000)
    return rows


@contextmanager
def no_attention() -> Iterator[None]:
    """Within this context, attention returns the value of each token itself, and decoding does not
    add keys and values to the cache: transformers copies the whole cache for each token.
    """
    from transformers import AttentionInterface
    from transformers.cache_utils import DynamicLayer

    def values(_: Any, query: Any, __: Any, value: Any, *___: Any, **____: Any) -> Any:
        length, groups = query.shape[2], query.shape[1] // value.shape[1]
        own = value[:, :, -length:].repeat_interleave(groups, 1)
        return own.transpose(1, 2), None

    def update(layer: Any, keys: Any, values: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        if not layer.is_initialized:
            return append(layer, keys, values)
        return keys, values

    original, append = AttentionInterface._global_mapping["grouped"], DynamicLayer.update
    AttentionInterface.register("grouped", values)
    DynamicLayer.update = update
    try:
        yield
    finally:
        AttentionInterface.register("grouped", original)
        DynamicLayer.update = append


def measure_ppo(point: Point, params: Any) -> Peaks:
    from stages.lib.lm.packing import unwrap_peft
    from stages.ppo.trainer.roles import load_roles
    from stages.ppo.trainer.update import PpoTrainer

    lm, scorer = folders(point)
    roles = load_roles(params, lm, scorer)
    roles.tokenizer.eos_token = NEVER_SAMPLED
    unwrap_peft(roles.policy).generation_config.eos_token_id = None
    prompts = [
        ({"id": str(number), "prompt": ""}, tokens)
        for number, tokens in enumerate(texts_of(point, PROMPT_TOKENS))
    ]
    trainer = PpoTrainer(roles, prompts, params.ppo, params.seed)  # type: ignore[arg-type]
    peaks = Peaks()
    for phase, owner, name in (
        ("generate", roles, "sample"),
        ("score", trainer, "rollout"),
        ("learn", trainer, "optimize"),
    ):
        setattr(owner, name, peaks.after(phase, getattr(owner, name)))
    for _ in range(point.updates):
        rollout, _ = trainer.step()
        assert set(map(len, rollout.responses)) == {point.tokens}
        del rollout  # as stages/ppo/trainer/loop.py does
    return peaks


def measure_sft(point: Point, params: Any) -> Peaks:
    from stages.lib.lm.loading import load_causal_lm, load_tokenizer

    lm, _ = folders(point)
    tokenizer, rows = load_tokenizer(lm), texts_of(point, point.tokens)
    model, arguments = load_causal_lm(lm, params.model), random_order(params.sft, params)
    if point.trainer == "trl":
        from trl_trainers import sft_trainer

        trainer = sft_trainer(model, tokenizer, rows, PROMPT_TOKENS, arguments, params, [])
        return trained(trainer.train)
    from stages.lib.lm.lora import add_adapters
    from stages.lib.training.completion_only import train_on_completions

    parts = (slice(PROMPT_TOKENS), slice(PROMPT_TOKENS, None))
    prompts, responses = ([row[part] for row in rows] for part in parts)
    model = add_adapters(model, params.sft.lora, "CAUSAL_LM")
    return trained(
        lambda: train_on_completions(model, tokenizer, (prompts, responses), arguments, silent())
    )


def measure_reward(point: Point, params: Any) -> Peaks:
    from stages.lib.lm.loading import load_sequence_classifier, load_tokenizer

    lm, scorer = folders(point)
    tokenizer, rows = load_tokenizer(lm), texts_of(point, point.tokens)
    model = load_sequence_classifier(scorer, params.model)
    if point.trainer == "trl":
        from trl_trainers import reward_trainer

        arguments = random_order(params.reward, params)
        return trained(reward_trainer(model, tokenizer, rows, arguments, params, []).train)
    from stages.lib.core.recorder import MetricLogger
    from stages.reward.fit import fit

    half = point.rows // 2
    pairs: Any = [
        {"chosen_ids": chosen, "rejected_ids": rejected, "length": point.tokens}
        for chosen, rejected in zip(rows[:half], rows[half:], strict=True)
    ]
    recorder = MetricLogger("reward", "r0")
    return trained(lambda: fit(model, tokenizer, pairs, params, 0, recorder, continues=False))


def random_order(train: Any, params: Any) -> dict[str, Any]:
    """The stage's arguments for TRL; random order, since all texts are equally long."""
    from stages.lib.training.trl_setup import trainer_arguments

    arguments = trainer_arguments(train, params.model, 0, Path("work"), continues=False)
    return arguments | {"train_sampling_strategy": "random"}


def silent() -> Any:
    from transformers import TrainerCallback

    return TrainerCallback()


def trained(train: Callable[[], Any]) -> Peaks:
    peaks = Peaks()
    train()
    peaks.end("train")
    return peaks


MEASURES = {"ppo": measure_ppo, "sft": measure_sft, "reward": measure_reward}


def measure(point: Point) -> dict[str, Any]:
    """Run the point in this process."""
    from stages.lib.lm.loading import setup_torch

    params = params_of(point)
    setup_torch(params)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # for what trainers write
        if point.attention:
            peaks = MEASURES[point.stage](point, params)
        else:
            with no_attention():
                peaks = MEASURES[point.stage](point, params)
        os.chdir(ROOT)
    total = point.rows * (point.tokens + (PROMPT_TOKENS if point.stage == "ppo" else 0))
    cpu = sum(peaks.seconds.values())
    return {
        "start_mib": peaks.start,
        "peak_mib": max(peaks.mib.values()),
        "phases_mib": peaks.mib,
        "cpu_seconds": peaks.seconds,
        "cpu_ms_per_token": round(1000 * cpu / total, 2),
        "dtype": params.model.dtype.value,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["measure", "project"])
    parser.add_argument("point", help="its JSON")
    options = parser.parse_args()
    point = Point(**json.loads(options.point))
    print(json.dumps(measure(point)) if options.action == "measure" else project_folder(point))


if __name__ == "__main__":
    main()

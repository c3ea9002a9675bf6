"""SFT: teach the base model the demonstrations, and measure what that changed: the loss on held-out
ones, and what it writes.

Base and SFT answer the frozen evaluation prompts, `samples_per_prompt` times with the same random
numbers, side by side in samples.jsonl.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from stages.lib.core.files import ASSETS, read_jsonl, stage_dir, work_dir, write_jsonl
from stages.lib.core.params import Params
from stages.lib.core.recorder import MetricLogger, write_manifest
from stages.lib.core.stage import stage_main
from stages.lib.core.types import Row, TokenIds
from stages.lib.data.prompts import encode, template_hash
from stages.lib.lm.generation import sample_responses
from stages.lib.lm.loading import (
    load_causal_lm,
    load_tokenizer,
    resolve_dtype,
    setup_torch,
    training_model_params,
)
from stages.lib.lm.logprobs import token_logprobs
from stages.lib.lm.lora import add_adapters
from stages.lib.lm.saving import merge_adapter, save_model
from stages.lib.metrics.sentiment import sentiment
from stages.lib.metrics.stats import paired_bootstrap
from stages.lib.training import completion_only
from stages.lib.training.completion_only import Pairs
from stages.lib.training.trl_setup import (
    MetricLoggerCallback,
    initial_checkpoint,
    trainer_arguments,
)
from stages.sft.sample_stats import GeneratedTexts, compare_with_demonstrations

BATCH = 128  # responses at once


def main(params: Params, round_: str) -> None:
    # 1. data: demonstrations as tokens, prompt and response apart
    setup_torch(params)
    folder, data = stage_dir(round_, "sft"), stage_dir(round_, "prepare") / "data"
    recorder = MetricLogger("sft", round_)
    made_by = f"dvc repro prepare@{round_}"
    tokenizer = load_tokenizer(ASSETS / "model")
    demonstrations, held_out_rows = (
        read_jsonl(data / f"sft_{part}.jsonl", made_by) for part in ("train", "eval")
    )
    train, held_out = (
        tokens(tokenizer, demonstrations, params),
        tokens(tokenizer, held_out_rows, params),
    )
    asked = [
        row
        for row in read_jsonl(data / "eval_prompts.jsonl", made_by)
        for _ in range(params.sft.samples_per_prompt)
    ]

    # 2. the base model, before: always the base, so that rounds compare
    base = load_causal_lm(ASSETS / "model", params.model)
    loss_before = mean_nll(base, held_out)
    before = answers(base, tokenizer, asked, params)

    # 3. train, from the base or from the round before
    previous = Path(params.rounds[round_].previous) / "sft" / "model"
    start, continues = initial_checkpoint(params.sft, previous, ASSETS / "model")
    model = load_causal_lm(start, training_model_params(params.model, params.sft.lora))
    trained = fit(model, tokenizer, train, params, recorder, continues)

    # 4. save merged, and measure what was saved
    save_model(
        merge_adapter(trained, resolve_dtype(params.model.dtype)), tokenizer, folder / "model"
    )
    saved = load_causal_lm(folder / "model", params.model)
    loss_after = mean_nll(saved, held_out)
    after = answers(saved, tokenizer, asked, params)
    judged_before, judged_after = (
        sentiment([row["prompt"] for row in asked], each.texts) for each in (before, after)
    )
    write_jsonl(
        folder / "samples.jsonl",
        side_by_side(asked, {"base": (before, judged_before), "sft": (after, judged_after)}),
    )
    gains = (
        np.subtract(judged_after, judged_before).reshape(-1, params.sft.samples_per_prompt).tolist()
    )  # a row a prompt
    gain, gain_low, gain_high = paired_bootstrap(
        gains, params.evaluate.bootstrap_resamples, params.seed
    )
    write_manifest(
        folder,
        stage="sft",
        round_=round_,
        seed=params.seed,
        inputs=[data / "sft_train.jsonl", data / "sft_eval.jsonl"],
        template_hash=template_hash(tokenizer, params.prepare.prompt_format),
        started_from=str(start),
    )
    recorder.finish(
        {
            "loss_before": loss_before,
            "loss_after": loss_after,
            "perplexity_before": math.exp(loss_before),
            "perplexity_after": math.exp(loss_after),
            "judged_before": sum(judged_before) / len(asked),
            "judged_after": sum(judged_after) / len(asked),
            "judged_gain": gain,
            "judged_gain_low": gain_low,
            "judged_gain_high": gain_high,
            **compare_with_demonstrations(
                after,
                truncate_demonstrations(held_out_rows, held_out[1], params.ppo.response_length),
                (row["completion"] for row in demonstrations),
            ),
            "train_rows": len(train[0]),
            "train_tokens": sum(map(len, train[0])) + sum(map(len, train[1])),
            "steps": len(recorder.steps),
        }
    )
    judged = f"judged {gain:+.3f} [{gain_low:.3f}, {gain_high:.3f}]"
    print(
        f"[sft@{round_}] held-out loss {loss_before:.3f} -> {loss_after:.3f} nats a token, {judged}",
        flush=True,
    )


def tokens(tokenizer: PreTrainedTokenizerBase, rows: list[Row], params: Params) -> Pairs:
    encoded = [
        encode(
            tokenizer,
            r["prompt"],
            r["completion"],
            params.prepare.prompt_format,
            params.sft.max_length,
        )
        for r in rows
    ]
    return [p for p, _ in encoded], [c for _, c in encoded]


def fit(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    train: Pairs,
    params: Params,
    recorder: MetricLogger,
    continues: bool,
) -> Any:
    """Train on the responses' tokens; returns the model (a PeftModel unless lora.r is 0)."""
    arguments = trainer_arguments(
        params.sft, params.model, params.seed, work_dir(recorder.round, "sft"), continues
    )
    names = {name: name for name in ("loss", "grad_norm", "learning_rate")}
    model = add_adapters(model, params.sft.lora, "CAUSAL_LM")
    return completion_only.train_on_completions(
        model, tokenizer, train, arguments, MetricLoggerCallback(recorder, names, ["loss"])
    )


def mean_nll(model: Any, pairs: Pairs) -> float:
    """Mean negative log-likelihood of the responses, nats a token."""
    logprobs = token_logprobs(model, *pairs)
    return -float(torch.cat(logprobs).mean())


def answers(
    model: Any, tokenizer: PreTrainedTokenizerBase, rows: list[Row], params: Params
) -> GeneratedTexts:
    """The model's response to each row's prompt, with the same random numbers for every model."""
    prompts = [
        encode(tokenizer, r["prompt"], None, params.prepare.prompt_format, params.sft.max_length)[0]
        for r in rows
    ]
    responses = sample_responses(
        model, tokenizer, prompts, params.ppo, torch.Generator().manual_seed(params.seed), BATCH
    )
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    return GeneratedTexts(
        texts,
        [len(each) for each in responses],
        [each[-1] == tokenizer.eos_token_id for each in responses],
    )


def truncate_demonstrations(
    rows: list[Row], completions: list[TokenIds], response_length: int
) -> GeneratedTexts:
    """Demonstrations as far as a model that may write `response_length` tokens would get with them."""
    lengths = [len(each) for each in completions]
    return GeneratedTexts(
        [row["completion"] for row in rows],
        [min(length, response_length) for length in lengths],
        [n <= response_length for n in lengths],
    )


def side_by_side(
    rows: list[Row], found: dict[str, tuple[GeneratedTexts, list[float]]]
) -> list[Row]:
    """One row a sample: each model's text, and the judge's opinion of it."""
    return [
        {"id": row["id"], "prompt": row["prompt"]}
        | {name: written.texts[place] for name, (written, _) in found.items()}
        | {f"{name}_sentiment": round(judged[place], 4) for name, (_, judged) in found.items()}
        for place, row in enumerate(rows)
    ]


if __name__ == "__main__":
    stage_main("sft", main)

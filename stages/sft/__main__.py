"""The SFT stage: fine-tune the base model on demonstrations and measure the effect.

Base and SFT model are compared by the loss on held-out demonstrations and by responses to the
frozen evaluation prompts, sampled `samples_per_prompt` times with the same random numbers, which
the primary judge compares.

Inputs: assets/model, rounds/<round>/prepare/data; with `sft.init_from: previous` also the previous
round's sft/model.
Outputs in rounds/<round>/sft: model (merged), samples.jsonl (both models side by side),
metrics.jsonl (per step), metrics.json, manifest.json.
Run: `python -m stages.sft --round r0`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from stages.lib.core.files import ASSETS, stage_dir, work_dir, write_jsonl
from stages.lib.core.params import Params
from stages.lib.core.params.evaluation import HELD_OUT_REWARD_MODEL
from stages.lib.core.progress import progress
from stages.lib.core.recorder import MetricLogger, write_manifest
from stages.lib.core.rows import Demonstration, PromptRow, read_rows
from stages.lib.core.stage import stage_main
from stages.lib.core.user_inputs import check_unchanged
from stages.lib.data.lengths import (
    TokenizedRows,
    check_lengths,
    report_overlong,
    tokenize_fitting,
)
from stages.lib.data.prompts import template_hash
from stages.lib.judging.loading import load_primary_judge
from stages.lib.lm import world
from stages.lib.lm.loading import (
    check_model_lengths,
    load_causal_lm,
    load_tokenizer,
    resolve_dtype,
    setup_torch,
    training_model_params,
)
from stages.lib.lm.logprobs import token_logprobs
from stages.lib.lm.lora import add_adapters
from stages.lib.lm.responses import responder
from stages.lib.lm.saving import merge_adapter, save_model, saved_weights_hash
from stages.lib.metrics.stats import paired_bootstrap
from stages.lib.training.trl_setup import (
    MetricLoggerCallback,
    TokenizedDemonstrations,
    initial_checkpoint,
    train_on_completions,
    trainer_arguments,
)
from stages.sft.sample_stats import GeneratedTexts, compare_with_demonstrations

NET_WIN_RATE = ("net_win_rate", "net_win_rate_low", "net_win_rate_high")


@dataclass(frozen=True)
class ModelResults:
    """One model on held-out data.

    nll: mean negative log-likelihood of held-out responses, nats per token.
    responses: to the N evaluation prompts.
    """

    nll: float
    responses: GeneratedTexts


class SftSample(PromptRow):
    """A row of samples.jsonl, which people read: the responses of both models to a prompt.

    outcome: of SFT's response by the primary judge, 1 win, 0.5 tie, 0 loss; None: not judged.
    """

    base: str
    sft: str
    outcome: float | None


def main(params: Params, round_: str) -> None:
    """Train and measure the SFT model of a round."""
    # 1. data: demonstrations as tokens, prompts and responses apart
    setup_torch(params)
    check_unchanged("primary_judge", params)
    check_lengths(params)
    check_model_lengths(ASSETS / "model", params)
    folder, data = stage_dir(round_, "sft"), stage_dir(round_, "prepare") / "data"
    recorder = MetricLogger("sft", round_, writes=world.is_main())
    tokenizer = load_tokenizer(ASSETS / "model")
    train, held_out = (
        tokenize(tokenizer, data / f"sft_{part}.jsonl", params, round_)
        for part in ("train", "eval")
    )
    prompt_rows = [
        row
        for row in read_rows(PromptRow, data / "eval_prompts.jsonl")
        for _ in range(params.sft.samples_per_prompt)
    ]

    # 2. the base model before training: the same one in every round, so that rounds are comparable
    base_model = load_causal_lm(ASSETS / "model", params.model)
    with progress("base model"):
        base = measure(base_model, tokenizer, held_out, prompt_rows, params)
    del base_model  # its memory is for training

    # 3. train, from the base model or from the previous round's SFT model
    previous = Path(params.rounds[round_].previous) / "sft" / "model"
    start, continues = initial_checkpoint(params.sft, previous, ASSETS / "model")
    model = load_causal_lm(start, training_model_params(params.model, params.sft.lora))
    model = fit(model, tokenizer, train, params, recorder, continues)

    # 4. save the merged model, and measure it as saved: merging and the dtype change its weights
    model = merge_adapter(model, resolve_dtype(params.model.dtype))
    world.in_main(lambda: save_model(model, tokenizer, folder / "model"))
    saved_model = load_causal_lm(folder / "model", params.model)
    with progress("SFT model"):
        sft = measure(saved_model, tokenizer, held_out, prompt_rows, params)
    demonstrations = truncate_demonstrations(held_out, params.ppo.response_length)
    training_texts = (row["completion"] for row in train.rows)
    outcomes = judge_responses(prompt_rows, base.responses, sft.responses, params, round_)
    metrics = {
        **compare_losses(base, sft),
        **net_win_rate(outcomes, params),
        **compare_with_demonstrations(sft.responses, demonstrations, training_texts),
        "train_rows": len(train.rows),
        "train_tokens": sum(map(len, train.texts("completion"))),
        "overlong": train.overlong,
        "overlong_held_out": held_out.overlong,
        "steps": len(recorder.steps),
    }

    # 5. write samples, manifest and metrics
    if not world.is_main():
        return
    samples = side_by_side(prompt_rows, base.responses, sft.responses, outcomes)
    template_sha256 = template_hash(tokenizer, params.prepare.prompt_format)
    write_outputs(samples, metrics, start, template_sha256, params.seed, recorder)


def write_outputs(
    samples: list[SftSample],
    metrics: Mapping[str, float | None],
    start: Path,
    template_sha256: str,
    seed: int,
    recorder: MetricLogger,
) -> None:
    """Write the samples, the manifest and the metrics; `start` is the model trained from."""
    folder, round_ = recorder.folder, recorder.round
    data = stage_dir(round_, "prepare") / "data"
    write_jsonl(folder / "samples.jsonl", samples)
    write_manifest(
        "sft",
        round_,
        seed=seed,
        inputs=[data / "sft_train.jsonl", data / "sft_eval.jsonl"],
        template_hash=template_sha256,
        started_from=str(start),
        weights=saved_weights_hash(folder / "model"),
    )
    recorder.finish(metrics)
    loss = f"{metrics['loss_before']:.3f} -> {metrics['loss_after']:.3f} nats per token"
    gain, low, high = (metrics[name] for name in NET_WIN_RATE)
    judged = "not judged" if gain is None else f"net win rate {gain:+.3f} [{low:.3f}, {high:.3f}]"
    print(f"[sft@{round_}] held-out loss {loss}, {judged}", flush=True)


def tokenize(
    tokenizer: PreTrainedTokenizerBase, path: Path, params: Params, round_: str
) -> TokenizedRows[Demonstration]:
    """The demonstrations of a file that fit into sft.max_length, with their tokens."""
    rows = read_rows(Demonstration, path)
    tokenized = tokenize_fitting(tokenizer, rows, ["completion"], params, "sft")
    report_overlong(f"sft@{round_}", tokenized.overlong, len(rows), "sft", params)
    return tokenized


def demonstration_ids(rows: TokenizedRows[Demonstration]) -> TokenizedDemonstrations:
    """Token ids: (prompts, completions)."""
    return rows.prompts, rows.responses["completion"]


def fit(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    train: TokenizedRows[Demonstration],
    params: Params,
    recorder: MetricLogger,
    continues: bool,
) -> Any:
    """Train on the tokens of the responses; returns the model (a PeftModel unless lora.r is 0)."""
    arguments = trainer_arguments(
        params.sft, params.model, params.seed, work_dir(recorder.round, "sft"), continues
    )
    names = {name: name for name in ("loss", "grad_norm", "learning_rate")}
    model = add_adapters(model, params.sft.lora, "CAUSAL_LM")
    return train_on_completions(
        model,
        tokenizer,
        demonstration_ids(train),
        arguments,
        MetricLoggerCallback(recorder, names, ["loss"]),
    )


def measure(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    held_out: TokenizedRows[Demonstration],
    prompt_rows: list[PromptRow],
    params: Params,
) -> ModelResults:
    """The loss on held-out demonstrations, and responses to prompts."""
    nll = mean_nll(model, demonstration_ids(held_out))
    return ModelResults(nll, generate_responses(model, tokenizer, prompt_rows, params))


def mean_nll(model: Any, pairs: TokenizedDemonstrations) -> float:
    """Mean negative log-likelihood of the responses, nats per token."""
    logprobs = token_logprobs(model, *pairs)
    return -float(torch.cat(logprobs).mean())


def generate_responses(
    model: Any, tokenizer: PreTrainedTokenizerBase, rows: list[PromptRow], params: Params
) -> GeneratedTexts:
    """One sampled response per row's prompt, with the same random numbers for every model."""
    respond = responder(params, tokenizer, max_prompt_length=params.sft.max_length)
    responses = respond(model, [row["prompt"] for row in rows], params.seed)
    return GeneratedTexts(
        [response.text for response in responses],
        [len(response.tokens) for response in responses],
        [response.ended for response in responses],
    )


def truncate_demonstrations(
    rows: TokenizedRows[Demonstration], response_length: int
) -> GeneratedTexts:
    """Demonstrations, with lengths and ends as if cut after `response_length` tokens.

    A model's responses are cut there too, so that their lengths and EOS rates are comparable.
    """
    lengths = [len(completion) for completion in rows.responses["completion"]]
    return GeneratedTexts(
        [row["completion"] for row in rows.rows],
        [min(length, response_length) for length in lengths],
        [length <= response_length for length in lengths],
    )


def compare_losses(base: ModelResults, sft: ModelResults) -> dict[str, float]:
    """Loss and perplexity on held-out demonstrations, before and after SFT."""
    return {
        "loss_before": base.nll,
        "loss_after": sft.nll,
        "perplexity_before": math.exp(base.nll),
        "perplexity_after": math.exp(sft.nll),
    }


def judge_responses(
    rows: list[PromptRow],
    base: GeneratedTexts,
    sft: GeneratedTexts,
    params: Params,
    round_: str,
) -> list[float] | None:
    """(N,) outcomes of SFT's responses against the base model's, by the primary judge.

    None if this judge does not exist yet: the reward stage trains it later.
    """
    if params.evaluate.judges[0] == HELD_OUT_REWARD_MODEL:
        return None
    judge = load_primary_judge(params, round_)
    return judge.outcomes([row["prompt"] for row in rows], sft.texts, base.texts)


def net_win_rate(outcomes: list[float] | None, params: Params) -> dict[str, float | None]:
    """SFT's share of wins less its share of losses, -1 to 1, with the 95% interval."""
    if outcomes is None:
        return dict.fromkeys(NET_WIN_RATE)
    # one row per prompt: the bootstrap resamples prompts, since samples of one prompt are alike
    samples = params.sft.samples_per_prompt
    net_wins = [2 * outcome - 1 for outcome in outcomes]
    per_prompt = [net_wins[start : start + samples] for start in range(0, len(net_wins), samples)]
    interval = paired_bootstrap(per_prompt, params.evaluate.bootstrap_resamples, params.seed)
    return dict(zip(NET_WIN_RATE, interval, strict=True))


def side_by_side(
    rows: list[PromptRow],
    base: GeneratedTexts,
    sft: GeneratedTexts,
    outcomes: list[float] | None,
) -> list[SftSample]:
    """One row per sample: each model's response, and the outcome."""
    return [
        {
            "id": row["id"],
            "prompt": row["prompt"],
            "base": base.texts[index],
            "sft": sft.texts[index],
            "outcome": None if outcomes is None else outcomes[index],
        }
        for index, row in enumerate(rows)
    ]


if __name__ == "__main__":
    stage_main("sft", main)

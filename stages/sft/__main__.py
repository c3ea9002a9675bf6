"""The SFT stage: fine-tune the base model on demonstrations and measure the effect.

Base and SFT model are compared by the loss on held-out demonstrations and by responses to the
frozen evaluation prompts, sampled `samples_per_prompt` times with the same random numbers, which
the primary judge compares.

Inputs: assets/model, rounds/<round>/prepare/data; with `sft.init_from: previous` also the previous
round's sft/model. With `sft.model`, that model is measured, and none is trained. Without
demonstrations the model that SFT would start from is the SFT model.
Outputs in rounds/<round>/sft: model (merged), samples.jsonl (both models side by side),
metrics.jsonl (per step), metrics.json, manifest.json.
Run: `python -m stages.sft --round r0`.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from stages.lib.core.files import ASSETS, stage_dir, work_dir, write_jsonl
from stages.lib.core.hub import model_folder
from stages.lib.core.params import Params
from stages.lib.core.params.evaluation import HELD_OUT_REWARD_MODEL
from stages.lib.core.progress import progress
from stages.lib.core.recorder import NOT_MEASURED, MetricLogger, write_manifest
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
    check_same_tokens,
    load_causal_lm,
    load_policy,
    load_tokenizer,
    resolve_dtype,
    setup_torch,
    training_model_params,
)
from stages.lib.lm.logprobs import token_logprobs
from stages.lib.lm.lora import add_adapters
from stages.lib.lm.responses import Response, responder
from stages.lib.lm.saving import merge_adapter, save_model, saved_weights_hash
from stages.lib.metrics.stats import interval_names, mean, paired_bootstrap, with_interval
from stages.lib.metrics.text import repetition_n, tokens
from stages.lib.training.trl_setup import (
    MetricLoggerCallback,
    TokenizedDemonstrations,
    initial_checkpoint,
    train_on_completions,
    trainer_arguments,
)

NET_WIN_RATE = "net_win_rate"


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
    if not train.rows:
        return keep_start(params, recorder, tokenizer)
    prompt_rows = [
        row
        for row in read_rows(PromptRow, data / "eval_prompts.jsonl")
        for _ in range(params.sft.samples_per_prompt)
    ]

    # 2. the base model before training: the same one in every round, so that rounds are comparable
    base_model = load_causal_lm(ASSETS / "model", params.model)
    with progress("base model"):
        base_nll, base = measure(base_model, tokenizer, held_out, prompt_rows, params)
    del base_model  # its memory is for training

    # 3. train, from base or the previous round's SFT model, unless sft.model names one
    start, continues = starting_model(params, round_)
    if params.sft.model:
        model = take(start, tokenizer, params)
    else:
        model = load_causal_lm(start, training_model_params(params.model, params.sft.lora))
        model = fit(model, tokenizer, train, params, recorder, continues)

    # 4. save the merged model, and measure it as saved: merging and the dtype change its weights
    model = merge_adapter(model, resolve_dtype(params.model.dtype))
    world.in_main(lambda: save_model(model, tokenizer, folder / "model"))
    saved_model = load_causal_lm(folder / "model", params.model)
    with progress("SFT model"):
        sft_nll, sft = measure(saved_model, tokenizer, held_out, prompt_rows, params)
    demonstrations = truncate_demonstrations(held_out, params.ppo.response_length)
    training_texts = (row["completion"] for row in train.rows)
    outcomes = judge_responses(prompt_rows, base, sft, params, round_)
    metrics: dict[str, float | None] = {
        "loss_before": base_nll,
        "loss_after": sft_nll,
        "perplexity_before": math.exp(base_nll),
        "perplexity_after": math.exp(sft_nll),
        **net_win_rate(outcomes, params),
        **compare_with_demonstrations(sft, demonstrations, training_texts),
        "train_rows": 0 if params.sft.model else len(train.rows),
        "train_tokens": 0 if params.sft.model else sum(map(len, train.texts("completion"))),
        "overlong": train.overlong,
        "overlong_held_out": held_out.overlong,
        "steps": len(recorder.steps),
    }

    # 5. write samples, manifest and metrics
    if not world.is_main():
        return
    write_jsonl(folder / "samples.jsonl", side_by_side(prompt_rows, base, sft, outcomes))
    write_sft_manifest(params, round_, tokenizer, start)
    recorder.finish(metrics)
    loss = f"{base_nll:.3f} -> {sft_nll:.3f} nats per token"
    gain, low, high = (metrics[name] for name in interval_names(NET_WIN_RATE))
    judged = "not judged" if gain is None else f"net win rate {gain:+.3f} [{low:.3f}, {high:.3f}]"
    print(f"[sft@{round_}] held-out loss {loss}, {judged}", flush=True)


def starting_model(params: Params, round_: str) -> tuple[Path, bool]:
    """The folder of the model that training starts from, or that is used as it is; and whether the
    training continues that of the previous round.
    """
    if params.sft.model:
        return model_folder(params.sft.model, "sft.model"), False
    previous = Path(params.rounds[round_].previous) / "sft" / "model"
    return initial_checkpoint(params.sft, previous, ASSETS / "model")


def take(folder: Path, tokenizer: PreTrainedTokenizerBase, params: Params) -> Any:
    """An SFT model that others trained; an adapter of assets.model is merged.

    Raises:
        BadInput: it has other tokens than assets.model, or is damaged.
    """
    check_unchanged("sft_model", params)
    check_same_tokens(folder, tokenizer, "sft.model", "set assets.model to the model it came from")
    model = load_policy(ASSETS / "model", folder, params.model)
    return merge_adapter(model, resolve_dtype(params.model.dtype))


def keep_start(params: Params, recorder: MetricLogger, tokenizer: PreTrainedTokenizerBase) -> None:
    """Without demonstrations: the model that training would start from, unchanged."""
    folder = stage_dir(recorder.round, "sft")
    start, _ = starting_model(params, recorder.round)
    given = bool(params.sft.model)
    model = take(start, tokenizer, params) if given else load_causal_lm(start, params.model)
    if not world.is_main():
        return
    save_model(model, tokenizer, folder / "model")
    write_jsonl(folder / "samples.jsonl", [])
    write_sft_manifest(params, recorder.round, tokenizer, start)
    reason = f"not trained: there are no demonstrations, so the SFT model is {start}"
    recorder.finish({NOT_MEASURED: reason, "train_rows": 0})
    print(f"[{recorder.label}] {reason}", flush=True)


def write_sft_manifest(
    params: Params, round_: str, tokenizer: PreTrainedTokenizerBase, start: Path
) -> None:
    data = stage_dir(round_, "prepare") / "data"
    write_manifest(
        "sft",
        round_,
        seed=params.seed,
        inputs=[data / "sft_train.jsonl", data / "sft_eval.jsonl"],
        template_hash=template_hash(tokenizer, params.prepare.prompt_format),
        started_from=params.sft.model or str(start),
        weights=saved_weights_hash(stage_dir(round_, "sft") / "model"),
    )


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
) -> tuple[float, list[Response]]:
    """The mean negative log-likelihood of held-out demonstrations (nats per token), and responses
    to prompts.
    """
    logprobs = token_logprobs(model, *demonstration_ids(held_out))
    nll = -float(torch.cat(logprobs).mean())
    return nll, generate_responses(model, tokenizer, prompt_rows, params)


def generate_responses(
    model: Any, tokenizer: PreTrainedTokenizerBase, rows: list[PromptRow], params: Params
) -> list[Response]:
    """One response per row's prompt, with the same random numbers for every model."""
    respond = responder(params, tokenizer, max_prompt_length=params.sft.max_length)
    return respond(model, [row["prompt"] for row in rows], params.seed)


def truncate_demonstrations(
    rows: TokenizedRows[Demonstration], response_length: int
) -> list[Response]:
    """Demonstrations, with tokens and ends as if cut after `response_length` tokens.

    A model's responses are cut there too, so that their lengths and EOS rates are comparable.
    """
    return [
        Response(prompt, ids[:response_length], row["completion"], len(ids) <= response_length)
        for row, prompt, ids in zip(
            rows.rows, rows.prompts, rows.responses["completion"], strict=True
        )
    ]


def judge_responses(
    rows: list[PromptRow],
    base: list[Response],
    sft: list[Response],
    params: Params,
    round_: str,
) -> list[float] | None:
    """(N,) outcomes of SFT's responses against the base model's, by the primary judge.

    None if this judge does not exist yet: the reward stage trains it later.
    """
    if params.evaluate.judges[0] == HELD_OUT_REWARD_MODEL:
        return None
    judge = load_primary_judge(params, round_)
    sft_texts, base_texts = ([response.text for response in one] for one in (sft, base))
    return judge.outcomes([row["prompt"] for row in rows], sft_texts, base_texts)


def net_win_rate(outcomes: list[float] | None, params: Params) -> dict[str, float | None]:
    """SFT's share of wins less its share of losses, -1 to 1, with the 95% interval."""
    if outcomes is None:
        return dict.fromkeys(interval_names(NET_WIN_RATE))
    # one row per prompt: the bootstrap resamples prompts, since samples of one prompt are alike
    samples = params.sft.samples_per_prompt
    net_wins = [2 * outcome - 1 for outcome in outcomes]
    per_prompt = [net_wins[start : start + samples] for start in range(0, len(net_wins), samples)]
    interval = paired_bootstrap(per_prompt, params.evaluate.bootstrap_resamples, params.seed)
    return {**with_interval(NET_WIN_RATE, interval)}


def side_by_side(
    rows: list[PromptRow],
    base: list[Response],
    sft: list[Response],
    outcomes: list[float] | None,
) -> list[SftSample]:
    """One row per sample: each model's response, and the outcome."""
    return [
        {
            "id": row["id"],
            "prompt": row["prompt"],
            "base": base[index].text,
            "sft": sft[index].text,
            "outcome": None if outcomes is None else outcomes[index],
        }
        for index, row in enumerate(rows)
    ]


# A copied run of this many words is unlikely to be a coincidence.
MEMORISED_WORDS = 8


def compare_with_demonstrations(
    responses: Sequence[Response],
    demonstrations: Sequence[Response],
    training_texts: Iterable[str],
) -> dict[str, float]:
    """Metrics of SFT's responses beside those of held-out demonstrations, the usual values.

    Returns:
        eos_rate: share of texts that end with EOS. length: mean tokens; length_ratio: over the mean
        of the demonstrations. repetition_3: mean share of repeated 3-grams. memorised: share of
        texts with `MEMORISED_WORDS` words in a row from one training text; memorised_words: the
        longest such run in the responses. The suffix `_demonstrations` marks the usual value.
    """
    index = VerbatimIndex(training_texts)

    def describe(texts: Sequence[Response]) -> dict[str, float]:
        runs = [index.longest(text.text) for text in texts]
        return {
            "eos_rate": mean([text.ended for text in texts]),
            "length": mean([len(text.tokens) for text in texts]),
            "repetition_3": mean([repetition_n(text.text, 3) for text in texts]),
            "memorised": mean([run >= MEMORISED_WORDS for run in runs]),
            "memorised_words": max(runs),
        }

    metrics, usual = describe(responses), describe(demonstrations)
    return {
        **metrics,
        "length_ratio": metrics["length"] / usual["length"],
        **{
            f"{name}_demonstrations": usual[name]
            for name in ("eos_rate", "repetition_3", "memorised")
        },
    }


class VerbatimIndex:
    """An index of texts that finds the longest run of words copied from one of them (Carlini et al.
    2023's extraction).
    """

    LEAST = 4  # words; shorter runs count as 0

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = [tokens(text) for text in texts]
        # {LEAST words: [(text number, index of the first of these words)]}
        self.positions: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
        for number, words in enumerate(self.texts):
            for start in range(len(words) - self.LEAST + 1):
                self.positions[tuple(words[start : start + self.LEAST])].append((number, start))

    def longest(self, text: str) -> int:
        """The number of words of the longest run that `text` shares with one indexed text."""
        words = tokens(text)
        return max(
            (
                common_prefix(words[start:], self.texts[number][position:])
                for start in range(len(words) - self.LEAST + 1)
                for number, position in self.positions.get(
                    tuple(words[start : start + self.LEAST]), ()
                )
            ),
            default=0,
        )


def common_prefix(a: Sequence[str], b: Sequence[str]) -> int:
    """The number of words that two texts share at their beginnings."""
    for length, (word, other) in enumerate(zip(a, b, strict=False)):
        if word != other:
            return length
    return min(len(a), len(b))


if __name__ == "__main__":
    stage_main("sft", main)

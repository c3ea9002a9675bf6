"""Evaluation on the frozen prompts: base, SFT, PPO's checkpoints, its policy and the champion, by judges that are not the reward model.

Every model answers the same prompts with the same random numbers, `samples_per_prompt` times (`checkpoint_samples_per_prompt`
for base and checkpoints), so that comparisons are paired. The champion is the policy of the round before, on its own SFT model.
`reproduced`: policy and reward model, loaded from disk a second time, gave the first sample of every prompt again, bit for bit.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stages.errors import BadInput, RondoError
from stages.generation import assess, sample, token_logprobs
from stages.judges import Judged, judge, outcome
from stages.models import calibrated, load_causal_lm, load_policy, load_reward_model, load_tokenizer, prepare_torch
from stages.params import Params
from stages.prepare.split import evaluation_hash
from stages.program import run_stage
from stages.prompts import check_template, encode, template_hash
from stages.records import ASSETS, Recorder, Row, file_hash, is_real, read_json, read_jsonl, stage_dir, write_jsonl, write_manifest
from stages.statistics import paired_bootstrap, pearson
from stages.text import distinct_n

SCORED = 64  # rows at a time
CURVE = ("kl", "sentiment", "score", "distinct_2")


@dataclass(frozen=True)
class Sample:
    """One response. score: calibrated, of the reward model. kl (from SFT), sft_logprob: nats a sequence. length: tokens."""

    text: str
    judged: Judged
    score: float
    kl: float
    sft_logprob: float
    length: int
    ended: bool


Pass = list[Sample]  # one sample a prompt, in the prompts' order


class Evaluator:
    """Prompts, the SFT model that KL is measured from, and this round's reward model; `answers` evaluates one model."""

    def __init__(self, params: Params, round_: str) -> None:
        self.params, data = params, stage_dir(round_, "prepare") / "data"
        made_by = f"dvc repro prepare@{round_}"
        self.rows = read_jsonl(data / "eval_prompts.jsonl", made_by)
        self.sft_path, self.reward_path = stage_dir(round_, "sft") / "model", stage_dir(round_, "reward") / "model"
        self.tokenizer = load_tokenizer(self.sft_path)
        self.prompts = [row["prompt"] for row in self.rows]
        self.encode = partial(encode, self.tokenizer, prompt_format=params.prepare.prompt_format)
        self.prompt_ids = [self.encode(prompt, None)[0] for prompt in self.prompts]
        human = [
            self.encode(row["prompt"], row["completion"], max_length=params.sft.max_length)
            for row in read_jsonl(data / "sft_eval.jsonl", made_by)
        ]
        self.human = [p for p, _ in human], [c for _, c in human]
        self.sft = load_causal_lm(self.sft_path, params.model)
        self.reward = load_reward_model(self.reward_path, params.model)

    def answers(self, model: Any, samples: int) -> list[Pass]:
        return [self.answer(model, number) for number in range(samples)]

    def answer(self, model: Any, number: int) -> Pass:
        """The `number`-th sample of every prompt; its own random stream, so that it can be repeated alone."""
        p, eos = self.params, self.tokenizer.eos_token_id
        generator = torch.Generator().manual_seed(p.seed * 1000 + number)
        responses = sample(model, self.tokenizer, self.prompt_ids, p.ppo, generator, p.evaluate.batch_size)
        told = assess(
            None if model is self.sft else model,
            lambda: nullcontext(self.sft),
            self.prompt_ids,
            responses,
            reward_model=self.reward,
            eos_token_id=eos,
            temperature=p.ppo.temperature,
            batch_size=SCORED,
        )
        scores = calibrated(told.scores, self.reward).tolist()
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        return [
            Sample(text, judged, score, kl, logprob, len(tokens), tokens[-1] == eos)
            for text, judged, score, kl, logprob, tokens in zip(
                texts, judge(self.prompts, texts), scores, told.kl.tolist(), told.ref_logprobs.tolist(), responses, strict=True
            )
        ]

    def perplexity(self, model: Any) -> float:
        """Of the held-out human completions, exp of nats a token."""
        logprobs = token_logprobs(model, *self.human)
        return math.exp(-float(torch.cat(logprobs).mean()))


def describe(passes: list[Pass]) -> dict[str, float]:
    """Means over all samples. distinct_2 is counted across the prompts of a pass, then averaged: it would fall with more passes."""
    samples = [sample for each in passes for sample in each]
    values = {
        "sentiment": [s.judged.sentiment for s in samples],
        "sentiment_plain": [s.judged.sentiment_plain for s in samples],
        "score": [s.score for s in samples],
        "kl": [s.kl for s in samples],
        "length": [float(s.length) for s in samples],
        "eos_rate": [float(s.ended) for s in samples],
        "distinct_2": [distinct_n((s.text for s in each), 2) for each in passes],
        "repetition_3": [s.judged.repetition for s in samples],
    }
    means = {name: sum(column) / len(column) for name, column in values.items()}
    means["nll"] = -sum(s.sft_logprob for s in samples) / sum(s.length for s in samples)
    # falls towards 0 when the policy has learnt to please the reward model alone
    agreement = pearson(values["score"], values["sentiment"])
    return means if agreement is None else means | {"score_sentiment_correlation": agreement}


def compare(a: list[Pass], b: list[Pass], params: Params) -> dict[str, tuple[float, float, float]]:
    """A against B on the passes that both have: win_rate (ties count half) and sentiment_gain, each (mean, low, high) over prompts."""
    shared = min(len(a), len(b))
    by_prompt = [list(zip(x, y, strict=True)) for x, y in zip(zip(*a[:shared], strict=True), zip(*b[:shared], strict=True), strict=True)]
    margin, resamples, seed = params.evaluate.tie_margin, params.evaluate.bootstrap_resamples, params.seed
    wins = [[outcome(x.judged, y.judged, margin) for x, y in pairs] for pairs in by_prompt]
    gains = [[x.judged.sentiment - y.judged.sentiment for x, y in pairs] for pairs in by_prompt]
    return {"win_rate": paired_bootstrap(wins, resamples, seed), "sentiment_gain": paired_bootstrap(gains, resamples, seed)}


def with_interval(name: str, interval: tuple[float, float, float]) -> dict[str, float]:
    return dict(zip((name, f"{name}_low", f"{name}_high"), interval, strict=True))


def check_reproduced(first: Pass, second: Pass) -> None:
    """
    Raises:
        RondoError: the second evaluation differs in any text, score or KL; the same weights in the same batches have to give the same bits.
    """
    differing = [number for number, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if differing:
        a, b = first[differing[0]], second[differing[0]]
        raise RondoError(
            f"evaluate: reloaded from disk, the policy differs on {len(differing)} of {len(first)} prompts, first on {differing[0]}: "
            f"{a.text!r} (score {a.score:.4f}) and then {b.text!r} (score {b.score:.4f}). Look for a source of randomness without a seed"
        )


def main(params: Params, round_: str) -> None:
    # 1. the frozen prompts and the models that every comparison needs: SFT and this round's reward model
    prepare_torch(params)
    config, folder, ppo = params.evaluate, stage_dir(round_, "evaluate"), stage_dir(round_, "ppo")
    data = stage_dir(round_, "prepare") / "data"
    frozen = read_json(stage_dir(round_, "prepare") / "manifest.json", f"dvc repro prepare@{round_}")["evaluation_hash"]
    if evaluation_hash(data) != frozen:
        raise BadInput(f"{data}: the held-out files are not those of prepare's manifest.json; run `dvc repro prepare@{round_}`")
    kept = read_json(ppo / "metrics.json", f"dvc repro ppo@{round_}")["policy_update"]
    losses = read_json(stage_dir(round_, "sft") / "metrics.json", f"dvc repro sft@{round_}")  # on the completions that ppl_human is of
    recorder = Recorder("evaluate", round_)
    evaluator = Evaluator(params, round_)
    for stage in ("sft", "reward", "ppo"):
        check_template(stage_dir(round_, stage) / "manifest.json", evaluator.tokenizer, params.prepare.prompt_format)
    found: dict[str, list[Pass]] = {}
    metrics: dict[str, dict[str, float]] = {}
    curve: dict[int, dict[str, float]] = {}

    def evaluate(name: str, model: Any, samples: int) -> None:
        found[name] = evaluator.answers(model, samples)
        metrics[name] = describe(found[name])
        if name in ("base", "sft"):
            metrics[name]["ppl_human"] = math.exp(losses["loss_before" if name == "base" else "loss_after"])
        if name == "ppo":
            metrics[name]["ppl_human"] = evaluator.perplexity(model)
        print(f"[evaluate@{round_}] {name}: " + "  ".join(f"{key} {value:.3f}" for key, value in metrics[name].items()), flush=True)

    # 2. base and SFT
    evaluate("base", load_causal_lm(ASSETS / "model", params.model), config.checkpoint_samples_per_prompt)
    evaluate("sft", evaluator.sft, config.samples_per_prompt)
    curve[0] = point(metrics["sft"], 0.5)

    # 3. the checkpoints on PPO's way; one with the policy's weights is not evaluated twice
    policy, checkpoints = ppo / "policy", sorted((ppo / "checkpoints").glob("step_*"))
    weights = file_hash(policy)
    same = [path.name for path in checkpoints if file_hash(path) == weights]
    for path in checkpoints:
        if path.name in same:
            continue
        evaluate(path.name, load_policy(evaluator.sft_path, path, params.model), config.checkpoint_samples_per_prompt)
        metrics[path.name] |= with_interval("win_rate", compare(found[path.name], found["sft"], params)["win_rate"])
        curve[int(path.name.removeprefix("step_"))] = point(metrics[path.name], metrics[path.name]["win_rate"])

    # 4. the policy, against SFT; then once more from disk
    evaluate("ppo", load_policy(evaluator.sft_path, policy, params.model), config.samples_per_prompt)
    intervals = compare(found["ppo"], found["sft"], params)
    results = with_interval("win_rate", intervals["win_rate"]) | with_interval("sentiment_gain", intervals["sentiment_gain"])
    metrics |= {name: metrics["ppo"] | with_interval("win_rate", intervals["win_rate"]) for name in same}
    curve[kept] = point(metrics["ppo"], results["win_rate"])
    evaluator.reward = load_reward_model(evaluator.reward_path, params.model)
    check_reproduced(found["ppo"][0], evaluator.answer(load_policy(evaluator.sft_path, policy, params.model), 0))

    # 5. the champion, if there is one
    previous = Path(params.rounds[round_].previous)
    if is_real(previous / "ppo/policy"):
        evaluate("champion", load_policy(previous / "sft/model", previous / "ppo/policy", params.model), config.samples_per_prompt)
        results |= with_interval("win_rate_champion", compare(found["ppo"], found["champion"], params)["win_rate"])

    # 6. write
    for update in sorted(curve):
        recorder.log(update, curve[update])
    steps = {path.name: metrics.pop(path.name) for path in checkpoints}
    write_jsonl(folder / "samples.jsonl", side_by_side(evaluator.rows, {name: found[name] for name in metrics}))
    write_manifest(
        folder,
        stage="evaluate",
        round_=round_,
        seed=params.seed,
        inputs=[data / "eval_prompts.jsonl", data / "sft_eval.jsonl", evaluator.sft_path, evaluator.reward_path, policy],
        template_hash=template_hash(evaluator.tokenizer, params.prepare.prompt_format),
        evaluation_hash=frozen,
        generation={"response_length": params.ppo.response_length, "temperature": params.ppo.temperature, **config.model_dump()},
    )
    recorder.finish({**metrics, "checkpoints": steps, **results, "reproduced": True, "prompts": len(evaluator.rows)})
    print(f"[evaluate@{round_}] PPO against SFT: " + "  ".join(f"{name} {value:.3f}" for name, value in results.items()), flush=True)


def point(values: dict[str, float], win_rate: float) -> dict[str, float]:
    """A checkpoint on the curve of proxy and judges against KL."""
    return {name: values[name] for name in CURVE} | {"win_rate": win_rate}


def side_by_side(rows: Sequence[Row], found: dict[str, list[Pass]]) -> list[Row]:
    """One row a prompt and sample: each model's text, sentiment and reward-model score, as far as it has that many samples."""
    told: list[Row] = []
    for place, row in enumerate(rows):
        for number in range(len(found["sft"])):
            samples = {name: passes[number][place] for name, passes in found.items() if number < len(passes)}
            told.append(
                {"id": row["id"], "sample": number, "prompt": row["prompt"]}
                | {name: sample.text for name, sample in samples.items()}
                | {f"{name}_sentiment": round(sample.judged.sentiment, 4) for name, sample in samples.items()}
                | {f"{name}_score": round(sample.score, 4) for name, sample in samples.items()}
            )
    return told


if __name__ == "__main__":
    run_stage("evaluate", main)

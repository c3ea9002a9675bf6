"""Evaluation on the frozen prompts: base, SFT, PPO's checkpoints, its policy and the champion, by
judges that are not the reward model.

Every model answers the same prompts with the same random numbers, `samples_per_prompt` times
(checkpoints: `checkpoint_samples_per_prompt`), so that comparisons are paired. The champion is the
last policy that was promoted, on its own SFT model. `reproduced`: a fresh process gave the policy's
first sample of every prompt again, with its score and KL, bit for bit. `overoptimisation`: whether
PPO went too far. `win_rate_prompts_needed`: how many prompts would decide, where these do not.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from stages.evaluate.champion import champion_of
from stages.evaluate.comparability import evaluation_id, evaluation_settings, frozen_hash
from stages.evaluate.evaluator import Evaluator, Pass, Sample
from stages.evaluate.overoptimisation import Point, distance, overoptimisation
from stages.lib.core.errors import RondoError
from stages.lib.core.files import (
    ASSETS,
    Recorder,
    Row,
    file_hash,
    read_json,
    stage_dir,
    work_dir,
    write_json,
    write_jsonl,
    write_manifest,
)
from stages.lib.core.fresh_process import run_fresh
from stages.lib.core.params import Params
from stages.lib.core.stage import run_stage
from stages.lib.data.prompts import Prompt, check_template, template_hash
from stages.lib.judging.jury import Jury, load_jury
from stages.lib.judging.lexicon import Judged
from stages.lib.judging.pairwise import TOGETHER, Comparison
from stages.lib.lm.loading import load_causal_lm, load_policy, prepare_torch
from stages.lib.metrics.stats import paired_bootstrap, pearson, prompts_needed
from stages.lib.metrics.text import distinct_n

UNMEASURED = dict.fromkeys(
    ("win_rate_champion", "win_rate_champion_low", "win_rate_champion_high")
)  # where there is no champion
CURVE = ("kl", "sentiment", "score", "distinct_2")


def describe(passes: list[Pass]) -> dict[str, float]:
    """Means over all samples. distinct_2 is counted across the prompts of a pass, then averaged: it
    would fall with more passes.
    """
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


def compare(
    a: list[Pass], b: list[Pass], prompts: Sequence[Prompt], jury: Jury, params: Params
) -> dict[str, tuple[float, float, float]]:
    """A against B on the passes that both have, each (mean, low, high) over prompts: win_rate of
    the whole jury, win_rate_<judge> of each (ties count half), sentiment_gain.
    """
    pairs = [list(zip(x, y, strict=True)) for x, y in zip(a, b, strict=False)]  # by pass
    told = jury.compare(
        [
            Comparison(p, x.text, y.text)
            for each in pairs
            for p, (x, y) in zip(prompts, each, strict=True)
        ]
    )
    columns = {
        "win_rate" if name == TOGETHER else f"win_rate_{name}": votes
        for name, votes in told.items()
    }
    columns["sentiment_gain"] = [
        x.judged.sentiment - y.judged.sentiment for each in pairs for x, y in each
    ]
    by_prompt = {
        name: np.reshape(column, (len(pairs), -1)).T.tolist() for name, column in columns.items()
    }
    resamples, seed = params.evaluate.bootstrap_resamples, params.seed
    return {
        name: paired_bootstrap(clusters, resamples, seed) for name, clusters in by_prompt.items()
    }


class Told:
    """What each model has answered to the frozen prompts (`found`), and its means (`metrics`).
    losses: SFT's, of people's texts.
    """

    def __init__(self, evaluator: Evaluator, losses: Row, label: str) -> None:
        self.evaluator, self.losses, self.label = evaluator, losses, label
        self.found: dict[str, list[Pass]] = {}
        self.metrics: dict[str, dict[str, float]] = {}

    def ask(self, name: str, model: Any, samples: int) -> None:
        self.found[name] = self.evaluator.answers(model, samples)
        metrics = self.metrics[name] = describe(self.found[name])
        if name in ("base", "sft"):
            metrics["ppl_human"] = math.exp(
                self.losses["loss_before" if name == "base" else "loss_after"]
            )
        if name == "ppo":
            metrics["ppl_human"] = self.evaluator.perplexity(model)
        say(self.label, name, metrics)


def say(label: str, what: str, numbers: Mapping[str, float | None]) -> None:
    print(
        f"[{label}] {what}: "
        + "  ".join(
            f"{key} {value:.3f}" for key, value in numbers.items() if isinstance(value, float)
        ),
        flush=True,
    )


def with_interval(name: str, interval: tuple[float, float, float]) -> dict[str, float]:
    return dict(zip((name, f"{name}_low", f"{name}_high"), interval, strict=True))


def decided(
    name: str, interval: tuple[float, float, float], prompts: int, label: str
) -> dict[str, float | None]:
    """A win rate with its interval, and how many prompts would decide it; says so where these are
    too few.
    """
    needed = prompts_needed(prompts, *interval)
    if needed:
        print(
            f"[{label}] {name} {interval[0]:.3f} cannot decide with {prompts} prompts: about {needed} would",
            flush=True,
        )
    return {**with_interval(name, interval), f"{name}_prompts_needed": needed}


def answered_again(params: Params, round_: str) -> Pass:
    """The policy's first sample of every prompt, by a process of its own
    (stages/evaluate/reproduce.py) from the files on disk and these params.

    Raises:
        RondoError: it failed; with what it said.
    """
    settings = work_dir(round_, "evaluate") / "params.json"
    write_json(settings, params.model_dump(mode="json"))
    policy = stage_dir(round_, "ppo") / "policy"
    rows = run_fresh(
        "stages.evaluate.reproduce",
        round_,
        settings,
        failing=f"{policy} cannot be evaluated a second time",
    )
    return [Sample(**row | {"judged": Judged(**row["judged"])}) for row in rows]


def check_reproduced(first: Pass, second: Pass) -> None:
    """
    Raises:
        RondoError: the second evaluation differs in any text, score or KL; the same weights in the
            same batches have to give the same bits.
    """
    differing = [number for number, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if differing:
        a, b = first[differing[0]], second[differing[0]]
        raise RondoError(
            f"evaluate: in a fresh process the policy differs on {len(differing)} of {len(first)} prompts, first on {differing[0]}: "
            f"{a.text!r} (score {a.score:.4f}, KL {a.kl:.4f}) and then {b.text!r} (score {b.score:.4f}, KL {b.kl:.4f}). "
            f"Look for a source of randomness without a seed, or files that changed meanwhile"
        )


def main(params: Params, round_: str) -> None:
    # 1. the frozen prompts and the models that every comparison needs: SFT and this round's reward
    # model
    prepare_torch(params)
    config, folder, ppo = params.evaluate, stage_dir(round_, "evaluate"), stage_dir(round_, "ppo")
    data, settings = (
        stage_dir(round_, "prepare") / "data",
        evaluation_settings(params, frozen_hash(round_)),
    )
    kept = read_json(ppo / "metrics.json", f"dvc repro ppo@{round_}")["policy_update"]
    losses = read_json(
        stage_dir(round_, "sft") / "metrics.json", f"dvc repro sft@{round_}"
    )  # on the completions that ppl_human is of
    recorder = Recorder("evaluate", round_)
    evaluator = Evaluator(params, round_)
    prompts = len(evaluator.prompts)
    for stage in ("sft", "reward", "ppo"):
        check_template(
            stage_dir(round_, stage) / "manifest.json",
            evaluator.tokenizer,
            params.prepare.prompt_format,
        )
    told = Told(evaluator, losses, recorder.label)
    found, metrics, curve = told.found, told.metrics, dict[int, dict[str, float]]()

    # 2. base and SFT; the jury, which compares by texts alone
    base = load_causal_lm(ASSETS / "model", params.model)
    jury = load_jury(params, round_, base, evaluator.tokenizer, evaluator.people)
    against = partial(compare, prompts=evaluator.prompts, jury=jury, params=params)
    told.ask("base", base, config.samples_per_prompt)
    told.ask("sft", evaluator.sft, config.samples_per_prompt)
    metrics["base"] |= with_interval("win_rate", against(found["base"], found["sft"])["win_rate"])
    curve[0] = point(metrics["sft"], 0.5)

    # 3. the checkpoints on PPO's way; one with the policy's weights is not evaluated twice
    policy, checkpoints = evaluator.policy_path, sorted((ppo / "checkpoints").glob("step_*"))
    weights = file_hash(policy)
    same = [path.name for path in checkpoints if file_hash(path) == weights]
    for path in checkpoints:
        if path.name in same:
            continue
        told.ask(
            path.name,
            load_policy(evaluator.sft_path, path, params.model),
            config.checkpoint_samples_per_prompt,
        )
        metrics[path.name] |= with_interval(
            "win_rate", against(found[path.name], found["sft"])["win_rate"]
        )
        curve[int(path.name.removeprefix("step_"))] = point(
            metrics[path.name], metrics[path.name]["win_rate"]
        )

    # 4. the policy, against SFT; then once more in a fresh process
    told.ask("ppo", evaluator.load_ppo(), config.samples_per_prompt)
    intervals = against(found["ppo"], found["sft"])
    won = intervals.pop("win_rate")
    results = decided("win_rate", won, prompts, recorder.label)
    results |= {
        key: value
        for name, interval in intervals.items()
        for key, value in with_interval(name, interval).items()
    }
    metrics |= {name: metrics["ppo"] | with_interval("win_rate", won) for name in same}
    curve[kept] = point(metrics["ppo"], won[0])
    check_reproduced(found["ppo"][0], answered_again(params, round_))

    # 5. the champion, if there is one
    champion = champion_of(round_)
    if champion:
        told.ask(
            "champion",
            load_policy(champion.sft, champion.policy, params.model),
            config.samples_per_prompt,
        )
        won = against(found["ppo"], found["champion"])["win_rate"]
        results |= decided("win_rate_champion", won, prompts, recorder.label)

    # 6. write
    for update in sorted(curve):
        recorder.log(update, curve[update])
    steps = {path.name: metrics.pop(path.name) for path in checkpoints}
    write_jsonl(
        folder / "samples.jsonl",
        side_by_side(evaluator.rows, {name: found[name] for name in metrics}),
    )
    write_manifest(
        folder,
        stage="evaluate",
        round_=round_,
        seed=params.seed,
        inputs=[
            data / "eval_prompts.jsonl",
            data / "sft_eval.jsonl",
            evaluator.sft_path,
            evaluator.reward_path,
            policy,
        ],
        template_hash=template_hash(evaluator.tokenizer, params.prepare.prompt_format),
        evaluation_id=evaluation_id(settings),
        evaluation=settings,
    )
    way = [
        Point(update, at["kl"], at["score"], at["sentiment"])
        for update, at in sorted(curve.items())
    ]
    final = {
        **metrics,
        "human_nll_rise": math.log(metrics["ppo"]["ppl_human"] / metrics["sft"]["ppl_human"]),
        "checkpoints": steps,
        "champion_round": champion.round if champion else None,
        **UNMEASURED,
        **results,
        "jury": jury.report(),
        "overoptimisation": overoptimisation(way),
        "evaluation_id": evaluation_id(settings),
    }
    recorder.finish(final | {"reproduced": True, "prompts": prompts})
    say(recorder.label, "policy against SFT", results)


def point(values: dict[str, float], win_rate: float) -> dict[str, float]:
    """A checkpoint on the curve of proxy and judges against KL."""
    return {name: values[name] for name in CURVE} | {
        "sqrt_kl": distance(values["kl"]),
        "win_rate": win_rate,
    }


def side_by_side(rows: Sequence[Row], found: dict[str, list[Pass]]) -> list[Row]:
    """One row a prompt and sample: each model's text, sentiment and reward-model score, as far as
    it has that many samples.
    """
    told: list[Row] = []
    for place, row in enumerate(rows):
        for number in range(len(found["sft"])):
            samples = {
                name: passes[number][place]
                for name, passes in found.items()
                if number < len(passes)
            }
            told.append(
                {"id": row["id"], "sample": number, "prompt": row["prompt"]}
                | {name: sample.text for name, sample in samples.items()}
                | {
                    f"{name}_sentiment": round(sample.judged.sentiment, 4)
                    for name, sample in samples.items()
                }
                | {f"{name}_score": round(sample.score, 4) for name, sample in samples.items()}
            )
    return told


if __name__ == "__main__":
    run_stage("evaluate", main)

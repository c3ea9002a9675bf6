"""The evaluate stage.

Run: `python -m stages.evaluate --round r0`.
"""

import math
from functools import partial

from stages.evaluate.champion import load_champion
from stages.evaluate.comparability import eval_set_hash, evaluation_id, evaluation_settings
from stages.evaluate.evaluator import Evaluator, OneSamplePerPrompt, Sample
from stages.evaluate.overoptimisation import Point, distance, overoptimisation
from stages.evaluate.results import (
    ModelResults,
    paired_win_rates,
    say,
    side_by_side,
    win_rate_with_prompts_needed,
    with_interval,
)
from stages.lib.core.errors import RondoError
from stages.lib.core.files import (
    ASSETS,
    file_hash,
    read_json,
    stage_dir,
    work_dir,
    write_json,
    write_jsonl,
)
from stages.lib.core.fresh_process import run_in_fresh_process
from stages.lib.core.params import Params
from stages.lib.core.recorder import MetricLogger, write_manifest
from stages.lib.core.stage import stage_main
from stages.lib.data.prompts import check_template, template_hash
from stages.lib.judging.jury import load_jury
from stages.lib.judging.lexicon import LexiconScores
from stages.lib.lm.loading import load_causal_lm, load_policy, setup_torch

UNMEASURED = dict.fromkeys(
    ("win_rate_champion", "win_rate_champion_low", "win_rate_champion_high")
)  # where there is no champion
CURVE = ("kl", "sentiment", "score", "distinct_2")


def rerun_policy(params: Params, round_: str) -> OneSamplePerPrompt:
    """The policy's first sample of every prompt, by a process of its own
    (stages/evaluate/reproduce.py) from the files on disk and these params.

    Raises:
        RondoError: it failed; with what it said.
    """
    settings = work_dir(round_, "evaluate") / "params.json"
    write_json(settings, params.model_dump(mode="json"))
    policy = stage_dir(round_, "ppo") / "policy"
    rows = run_in_fresh_process(
        "stages.evaluate.reproduce",
        round_,
        settings,
        failing=f"{policy} cannot be evaluated a second time",
    )
    return [Sample(**row | {"judged": LexiconScores(**row["judged"])}) for row in rows]


def check_reproduced(first: OneSamplePerPrompt, second: OneSamplePerPrompt) -> None:
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
    setup_torch(params)
    config, folder, ppo = params.evaluate, stage_dir(round_, "evaluate"), stage_dir(round_, "ppo")
    data, settings = (
        stage_dir(round_, "prepare") / "data",
        evaluation_settings(params, eval_set_hash(round_)),
    )
    kept = read_json(ppo / "metrics.json", f"dvc repro ppo@{round_}")["policy_update"]
    losses = read_json(
        stage_dir(round_, "sft") / "metrics.json", f"dvc repro sft@{round_}"
    )  # on the completions that ppl_human is of
    recorder = MetricLogger("evaluate", round_)
    evaluator = Evaluator(params, round_)
    prompts = len(evaluator.prompts)
    for stage in ("sft", "reward", "ppo"):
        check_template(
            stage_dir(round_, stage) / "manifest.json",
            evaluator.tokenizer,
            params.prepare.prompt_format,
        )
    told = ModelResults(evaluator, losses, recorder.label)
    found, metrics, curve = told.found, told.metrics, dict[int, dict[str, float]]()

    # 2. base and SFT; the jury, which compares by texts alone
    base = load_causal_lm(ASSETS / "model", params.model)
    jury = load_jury(params, round_, base, evaluator.tokenizer, evaluator.people)
    against = partial(paired_win_rates, prompts=evaluator.prompts, jury=jury, params=params)
    told.add_model("base", base, config.samples_per_prompt)
    told.add_model("sft", evaluator.sft, config.samples_per_prompt)
    metrics["base"] |= with_interval("win_rate", against(found["base"], found["sft"])["win_rate"])
    curve[0] = point(metrics["sft"], 0.5)

    # 3. the checkpoints on PPO's way; one with the policy's weights is not evaluated twice
    policy, checkpoints = evaluator.policy_path, sorted((ppo / "checkpoints").glob("step_*"))
    weights = file_hash(policy)
    same = [path.name for path in checkpoints if file_hash(path) == weights]
    for path in checkpoints:
        if path.name in same:
            continue
        told.add_model(
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
    told.add_model("ppo", evaluator.load_ppo(), config.samples_per_prompt)
    intervals = against(found["ppo"], found["sft"])
    won = intervals.pop("win_rate")
    results = win_rate_with_prompts_needed("win_rate", won, prompts, recorder.label)
    results |= {
        key: value
        for name, interval in intervals.items()
        for key, value in with_interval(name, interval).items()
    }
    metrics |= {name: metrics["ppo"] | with_interval("win_rate", won) for name in same}
    curve[kept] = point(metrics["ppo"], won[0])
    check_reproduced(found["ppo"][0], rerun_policy(params, round_))

    # 5. the champion, if there is one
    champion = load_champion(round_)
    if champion:
        told.add_model(
            "champion",
            load_policy(champion.sft, champion.policy, params.model),
            config.samples_per_prompt,
        )
        won = against(found["ppo"], found["champion"])["win_rate"]
        results |= win_rate_with_prompts_needed("win_rate_champion", won, prompts, recorder.label)

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


if __name__ == "__main__":
    stage_main("evaluate", main)

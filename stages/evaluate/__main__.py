"""The evaluate stage: how good is the policy, by judges that are not the reward model?

Base, SFT, PPO's checkpoints, the policy and the champion answer the frozen prompts with the same
random numbers, `samples_per_prompt` times (checkpoints: `checkpoint_samples_per_prompt`), so that
comparisons are paired. The champion is the last policy that was promoted, on its own SFT model.

Reads prepare's held-out data, the SFT and reward models, battery's best-of-n, PPO's policy and
checkpoints, and champion.json. Writes to rounds/<round>/evaluate: samples.jsonl, metrics.jsonl and
curves.csv (the checkpoints by update), and metrics.json. In the latter, `reproduced`: a fresh
process repeated the policy's first sample of each prompt, with its score and KL: bit for bit on a
CPU without vLLM, else as stages/evaluate/reproduce.py says; `overoptimisation`: whether PPO went
too far; `kl_efficiency`: what its KL is worth; `win_rate_prompts_needed`: how many prompts would
decide, if these do not.

Run: `python -m stages.evaluate --round r0`.
"""

import math
from pathlib import Path
from typing import Any

from stages.evaluate.comparability import eval_set_hash, evaluation_id, evaluation_settings
from stages.evaluate.evaluator import Evaluator
from stages.evaluate.kl_efficiency import kl_efficiency, rise_per_distance
from stages.evaluate.overoptimisation import Point, distance, overoptimisation
from stages.evaluate.reproduce import check_reproduced, is_exact, rerun_policy
from stages.evaluate.results import (
    WIN_RATE,
    ModelResults,
    compare_with_champion,
    print_metrics,
    side_by_side,
    win_rate_with_prompts_needed,
    with_intervals,
)
from stages.lib.core.champion import load_champion
from stages.lib.core.files import ASSETS, file_hash, stage_dir, write_jsonl
from stages.lib.core.judge_answers import record_answers
from stages.lib.core.params import Params
from stages.lib.core.recorder import MetricLogger, read_metrics, write_manifest
from stages.lib.core.stage import stage_main
from stages.lib.core.types import Metrics
from stages.lib.core.user_inputs import check_unchanged
from stages.lib.data.prompts import check_template, template_hash
from stages.lib.judging.loading import load_jury
from stages.lib.lm import world
from stages.lib.lm.loading import load_causal_lm, load_policy, setup_torch
from stages.lib.metrics.stats import interval_names, with_interval

ROUNDING = 1e-3  # nats per sequence
# the values if there is no champion
NO_CHAMPION = dict.fromkeys(
    name for rate in ("win_rate_champion", WIN_RATE) for name in interval_names(rate)
)
CURVE = (
    *("kl", "kl_per_token", "judge_score", "judge_score_low", "judge_score_high"),
    *("score", "distinct_2"),  # no score without a reward model
)


def main(params: Params, round_: str) -> None:
    # 1. the frozen prompts, the SFT model and this round's reward model
    setup_torch(params)
    check_unchanged("judges", params)
    config, ppo = params.evaluate, stage_dir(round_, "ppo")
    settings = evaluation_settings(params, eval_set_hash(round_))
    selected = read_metrics(round_, "ppo")
    recorder = MetricLogger("evaluate", round_, writes=world.is_main())
    evaluator = Evaluator(params, round_)
    tokenizer, prompts = evaluator.tokenizer, len(evaluator.prompts)
    for stage in ("sft", "reward", "ppo"):
        manifest = stage_dir(round_, stage) / "manifest.json"
        check_template(manifest, tokenizer, params.prepare.prompt_format)

    # 2. base and SFT; the jury, which sees texts only
    base = load_causal_lm(ASSETS / "model", params.model)
    jury = load_jury(params, round_, lambda: base)
    # SFT's losses are on the same human texts as the policy's perplexity
    results = ModelResults(evaluator, jury, read_metrics(round_, "sft"), recorder.label)
    metrics = results.metrics
    results.add_model("sft", evaluator.sft, config.samples_per_prompt)
    results.add_model("base", base, config.samples_per_prompt)
    base_win_rate = results.win_rates("base", "sft")["win_rate"]
    metrics["base"] |= with_interval("win_rate", base_win_rate)
    curve = [curve_point(0, metrics["sft"], 0.5)]

    # 3. PPO's checkpoints; those with the policy's weights are not evaluated twice
    checkpoints = sorted((ppo / "checkpoints").glob("step_*"))
    policy_hash = file_hash(evaluator.policy_path)
    same_as_policy = [path.name for path in checkpoints if file_hash(path) == policy_hash]
    others = [path for path in checkpoints if path.name not in same_as_policy]
    curve += evaluate_checkpoints(others, results)

    # 4. the policy against SFT, then its first samples again in a fresh process
    results.add_model("ppo", evaluator.load_ppo(), config.samples_per_prompt)
    intervals = results.win_rates("ppo", "sft")
    win_rate = intervals.pop("win_rate")
    comparisons = win_rate_with_prompts_needed("win_rate", win_rate, prompts, recorder.label)
    comparisons |= with_intervals(intervals)
    policy_metrics = metrics["ppo"] | with_interval("win_rate", win_rate)
    metrics |= dict.fromkeys(same_as_policy, policy_metrics)
    update = selected["policy_update"]
    if update or metrics["ppo"]["kl"] > ROUNDING:  # else the policy is SFT; a champion is far away
        curve.append(curve_point(update, metrics["ppo"], win_rate[0], selected["policy_scale"]))
    exact = is_exact(params, evaluator.sft.device)
    comparisons |= efficiency(results, read_metrics(round_, "battery"))
    again = world.in_main(lambda: rerun_policy(params, round_))
    compared = check_reproduced(results.samples["ppo"][0], again, exact)
    print(f"{recorder.label}: in a fresh process, {compared}", flush=True)

    # 5. the champion, if there is one
    champion = load_champion(round_)
    if champion:
        comparisons |= compare_with_champion(results, champion)

    # 6. write
    judges = jury.report()  # here, since all processes take part
    if not world.is_main():
        return
    for point in sorted(curve, key=lambda point: (point["step"], point["scale"])):
        recorder.log(int(point["step"]), point)
    checkpoint_metrics = {path.name: metrics.pop(path.name) for path in checkpoints}
    write_samples_and_manifest(results, round_, settings)
    final = {
        **metrics,
        "human_nll_rise": human_nll_rise(metrics),
        "checkpoints": checkpoint_metrics,
        "champion_round": champion.round if champion else None,
        **NO_CHAMPION,
        **comparisons,
        "judge": jury.primary.name,
        "jury": judges,
        "overoptimisation": overoptimisation(fitted_points(curve)),
        "evaluation_id": evaluation_id(settings),
    }
    record_answers(round_, has_answers=bool(params.language_models()))
    recorder.finish(final | {"reproduced": True, "prompts": prompts})
    print_metrics(recorder.label, "policy against SFT", comparisons)


def efficiency(results: ModelResults, battery: Metrics) -> dict[str, float | None]:
    """`kl_efficiency` of the policy with its interval; null without a reward model or without KL.

    battery: its metrics, with the scores of best-of-n.
    """
    names = interval_names("kl_efficiency")
    curve = {
        int(n): point["score"] for n, point in battery.get("best_of_n", {}).items() if n.isdigit()
    }
    slope = rise_per_distance(curve) if curve else None
    if slope is None or results.metrics["ppo"]["kl"] <= ROUNDING:
        return dict.fromkeys(names)
    (rises, kls), config = results.rises_and_kls(), results.evaluator.params.evaluate
    seed = results.evaluator.params.seed
    interval = kl_efficiency(rises, kls, slope, config.bootstrap_resamples, seed)
    return {**with_interval("kl_efficiency", interval)}


def evaluate_checkpoints(checkpoints: list[Path], results: ModelResults) -> list[dict[str, float]]:
    """Add each checkpoint to the results, compared with SFT; returns its curve points."""
    params, sft = results.evaluator.params, results.evaluator.sft_path
    samples = params.evaluate.checkpoint_samples_per_prompt
    curve = []
    for path in checkpoints:
        # the model has no name here: it is freed before the next one is loaded
        results.add_model(path.name, load_policy(sft, path, params.model), samples)
        win_rate = results.win_rates(path.name, "sft")["win_rate"]
        results.metrics[path.name] |= with_interval("win_rate", win_rate)
        update = int(path.name.removeprefix("step_"))
        curve.append(curve_point(update, results.metrics[path.name], win_rate[0]))
    return curve


def curve_point(
    update: int, metrics: dict[str, float], win_rate: float, scale: float = 1.0
) -> dict[str, float]:
    """A policy on the curve of reward score and judges against KL; scale: of the update's policy,
    towards SFT (stages/lib/lm/interpolation.py).
    """
    return {name: metrics[name] for name in CURVE if name in metrics} | {
        "step": update,
        "scale": scale,
        "sqrt_kl": distance(metrics["kl"]),
        "win_rate": win_rate,
    }


def fitted_points(curve: list[dict[str, float]]) -> list[Point]:
    return [
        Point(int(one["step"]), one["kl"], one.get("score"), one["judge_score"]) for one in curve
    ]


def human_nll_rise(metrics: dict[str, dict[str, float]]) -> float | None:
    """The policy's loss on human texts less SFT's, nats per token; None without such texts."""
    policy, sft = (metrics[name].get("ppl_human") for name in ("ppo", "sft"))
    return math.log(policy / sft) if policy and sft else None


def write_samples_and_manifest(
    results: ModelResults, round_: str, settings: dict[str, Any]
) -> None:
    """samples.jsonl has the models that are left in `metrics`: all but the checkpoints."""
    evaluator, params = results.evaluator, results.evaluator.params
    folder, data = stage_dir(round_, "evaluate"), stage_dir(round_, "prepare") / "data"
    write_jsonl(folder / "samples.jsonl", side_by_side(evaluator.rows, results))
    files = [data / "eval_prompts.jsonl", data / "sft_eval.jsonl"]
    models = [evaluator.sft_path, evaluator.reward_path, evaluator.policy_path]
    write_manifest(
        "evaluate",
        round_,
        seed=params.seed,
        inputs=[*files, *models],
        template_hash=template_hash(evaluator.tokenizer, params.prepare.prompt_format),
        evaluation_id=evaluation_id(settings),
        evaluation=settings,
    )


if __name__ == "__main__":
    stage_main("evaluate", main)

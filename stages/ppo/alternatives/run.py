"""The policy stage if `algorithm` is not PPO, top to bottom; its outputs are those of PPO."""

import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from stages.lib.core.files import stage_dir, work_dir, write_json, write_text
from stages.lib.core.params import Params
from stages.lib.core.params.policy import Algorithm
from stages.lib.core.recorder import MetricLogger, write_manifest
from stages.lib.core.rows import RolloutRow, TrainingPrompt, read_rows
from stages.lib.core.types import Metrics
from stages.lib.data.prompts import check_template, template_hash
from stages.lib.judging.loading import load_primary_judge
from stages.lib.lm import world
from stages.lib.lm.loading import (
    load_causal_lm,
    load_reward_model,
    load_tokenizer,
    training_model_params,
)
from stages.lib.lm.saving import save_trained, weights_hash
from stages.ppo.alternatives import best_of_n, dpo, grpo, rloo
from stages.ppo.alternatives.callback import PolicyCallback
from stages.ppo.alternatives.policy import TrainingContext
from stages.ppo.common.episodes import make_episodes
from stages.ppo.common.health import WARN, Finding
from stages.ppo.common.outputs import describe_rows, publish_outputs
from stages.ppo.common.policy_selection import Validation
from stages.ppo.common.reference import check_reference_files, check_reference_weights
from stages.ppo.common.resume import Resume, run_identity
from stages.ppo.common.rewards import load_rewards

ALGORITHMS: dict[Algorithm, Callable[[TrainingContext], PolicyCallback]] = {
    Algorithm.dpo: dpo.train,
    Algorithm.rloo: rloo.train,
    Algorithm.grpo: grpo.train,
    Algorithm.best_of_n: best_of_n.train,
}

# The setting that makes the training longer, if it is not PPO's
LONGER = {
    Algorithm.dpo: "dpo.num_train_epochs",
    Algorithm.best_of_n: "best_of_n.num_train_epochs",
}


def main(params: Params, round_: str) -> None:
    # 1. inputs: SFT model, rewards, and prompts, of which some are held out
    folder, sft, reward = (stage_dir(round_, stage) for stage in ("ppo", "sft", "reward"))
    context = load(params, round_)
    tokenizer, reference = context.tokenizer, context.reference

    # 2. train; a killed run with the same inputs resumes
    callback = ALGORITHMS[params.algorithm](context)
    with callback.trained_policy.reference() as model:
        check_reference_weights(model, reference, "after training")

    # 3. the policy at the target KL, or the judge's best within the budget, and its rollouts
    policy = callback.trained_policy.policy.eval()
    kept = callback.selector.select(callback.updates, callback.monitor.stopped)
    rows = callback.sample_rows(kept.update) if kept.update else callback.initial_rows

    # 4. the outputs of PPO; the critic is a placeholder, since there is none
    if not world.is_main():
        return
    save_trained(policy, tokenizer, folder / "policy")
    shutil.rmtree(folder / "critic", ignore_errors=True)
    write_text(folder / "critic/EMPTY", f"{params.algorithm.value} has no critic\n")
    publish_outputs(context.work, folder)
    callback.monitor.findings += no_gain_finding(kept)
    write_json(folder / "health.json", callback.monitor.report())
    write_manifest(
        "ppo",
        round_,
        seed=params.seed,
        processes=world.size(),
        inputs=[*data_paths(params, round_), sft / "manifest.json", reward / "manifest.json"],
        template_hash=template_hash(tokenizer, params.prepare.prompt_format),
        algorithm=params.algorithm.value,
        reference=reference,
    )
    context.recorder.finish(summary(callback, rows))
    described = callback.selector.describe(LONGER.get(params.algorithm, "ppo.total_episodes"))
    print(f"[ppo@{round_}] {params.algorithm.value}: {described}", flush=True)


def prompts_path(round_: str) -> Path:
    return stage_dir(round_, "prepare") / "data/prompts_train.jsonl"


def data_paths(params: Params, round_: str) -> list[Path]:
    """The files that the algorithm trains on."""
    if params.algorithm is not Algorithm.dpo:
        return [prompts_path(round_)]
    return [prompts_path(round_), stage_dir(round_, "annotate") / "data/pairs_train.jsonl"]


def load(params: Params, round_: str) -> TrainingContext:
    """Load the models and prompts of a round, and the state of a killed run with the same inputs.

    Raises:
        BadInput: SFT or reward model were made with another rendering of prompts.
    """
    sft, reward = stage_dir(round_, "sft"), stage_dir(round_, "reward")
    check_reference_files(sft)
    tokenizer = load_tokenizer(sft / "model")
    for stage in (sft, reward):
        check_template(stage / "manifest.json", tokenizer, params.prepare.prompt_format)
    rows = read_rows(TrainingPrompt, prompts_path(round_), f"dvc repro prepare@{round_}")
    rewards = load_rewards(params)
    rewards.check_columns(rows)
    prompts, held_out = make_episodes(rows, tokenizer, params)
    inputs = [*data_paths(params, round_), sft / "model", reward / "model"]
    resume = Resume(work_dir(round_, "ppo"), run_identity(params, inputs))
    saved = resume.load()
    world.wait()  # until every process has read the state
    if not saved and world.is_main():
        resume.clear()  # files of a run that was killed before it saved a state
    model = load_causal_lm(sft / "model", training_model_params(params.model, params.ppo.lora))
    return TrainingContext(
        params=params,
        recorder=MetricLogger(
            "ppo", round_, logged_steps=saved["steps"] if saved else (), writes=world.is_main()
        ),
        resume=resume,
        saved=saved,
        reference=weights_hash(model),
        tokenizer=tokenizer,
        sft=model,
        reward_model=load_reward_model(reward / "model", params.model),
        rewards=rewards,
        judge=load_primary_judge(params, round_),
        prompts=prompts,
        held_out=held_out,
    )


def summary(callback: PolicyCallback, rows: list[RolloutRow]) -> Metrics:
    """The metrics of the kept policy, with means over its rollout `rows`."""
    kept = callback.selector.best
    return {
        **describe_rows(rows, callback.selector.first.length),
        "score_mean_first": fmean(row["score"] for row in callback.initial_rows),
        "updates": callback.updates,
        "stopped": callback.monitor.stopped or "completed",
        **callback.selector.metrics,
        "health": callback.monitor.verdict,
        "dangers": callback.monitor.dangers(kept.update + 1),
    }


def no_gain_finding(kept: Validation) -> list[Finding]:
    """A warning if the kept policy is SFT.

    It applies to every algorithm, while the signs of the health monitor read metrics that PPO, RLOO
    and GRPO log, but DPO and best-of-n do not.
    """
    if kept.update:
        return []
    cause, fix = (
        "no policy within the KL budget is better than SFT by the primary judge",
        "read the rollouts and the reward model's gate",
    )
    return [Finding("nothing gained", WARN, 0, "policy_update", 0.0, "above 0", cause, fix)]

"""PPO-RLHF: move the SFT model towards what the reward model likes, within a KL budget; or what
`algorithm` names in its place.
"""

from pathlib import Path
from statistics import fmean

from stages.lib.core.files import file_hash, read_jsonl, stage_dir, write_json
from stages.lib.core.params import Params
from stages.lib.core.params.policy import Algorithm
from stages.lib.core.recorder import write_manifest
from stages.lib.core.stage import stage_main
from stages.lib.core.types import Row
from stages.lib.data.prompts import check_template, template_hash
from stages.lib.lm.loading import setup_torch
from stages.lib.lm.saving import save_trained
from stages.ppo.common import reward_files
from stages.ppo.common.episodes import make_episodes
from stages.ppo.common.outputs import publish_outputs
from stages.ppo.trainer.loop import TrainingRun
from stages.ppo.trainer.roles import load_roles
from stages.ppo.trainer.update import PpoTrainer

REPORTED = (
    "score_mean",
    "judge_mean",
    "kl",
    "entropy",
    "response_length",
    "eos_rate",
    "kl_coef",
    "explained_variance",
)


def main(params: Params, round_: str) -> None:
    if params.algorithm is not Algorithm.ppo:
        from stages.ppo.alternatives.run import (
            main as alternative,  # with TRL, seconds that PPO need not wait
        )

        return alternative(params, round_)

    # 1. roles: policy and reference from SFT, critic and reward model from the reward stage
    setup_torch(params)
    folder, data = stage_dir(round_, "ppo"), stage_dir(round_, "prepare") / "data"
    sft, reward = stage_dir(round_, "sft"), stage_dir(round_, "reward")
    roles = load_roles(params, sft / "model", reward / "model")
    for manifest in (sft, reward):
        check_template(manifest / "manifest.json", roles.tokenizer, params.prepare.prompt_format)

    # 2. prompts: some are held out, to compare policies on
    rows = read_jsonl(data / "prompts_train.jsonl", f"dvc repro prepare@{round_}")
    prompts, held_out = make_episodes(rows, roles.tokenizer, params)
    trainer = PpoTrainer(roles, prompts, params.ppo, params.seed)

    # 3. updates, from the first or from where a killed run of the same inputs got to, until done or
    # in danger
    inputs = [
        data / "prompts_train.jsonl",
        sft / "model",
        reward / "model",
        *reward_files.reward_source_files(params),
    ]
    run = TrainingRun(trainer, held_out, params, round_, identity(params, inputs))
    run.train()

    # 4. the policy to keep: the judge's choice among those within the KL budget
    run.best.restore()
    for name, model in (("policy", roles.policy), ("critic", roles.critic)):
        save_trained(model, roles.tokenizer, folder / name)
    publish_outputs(run.work, folder)
    write_json(folder / "health.json", run.monitor.report())
    write_manifest(
        folder,
        stage="ppo",
        round_=round_,
        seed=params.seed,
        inputs=[data / "prompts_train.jsonl", sft / "manifest.json", reward / "manifest.json"],
        template_hash=template_hash(roles.tokenizer, params.prepare.prompt_format),
    )
    told = summary(run)
    run.recorder.finish(told)
    run.resume.clear()
    kept, before = run.best.found, run.before
    print(
        f"[ppo@{round_}] {told['stopped']}, {told['health']}; kept is the policy after update {kept.update}: "
        f"judge {before.judge:.2f} -> {kept.judge:.2f} on held-out prompts, KL {kept.kl:.2f} nats",
        flush=True,
    )


def summary(run: TrainingRun) -> Row:
    """What was kept of the run, and the means of the rollouts around it."""
    steps, kept = run.recorder.steps, run.best.found
    around = steps[
        max(kept.update - 2, 0) : kept.update + 1
    ]  # the rollout of update n is by the policy after n - 1
    return {name: fmean(step[name] for step in around) for name in REPORTED} | {
        "score_mean_first": steps[0]["score_mean"],
        "updates": run.trainer.updates,
        "episodes": run.trainer.updates * run.params.batch_size,
        "stopped": run.stopped or "completed",
        "policy_update": kept.update,
        "validation_judge_before": run.before.judge,
        "validation_judge": kept.judge,
        "validation_kl": kept.kl,
        "health": run.monitor.verdict,
        "dangers": run.monitor.dangers(kept.update + 1),  # up to the kept policy's own rollout
    }


def identity(params: Params, inputs: list[Path]) -> Row:
    """What a run is determined by: params, inputs, code."""
    chosen = params.model_dump(
        mode="json",
        include={
            "seed": True,
            "ppo": True,
            "model": True,
            "prepare": {"prompt_format", "max_prompt_tokens"},
        },
    )
    code = sorted(Path(__file__).parents[1].rglob("*.py"))
    return {"params": chosen, "files": {str(path): file_hash(path) for path in [*inputs, *code]}}


if __name__ == "__main__":
    stage_main("ppo", main)

"""PPO-RLHF: move the SFT model towards what the reward model likes, within a KL budget."""

import shutil
from pathlib import Path

from stages.errors import BadInput
from stages.models import prepare_torch, save_adapter
from stages.params import Params
from stages.ppo.roles import load_roles
from stages.ppo.run import Run
from stages.ppo.trainer import PpoTrainer
from stages.program import run_stage
from stages.prompts import check_template, encode, template_hash
from stages.records import Row, file_hash, read_jsonl, stage_dir, write_json, write_manifest

AVERAGED_UPDATES = 3
REPORTED = ("score_mean", "judge_mean", "kl", "entropy", "response_length", "eos_rate", "kl_coef", "explained_variance")


def main(params: Params, round_: str) -> None:
    # 1. roles: policy and reference from SFT, critic and reward model from the reward stage
    prepare_torch(params)
    folder, data = stage_dir(round_, "ppo"), stage_dir(round_, "prepare") / "data"
    sft, reward = stage_dir(round_, "sft"), stage_dir(round_, "reward")
    prompts = read_jsonl(data / "prompts_train.jsonl", f"dvc repro prepare@{round_}")
    if len(prompts) < params.ppo.batch_size:
        raise BadInput(
            f"{data}/prompts_train.jsonl has {len(prompts)} prompts, ppo.batch_size is {params.ppo.batch_size}: lower it or add prompts"
        )
    roles = load_roles(params, sft / "model", reward / "model")
    for manifest in (sft, reward):
        check_template(manifest / "manifest.json", roles.tokenizer, params.prepare.prompt_format)
    tokens = [
        encode(roles.tokenizer, row["prompt"], None, params.prepare.prompt_format, params.prepare.max_prompt_tokens)[0] for row in prompts
    ]
    trainer = PpoTrainer(roles, list(zip(prompts, tokens, strict=True)), params.ppo, params.seed)

    # 2. updates, from the first or from where a killed run of the same inputs got to, until done or in danger
    run = Run(trainer, params, round_, identity(params, [data / "prompts_train.jsonl", sft / "model", reward / "model"]))
    run.train()

    # 3. the policy to keep: the last one, unless it ends above the KL budget; then the last one seen within it
    steps = run.recorder.steps
    last = mean_of(steps[-AVERAGED_UPDATES:])
    kept = trainer.updates if last["kl"] <= params.ppo.max_kl else trainer.restore_within_budget()
    save_adapter(roles.policy, folder / "policy")
    save_adapter(roles.critic, folder / "critic")
    for name in ("checkpoints", "rollouts"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (run.work / name).mkdir(exist_ok=True)
        shutil.copytree(run.work / name, folder / name)
    write_json(folder / "health.json", run.health())
    write_manifest(
        folder,
        stage="ppo",
        round_=round_,
        seed=params.seed,
        inputs=[data / "prompts_train.jsonl", sft / "manifest.json", reward / "manifest.json"],
        template_hash=template_hash(roles.tokenizer, params.prepare.prompt_format),
    )
    run.recorder.finish(
        {name: last[name] for name in REPORTED}
        | {
            "score_mean_first": steps[0]["score_mean"],
            "updates": trainer.updates,
            "episodes": trainer.updates * params.ppo.batch_size,
            "stopped": run.stopped or "completed",
            "policy_update": kept,
            "health": run.monitor.verdict,
        }
    )
    run.resume.clear()
    back = "" if kept == trainer.updates else f"; above the budget, so the policy after update {kept} is kept"
    scores = f"score {steps[0]['score_mean']:.2f} -> {last['score_mean']:.2f}"
    print(f"[ppo@{round_}] {run.stopped or 'completed'}, {run.monitor.verdict}: {scores}, KL {last['kl']:.2f} nats{back}", flush=True)


def identity(params: Params, inputs: list[Path]) -> Row:
    """What a run is determined by: params, inputs, code."""
    chosen = params.model_dump(
        mode="json", include={"seed": True, "ppo": True, "model": True, "prepare": {"prompt_format", "max_prompt_tokens"}}
    )
    code = sorted(Path(__file__).parents[1].rglob("*.py"))
    return {"params": chosen, "files": {str(path): file_hash(path) for path in [*inputs, *code]}}


def mean_of(steps: list[Row]) -> dict[str, float]:
    return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}


if __name__ == "__main__":
    run_stage("ppo", main)

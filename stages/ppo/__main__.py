"""PPO-RLHF: move the SFT model towards what the reward model likes, within a KL budget."""

from stages.errors import BadInput
from stages.models import prepare_torch
from stages.params import Params, PpoParams
from stages.ppo.roles import Roles, load_roles
from stages.ppo.trainer import PpoTrainer, Rollout, planned_updates
from stages.program import run_stage
from stages.prompts import check_template, encode, template_hash
from stages.records import Recorder, Row, read_jsonl, stage_dir, write_jsonl, write_manifest

SHOWN = ["score_mean", "kl", "response_length", "distinct_2", "entropy"]
AVERAGED_UPDATES = 3
ABOVE, BELOW = "kl above budget", "policy does not move"


def main(params: Params, round_: str) -> None:
    # 1. roles: policy and reference from SFT, critic and reward model from the reward stage
    prepare_torch(params)
    folder, data = stage_dir(round_, "ppo"), stage_dir(round_, "prepare") / "data"
    sft, reward = stage_dir(round_, "sft"), stage_dir(round_, "reward")
    recorder = Recorder("ppo", round_, planned_updates(params.ppo))
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

    # 2. updates, until done or out of the KL budget
    rollouts: list[Row] = []
    stopped = ""
    while trainer.updates < trainer.planned_updates and not stopped:
        rollout, metrics = trainer.step()
        rollouts += rollout_rows(trainer.updates, rollout, roles)
        recorder.log(trainer.updates, metrics, SHOWN)
        stopped = kl_verdict([row["kl"] for row in recorder.steps], params.ppo)
        if trainer.updates % params.ppo.save_updates == 0:
            roles.policy.save_pretrained(folder / "checkpoints" / f"step_{trainer.updates:05d}")

    # 3. the policy to keep: the last one, unless it ends above the budget; then the last one seen within it
    last = mean_of(recorder.steps[-AVERAGED_UPDATES:])
    kept = trainer.updates if last["kl"] <= params.ppo.max_kl else trainer.restore_within_budget()
    (folder / "checkpoints").mkdir(exist_ok=True)
    roles.policy.save_pretrained(folder / "policy")
    roles.critic.save_pretrained(folder / "critic")
    write_jsonl(folder / "rollouts.jsonl", rollouts)
    write_manifest(
        folder,
        stage="ppo",
        round_=round_,
        seed=params.seed,
        inputs=[data / "prompts_train.jsonl", sft / "manifest.json", reward / "manifest.json"],
        template_hash=template_hash(roles.tokenizer, params.prepare.prompt_format),
    )
    recorder.finish(
        {name: last[name] for name in ("score_mean", "kl", "entropy", "response_length", "eos_rate", "kl_coef", "explained_variance")}
        | {
            "score_mean_first": recorder.steps[0]["score_mean"],
            "updates": trainer.updates,
            "episodes": trainer.updates * params.ppo.batch_size,
            "stopped": stopped or "completed",
            "policy_update": kept,
        }
    )
    scores = f"score {recorder.steps[0]['score_mean']:.2f} -> {last['score_mean']:.2f}"
    back = "" if kept == trainer.updates else f"; above the budget, so the policy after update {kept} is kept"
    print(f"[ppo@{round_}] {stopped or 'completed'}: {scores}, KL {last['kl']:.2f} nats{back}", flush=True)


def kl_verdict(kls: list[float], params: PpoParams) -> str:
    """Why the run has to stop, or nothing: `kl_patience` updates on end above max_kl, or below min_kl after warm-up (nats a sequence)."""
    recent = kls[-params.kl_patience :]
    if len(recent) == params.kl_patience and min(recent) > params.max_kl:
        return ABOVE
    if len(kls) >= params.kl_patience + params.warmup_updates and max(recent) < params.min_kl:
        return BELOW
    return ""


def rollout_rows(update: int, rollout: Rollout, roles: Roles) -> list[Row]:
    """One row an episode; `score` is calibrated but neither clipped nor penalised, `kl` in nats."""
    texts = roles.tokenizer.batch_decode(rollout.responses, skip_special_tokens=True)
    scores = (rollout.raw_scores - roles.score_mean) / roles.score_std
    return [
        {
            "update": update,
            "id": row["id"],
            "prompt": row["prompt"],
            "response": text,
            "score": round(score, 4),
            "kl": round(kl, 4),
            "eos": ended,
            "length": len(tokens),
        }
        for row, text, score, kl, ended, tokens in zip(
            rollout.rows, texts, scores.tolist(), rollout.sequence_kl.tolist(), rollout.ended.tolist(), rollout.responses, strict=True
        )
    ]


def mean_of(steps: list[Row]) -> dict[str, float]:
    return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}


if __name__ == "__main__":
    run_stage("ppo", main)

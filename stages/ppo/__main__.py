"""Stage ppo: trains the SFT model by PPO, RLOO or GRPO to a higher reward, within a KL budget.

If `algorithm` in params.yaml is `dpo` or `best_of_n`, `stages.ppo.alternatives` trains the policy
instead; if `ppo.engine` is not `local`, `stages.ppo.engines` has it trained elsewhere; and if
`ppo.model` names a policy, none is trained.

Inputs, in rounds/<round>/: prepare/data/prompts_train.jsonl, sft/model, reward/model,
champion/start.json and the policy that it names; and the models and functions that `ppo.rewards`
names.
Outputs, in rounds/<round>/ppo/: policy, critic, checkpoints, rollouts, metrics.json, metrics.jsonl,
curves.csv, health.json, manifest.json.

Run: python -m stages.ppo --round r0
"""

from collections.abc import Callable
from statistics import fmean

from stages.lib.core.champion import load_start
from stages.lib.core.files import is_placeholder, stage_dir
from stages.lib.core.params import Params
from stages.lib.core.params.policy import Algorithm, Engine
from stages.lib.core.rows import TrainingPrompt, read_rows
from stages.lib.core.stage import stage_main
from stages.lib.core.types import Metrics
from stages.lib.core.user_inputs import check_unchanged
from stages.lib.data.prompts import check_template
from stages.lib.lm import world
from stages.lib.lm.loading import check_model_lengths, setup_torch
from stages.lib.lm.saving import save_trained
from stages.lib.lm.world import held_share
from stages.ppo.common.episodes import make_episodes
from stages.ppo.common.outputs import publish_outputs
from stages.ppo.common.reference import check_reference_files
from stages.ppo.common.resume import run_identity
from stages.ppo.common.rewards import SERVED, check_served_model
from stages.ppo.trainer.advantages import ONLINE
from stages.ppo.trainer.loop import TrainingRun
from stages.ppo.trainer.roles import load_roles
from stages.ppo.trainer.update import PpoTrainer

# judge_score_mean: unless the judge only compares; reward_failed_share: with ppo.rewards
ROLLOUT_METRICS = (
    "score_mean",
    "judge_score_mean",
    "kl",
    "kl_per_token",
    "entropy",
    "response_length",
    "eos_rate",
    "kl_coef",
    "explained_variance",
    "reward_failed_share",
)


def main(params: Params, round_: str) -> None:
    setup_torch(params)  # before anything looks for a GPU
    for user_input in ("rewards", "primary_judge", "engine"):
        check_unchanged(user_input, params)
    # as before SFT: with shorter texts then, SFT did not have to run again
    check_model_lengths(stage_dir(round_, "sft") / "model", params)
    if is_placeholder(stage_dir(round_, "reward") / "model"):
        params.check_pairs_not_needed()
    if other := other_program(params):
        return other(params, round_)

    # 1. roles: policy and reference from SFT, critic and reward model from the reward stage. The
    # policy may start from the champion
    folder, data = stage_dir(round_, "ppo"), stage_dir(round_, "prepare") / "data"
    sft, reward = stage_dir(round_, "sft"), stage_dir(round_, "reward")
    check_reference_files(sft)
    champion = load_start(round_)
    start = champion.policy if champion else None
    url = params.ppo.reward_url
    served_model = check_served_model(url, reward / "model") if url else None
    roles = load_roles(params, sft / "model", reward / "model", start)
    if served_model:
        roles.rewards.expect_model(SERVED, served_model)
    for stage in (sft, reward):
        check_template(stage / "manifest.json", roles.tokenizer, params.prepare.prompt_format)

    # 2. prompts: some are held out, to compare policies on
    rows = read_rows(TrainingPrompt, data / "prompts_train.jsonl")
    roles.rewards.check_columns(rows)
    prompts, held_out = make_episodes(rows, roles.tokenizer, params)
    algorithm = ONLINE[params.algorithm](params)
    trainer = PpoTrainer(roles, prompts, params.ppo, params.seed, algorithm)
    print(f"[ppo@{round_}] the policy starts from {start or sft / 'model'}", flush=True)

    if roles.sharded:
        held = held_share(roles.policy)
        print(f"[ppo@{round_}] each process holds {held:.1%} of the policy's weights", flush=True)

    # 3. updates, until the last one or a danger; a killed run with the same inputs is resumed
    trained_on = [data / "prompts_train.jsonl", *([start] if start else [])]
    inputs = [*trained_on, sft / "model", reward / "model"]
    with world.exchanges():
        run = TrainingRun(trainer, held_out, params, round_, run_identity(params, inputs))
        run.train()

        # 4. outputs: the policy at the target KL, or the judge's best within the KL budget
        run.selector.select(
            trainer.updates, run.monitor.stopped, run.work / "checkpoints", params.model
        )
        save_trained(roles.policy, roles.tokenizer, folder / "policy")
    if not world.is_main():
        return
    name = params.algorithm.value
    publish_outputs(
        params,
        round_,
        run.work,
        roles.tokenizer,
        run.monitor.report(),
        trained_on,
        **({} if params.algorithm is Algorithm.ppo else {"algorithm": name}),
        reference=run.reference,
        started_from=str(start or sft / "model"),
    )
    metrics = summary(run)
    run.recorder.finish(metrics)
    print(
        f"[ppo@{round_}] {metrics['stopped']}, {metrics['health']}; {run.selector.describe()}",
        flush=True,
    )


def other_program(params: Params) -> Callable[[Params, str], None] | None:
    """What makes the policy in place of our loop; None: our loop. Imported here, since TRL takes
    seconds to import, and the online algorithms do not need it.
    """
    if params.ppo.model:
        from stages.ppo.alternatives.given import main as given

        return given
    if params.ppo.engine is not Engine.local:
        from stages.ppo.engines.run import main as engine

        return engine
    if params.algorithm not in ONLINE:
        from stages.ppo.alternatives.run import main as alternative

        return alternative
    return None


def summary(run: TrainingRun) -> Metrics:
    """The metrics of the kept policy, and means over the rollouts around it, before scaling."""
    steps, kept = run.recorder.steps, run.selector.best
    # steps[n] is update n + 1, whose rollout was sampled by the policy after update n
    nearby_steps = steps[max(kept.update - 2, 0) : kept.update + 1]
    rewards = [f"score_{source.name}" for source in run.ppo.rewards]
    names = [name for name in (*ROLLOUT_METRICS, *rewards) if name in nearby_steps[0]]
    means = {name: fmean(step[name] for step in nearby_steps) for name in names}
    return means | {
        **{f"{name}_first": steps[0][name] for name in ("score_mean", *rewards)},
        "updates": run.trainer.updates,
        "episodes": run.trainer.updates * run.ppo.batch_size,
        **run.outcome,
    }


if __name__ == "__main__":
    stage_main("ppo", main)

"""The policy stage if an engine trains, top to bottom; its outputs are those of PPO."""

import math
from collections.abc import Callable
from pathlib import Path

from stages.lib.core.errors import BadInput, Diverged, RondoError
from stages.lib.core.files import stage_dir, work_dir
from stages.lib.core.params import Params
from stages.lib.core.progress import print_line
from stages.lib.core.ray.cluster import RayCluster
from stages.lib.core.ray.job import RayJob
from stages.lib.core.recorder import MetricLogger
from stages.lib.core.types import StepMetrics
from stages.lib.lm.loading import MEMBERS, load_tokenizer
from stages.lib.lm.saving import save_trained, saved_weights_hash
from stages.ppo.alternatives.stage import (
    PolicyRun,
    TrainingContext,
    finish,
    load_models,
    load_prompts,
    prompts_path,
)
from stages.ppo.common.episodes import planned_updates
from stages.ppo.common.health import KL_KEY, Monitor
from stages.ppo.common.reference import load_weights
from stages.ppo.common.resume import Resume, run_identity
from stages.ppo.engines import make_job
from stages.ppo.engines.job import EngineJob, EngineMetrics, prompt_text

SHOWN = ("score_mean", "kl_per_token", "response_length", "entropy")
COMPARED_PROMPTS = 8


def main(params: Params, round_: str) -> None:
    # 1. inputs: the engine gets the prompts as texts, and the folders of SFT and reward model
    sft, reward = (stage_dir(round_, stage) / "model" for stage in ("sft", "reward"))
    prompts = load_prompts(params, round_)
    inputs = [prompts_path(round_), sft, reward]
    launcher = params.launcher  # an engine's checkpoint is for as many GPUs
    gpus = {"gpus": [launcher.nodes, launcher.gpus_per_node]}
    resume = Resume(work_dir(round_, "ppo"), run_identity(params, inputs) | gpus)
    job = make_job(params, round_, resume.folder)
    check_single(reward, job)

    def next_command() -> str:
        if left_out := job.write_inputs(prompts.train, prompts.tokenizer):
            line = f"{left_out} prompts left out: as texts they are other tokens"
            print_line(f"[ppo@{round_}] {line}")
        return job.command()

    # 2. the job, until its last update or a danger; a killed stage finds its job again
    monitor = Monitor(params.ppo)
    steps, ended = train(job, round_, next_command, monitor)

    if failed := job.failed_episodes():
        line = f"{job.title} has left out {failed} or more episodes that failed"
        print_line(f"[ppo@{round_}] {line}: see {job.log}")

    # 3. the policies that it has saved, validated on the held-out prompts
    recorder = MetricLogger("ppo", round_, total_steps=len(steps), logged_steps=steps)
    context = load_models(params, round_, prompts, resume, recorder, model=params.model)
    run = PolicyRun(context, KL_KEY)
    run.monitor = monitor
    run.begin(context.sft)
    updates = int(steps[-1]["step"]) if steps else 0
    policies = job.policies(updates, ended)
    last = max(policies, default=0)
    hashes = {
        update: validate(run, update, policies[update], sft, update == last)
        for update in sorted(policies)
    }

    # 4. the selected policy, and the outputs of PPO
    finish(
        run,
        round_,
        run.select(),
        name=job.name,
        longer="ppo.total_episodes",
        manifest={"engine": f"{job.name} {job.version}", "engine_policies": hashes}
        | {"engine_failed_episodes": failed},
    )


def check_single(reward: Path, job: EngineJob) -> None:
    """
    Raises:
        BadInput: the reward model is an ensemble, which the engine would not read.
    """
    if (reward / MEMBERS).exists():
        raise BadInput(
            f"{reward} is an ensemble, of which {job.title} would read the first member "
            "alone: set reward.ensemble to 1"
        )


def train(
    job: EngineJob,
    round_: str,
    next_command: Callable[[], str],
    monitor: Monitor,
) -> tuple[list[StepMetrics], bool]:
    """Run the engine's job, or what is left of it.

    Args:
        job: its files.
        round_: the round.
        next_command: makes the command of a new job.

    Returns:
        The metrics of its updates, and whether it has come to its end; else a danger has ended it.

    Raises:
        BadInput: there is no Ray cluster that takes the job, or the engine refuses its options.
        Diverged: a metric is not finite.
        RondoError: the job has failed, or somebody has stopped it, or it has left no metrics.
    """
    params = job.params
    assert params.launcher.ray_address, "checked with params.yaml"
    recorder = MetricLogger("ppo", round_, total_steps=planned_updates(params.ppo))
    metrics = EngineMetrics(job)

    def look(ended: bool = False) -> bool:
        """Log new updates; whether a danger ends the run. ended: the job has succeeded."""
        logged = {row["step"] for row in recorder.steps}
        for step in metrics.read(ended):
            if (number := int(step["step"])) in logged:
                continue
            if bad := [name for name, value in step.items() if not math.isfinite(value)]:
                ray_job.stop()
                raise Diverged(
                    f"{job.name}, update {number}: {', '.join(bad)} not finite. Next: lower "
                    "ppo.learning_rate"
                )
            values = {name: value for name, value in step.items() if name != "step"}
            recorder.log(number, values, [name for name in SHOWN if name in values])
            for finding in monitor.check(recorder.steps):
                recorder.log_progress(number, str(finding))
        return bool(monitor.stopped)

    cluster = RayCluster(params.launcher.ray_address)
    ray_job = RayJob(cluster, job.record, f"ppo@{round_}")
    ray_job.start(next_command)
    result = ray_job.follow(look)
    succeeded = result.status == "SUCCEEDED"
    if succeeded:
        look(ended=True)
    if not succeeded and not monitor.stopped:
        job.raise_refusal()
        raise RondoError(
            f"the job {ray_job.id} of {job.title} ended as {result.status}: "
            f"{result.message[:200]}\n{job.last_lines()}\nNext: mend what {job.log} says, and run "
            f"the stage again, which {job.next_run}"
        )
    if succeeded and not recorder.steps:
        raise RondoError(
            f"the job {ray_job.id} of {job.title} has succeeded, but left no metrics in "
            f"{job.events}: can the cluster write to this folder? Its output is in {job.log}"
        )
    return metrics.read(succeeded), succeeded


def validate(run: PolicyRun, update: int, folder: Path, sft: Path, last: bool) -> str:
    """Take a policy of the engine, validate it and save it as a checkpoint.

    Args:
        last: whether no later one is there. Earlier ones may be the SFT model still, e.g. in the
            warm-up.

    Returns:
        The hash of its weights as the engine saved them.

    Raises:
        BadInput: it is the SFT model still, or another model, or has another tokenizer.
    """
    context = run.context
    check_tokenizer(folder, context)
    try:
        load_weights(run.trained_policy.policy, folder, context.params.model)
    except (KeyError, RuntimeError) as error:
        raise BadInput(f"{folder}: other weights than those of {sft}: {error}") from error
    validation = run.selector.validate(update)
    if last and not validation.kl:
        raise BadInput(
            f"{folder}: after update {update} the engine's policy is the SFT model still (KL 0): "
            "raise ppo.learning_rate, or look at the engine's log"
        )
    run.updates = update
    context.recorder.log(update, validation.metrics, ["validation_kl", "validation_judge_score"])
    checkpoint = context.work / "checkpoints" / f"step_{update:05d}"
    save_trained(run.trained_policy.policy, context.tokenizer, checkpoint)
    return saved_weights_hash(folder)


def check_tokenizer(folder: Path, context: TrainingContext) -> None:
    """
    Raises:
        BadInput: the tokenizer in the folder reads prompts otherwise than that of the SFT model.
    """
    rows = [row for row, _ in context.prompts[:COMPARED_PROMPTS]]
    texts = [prompt_text(context.tokenizer, row["prompt"], context.params) for row in rows]
    saved, sft = (
        tokenizer(texts, add_special_tokens=False).input_ids
        for tokenizer in (load_tokenizer(folder), context.tokenizer)
    )
    for row, read, expected in zip(rows, saved, sft, strict=True):
        if read != expected:
            raise BadInput(
                f"{folder}: its tokenizer reads the prompt {row['id']} otherwise than that of the "
                "SFT model: the engine has saved another one"
            )

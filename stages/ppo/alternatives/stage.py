"""A policy that another trainer than ours trains: its inputs, samples and scores, its run, and the
outputs of the stage.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from stages.lib.core.files import stage_dir
from stages.lib.core.params import Params
from stages.lib.core.params.policy import Algorithm
from stages.lib.core.params.shared import ModelParams
from stages.lib.core.recorder import MetricLogger
from stages.lib.core.rows import RolloutRow, TrainingPrompt, read_rows
from stages.lib.core.types import Metrics, StateDict
from stages.lib.data.prompts import check_template
from stages.lib.judging.loading import load_primary_judge
from stages.lib.judging.primary import PrimaryJudge
from stages.lib.lm import world
from stages.lib.lm.loading import load_causal_lm, load_tokenizer
from stages.lib.lm.responses import Response, score_responses
from stages.lib.lm.saving import save_trained, weights_hash
from stages.lib.lm.scoring import load_reward_model_for, reads_texts
from stages.lib.lm.vllm_engine import sampling_engine
from stages.ppo.common.episodes import Episode, make_episodes
from stages.ppo.common.health import WARN, Finding, Monitor
from stages.ppo.common.outputs import describe_rows, publish_outputs, rollout_rows
from stages.ppo.common.policy_selection import PolicySelector, Validation
from stages.ppo.common.reference import SampledPolicy, check_reference_files
from stages.ppo.common.resume import Resume
from stages.ppo.common.rewards import RewardInputs, Rewards, load_rewards, of_stage
from stages.ppo.common.run import Run

NUM_DESCRIBED_SAMPLES = 256  # responses, at most, that describe a policy before and after training


@dataclass(frozen=True)
class TrainingContext:
    """The inputs of every algorithm."""

    params: Params
    recorder: MetricLogger
    resume: Resume  # saves states in the folder with the rollouts and checkpoints of the run
    saved: StateDict | None  # from which the run resumes
    reference: str  # hash of SFT's weights
    tokenizer: PreTrainedTokenizerBase
    sft: Any  # without adapters
    reward_model: Any  # None: there is none
    rewards: Rewards  # further rewards
    judge: PrimaryJudge  # the primary one
    prompts: list[Episode]  # to train on
    held_out: list[Episode]  # to validate on

    @property
    def work(self) -> Path:
        """Folder for the files of the run."""
        return self.resume.folder


class ScoredRollouts(NamedTuple):
    """Scores of B responses."""

    rows: list[RolloutRow]  # of the responses whose rewards are known
    rewards: list[float | None]  # that PPO would be given, not rounded; None: a further one failed


class TrainedPolicy(SampledPolicy):
    """A policy with its reference, which is the policy at the time when this object is made."""

    def __init__(self, policy: Any, context: TrainingContext) -> None:
        super().__init__(policy, context.tokenizer, sampling_engine(context.params.model))
        self.context = context

    def score(
        self, update: int, episodes: Sequence[Episode], responses: list[Response]
    ) -> ScoredRollouts:
        """Score the policy's responses: reward model, further rewards, KL.

        Raises:
            RewardsFailed: too many further rewards failed.
        """
        context, ppo = self.context, self.context.params.ppo
        inputs = RewardInputs([row for row, _ in episodes], responses)
        further_rewards = context.rewards.start(inputs)  # servers work during the forward passes
        scored = score_responses(
            responses,
            self.policy,
            self.reference,
            self.tokenizer,
            reward_model=context.reward_model,
            temperature=ppo.temperature,
        )
        results = further_rewards()
        results.check_share(ppo.max_failed_rewards)
        for failure in results.failures:
            context.recorder.log_progress(update, failure)
        kept = results.kept
        inputs = inputs.select(kept)
        ended, lengths = torch.tensor(inputs.ended), torch.tensor(inputs.lengths)
        parts = results.parts
        if (by_text := of_stage(parts)) is not None:
            calibrated = torch.tensor(by_text)
        elif context.reward_model:
            calibrated = torch.tensor([scored[i].score for i in kept])
        else:
            calibrated = context.rewards.weighted_sum(parts)
        rewards = context.rewards.combine(ppo, calibrated, parts, ended, lengths)
        scored_rows = rollout_rows(
            update,
            inputs,
            scores=calibrated,
            parts=parts,
            rewards=rewards,
            judge_scores=context.judge.scores(inputs.prompts, inputs.texts),
            kls=torch.tensor([scored[i].kl for i in kept]),
        )
        known = dict(zip(kept, rewards.tolist(), strict=True))
        return ScoredRollouts(scored_rows, [known.get(index) for index in range(len(responses))])


class PolicyRun(Run):
    """The policy during a run, and what is known about it.

    Args:
        context: what the training starts from.
        kl_key: the key of params.yaml that holds the policy near the reference.

    Attributes:
        saved: the state from which the run resumes.
        updates: the number of updates that the policy has had.
        initial_rows: rollout rows of the policy before training, which is SFT.
    """

    trained_policy: TrainedPolicy
    initial_rows: list[RolloutRow]

    def __init__(self, context: TrainingContext, kl_key: str) -> None:
        self.context, self.ppo = context, context.params.ppo
        self.recorder, self.work = context.recorder, context.work
        self.saved = saved = context.saved
        self.updates = saved["updates"] if saved else 0
        self.monitor = Monitor(self.ppo, kl_key)
        self.open_rollouts(saved)
        shuffled = random.Random(context.params.seed).sample(context.prompts, len(context.prompts))
        self.described_prompts = shuffled[:NUM_DESCRIBED_SAMPLES]

    def begin(self, policy: Any) -> None:
        """Validate and describe the policy before training."""
        self.use(policy)
        self.validate_first()
        self.initial_rows = self.sample_rows(0)

    def use(self, policy: Any) -> None:
        """Take a policy as the one that is trained; its reference is what it is now."""
        self.trained_policy = TrainedPolicy(policy, self.context)
        self.selector = PolicySelector(
            self.trained_policy,
            self.context.held_out,
            self.context.judge,
            self.ppo,
            self.context.params.seed,
        )

    def select(self) -> Validation:
        """Give the policy the weights of the selected one, after the last update: the one at the
        target KL, or the judge's best within the budget.
        """
        checkpoints, model = self.work / "checkpoints", self.context.params.model
        return self.selector.select(self.updates, self.monitor.stopped, checkpoints, model)

    def sample_rows(self, update: int) -> list[RolloutRow]:
        """Rollout rows of the current policy, which also go to the rollout files.

        The training prompts and the random numbers are the same at each call.
        """
        generator = torch.Generator().manual_seed(self.context.params.seed)
        prompt_ids = [tokens for _, tokens in self.described_prompts]
        responses = self.trained_policy.sample(prompt_ids, self.ppo, generator)
        rows = self.trained_policy.score(update, self.described_prompts, responses).rows
        self.rollouts.append(rows)
        return rows


class Prompts(NamedTuple):
    """The prompts to train on, and those held out to validate on, as `tokenizer` reads them.

    rewards: further rewards, which have checked the columns of the prompts.
    """

    tokenizer: Any
    train: list[Episode]
    held_out: list[Episode]
    rewards: Rewards


def load_prompts(params: Params, round_: str) -> Prompts:
    """
    Raises:
        BadInput: SFT or reward model were made with another rendering of prompts, or the files of
            the SFT model are not those that its stage wrote.
    """
    sft, reward = stage_dir(round_, "sft"), stage_dir(round_, "reward")
    check_reference_files(sft)
    tokenizer = load_tokenizer(sft / "model")
    for stage in (sft, reward):
        check_template(stage / "manifest.json", tokenizer, params.prepare.prompt_format)
    rows = read_rows(TrainingPrompt, prompts_path(round_))
    model = reward / "model"
    rewards = load_rewards(params, model if reads_texts(model, tokenizer) else None)
    rewards.check_columns(rows)
    return Prompts(tokenizer, *make_episodes(rows, tokenizer, params), rewards)


def load_models(
    params: Params,
    round_: str,
    prompts: Prompts,
    resume: Resume,
    recorder: MetricLogger,
    *,
    model: ModelParams,
    saved: StateDict | None = None,
) -> TrainingContext:
    """The inputs of a policy run.

    Args:
        model: section `model` of params.yaml, for the policy and its reference.
        saved: the state from which the run resumes.
    """
    reward = stage_dir(round_, "reward") / "model"
    reward_model = load_reward_model_for(prompts.tokenizer, reward, params.model)
    policy = load_causal_lm(stage_dir(round_, "sft") / "model", model)
    return TrainingContext(
        params=params,
        recorder=recorder,
        resume=resume,
        saved=saved,
        reference=weights_hash(policy),
        tokenizer=prompts.tokenizer,
        sft=policy,
        reward_model=reward_model,
        rewards=prompts.rewards,
        judge=load_primary_judge(params, round_),
        prompts=prompts.train,
        held_out=prompts.held_out,
    )


def prompts_path(round_: str) -> Path:
    return stage_dir(round_, "prepare") / "data/prompts_train.jsonl"


def data_paths(params: Params, round_: str) -> list[Path]:
    """The files that the algorithm trains on."""
    if params.algorithm is not Algorithm.dpo:
        return [prompts_path(round_)]
    return [prompts_path(round_), stage_dir(round_, "annotate") / "data/pairs_train.jsonl"]


def finish(
    run: PolicyRun,
    round_: str,
    kept: Validation,
    *,
    name: str,
    longer: str = "",
    manifest: Metrics | None = None,
) -> None:
    """Write the outputs of the stage.

    Args:
        run: after its last update; its policy has the weights that are kept.
        kept: the validation of that policy.
        name: of the algorithm or engine, for the message.
        longer: the setting that makes the training longer.
        manifest: further entries.
    """
    context, params = run.context, run.context.params
    folder = stage_dir(round_, "ppo")

    # 1. rollouts of the policy
    policy = run.trained_policy.policy.eval()
    rows = run.sample_rows(kept.update) if kept.update else run.initial_rows

    # 2. the outputs of PPO
    if not world.is_main():
        return
    save_trained(policy, context.tokenizer, folder / "policy")
    run.monitor.findings += no_gain_finding(kept)
    publish_outputs(
        params,
        round_,
        context.work,
        context.tokenizer,
        run.monitor.report(),
        data_paths(params, round_),
        algorithm=params.algorithm.value,
        reference=context.reference,
        **(manifest or {}),
    )
    context.recorder.finish(summary(run, rows))
    print(f"[ppo@{round_}] {name}: {run.selector.describe(longer)}", flush=True)


def summary(run: PolicyRun, rows: list[RolloutRow]) -> Metrics:
    """The metrics of the kept policy, with means over its rollout `rows`."""
    return {
        **describe_rows(rows, run.selector.first.length),
        "score_mean_first": fmean(row["score"] for row in run.initial_rows),
        "updates": run.updates,
        **run.outcome,
    }


def no_gain_finding(kept: Validation) -> list[Finding]:
    """A warning if the kept policy is SFT.

    Most signs of the health monitor read metrics that DPO, best-of-n and engines do not log.
    """
    if kept.update:
        return []
    cause, fix = (
        "no policy within the KL budget is better than SFT by the primary judge",
        "read the rollouts and the reward model's gate",
    )
    return [Finding("nothing gained", WARN, 0, "policy_update", 0.0, "above 0", cause, fix)]

"""Health monitor of a PPO run: reads its metrics after each update and reports problems, with the
likely cause and the first thing to change.

A sign compares the mean of the last WINDOW updates with the mean of the first WINDOW, or with a
fixed threshold. The signs of KL are different: they compare each of the last `kl_patience` updates
with a threshold, and have no warning.

Reward hacking on short texts does not show within one text. It shows across prompts (one praise
template for all) and in the correlation of the reward model with a second scorer, so there are
signs for both.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import NamedTuple

from stages.lib.core.params.policy import OnDanger, PpoParams
from stages.lib.core.types import Metrics, StepMetrics

WINDOW = 5
WARN, DANGER = "warn", "danger"
KL_KEY = "ppo.kl_coef"
KL_ABOVE_BUDGET = "kl above budget"


class Rounding(NamedTuple):
    """What rounding alone shows of a policy that does not move (0: not measured).

    kl_per_token: nats. clip_fraction: share of tokens, or of sequences with `loss_level:
    sequence`, whose ratio lies beyond the clip range. sequence_log_ratio: root mean square of the
    mean log-ratio of a sequence's tokens, in nats.
    """

    kl_per_token: float = 0.0
    clip_fraction: float = 0.0
    sequence_log_ratio: float = 0.0


NO_ROUNDING = Rounding()


@dataclass(frozen=True)
class Finding:
    """A sign's `metric` crossed its `threshold` at `update`; once per verdict."""

    sign: str
    verdict: str
    update: int
    metric: str
    value: float
    threshold: str
    cause: str
    first_fix: str

    def __str__(self) -> str:
        return (
            f"{self.verdict}: {self.sign}: {self.metric} {self.value:.3g}, "
            f"healthy: {self.threshold}. {self.cause}. First: {self.first_fix}"
        )


@dataclass(frozen=True)
class MetricHistory:
    """The metrics of the updates so far, one row per update."""

    steps: Sequence[StepMetrics]
    rounding: Rounding = NO_ROUNDING

    def first(self, name: str) -> float:
        """Mean of the first WINDOW updates."""
        return fmean([row[name] for row in self.steps[:WINDOW]])

    def last(self, name: str) -> float:
        """Mean of the last WINDOW updates."""
        return fmean([row[name] for row in self.steps[-WINDOW:]])

    def rise(self, name: str) -> float:
        return self.last(name) - self.first(name)

    def standardised_rise(self, name: str) -> float:
        """The rise of `<name>_mean`, in standard deviations of a rollout at the start."""
        return self.rise(f"{name}_mean") / max(self.first(f"{name}_std"), 1e-8)

    def ratio(self, name: str) -> float:
        return self.last(name) / max(self.first(name), 1e-8)

    def over_median(self, name: str) -> float:
        return self.last(name) / max(median(row[name] for row in self.steps), 1e-8)


Reading = tuple[str, float]  # verdict ("" if healthy), and the value that it is about


@dataclass(frozen=True)
class HealthCheck:
    """One sign of trouble: how to read it, and how to explain it.

    metric: its column in the metrics, then, after a comma, what is computed from it. threshold:
    the healthy values. evaluate: verdict and value. min_updates: of history that it needs.
    """

    name: str
    metric: str
    threshold: str
    cause: str
    first_fix: str
    evaluate: Callable[[MetricHistory, PpoParams], Reading]
    min_updates: int = 2 * WINDOW

    @property
    def column(self) -> str:
        """The column of the metrics that `metric` starts with."""
        return self.metric.split()[0].rstrip(",")


def worse_above(value: float, warn: float, danger: float) -> Reading:
    return (DANGER if value > danger else WARN if value > warn else ""), value


def worse_below(value: float, warn: float, danger: float) -> Reading:
    return (DANGER if value < danger else WARN if value < warn else ""), value


def kl_above_budget(history: MetricHistory, params: PpoParams) -> Reading:
    """The whole of the last `kl_patience` updates is above the budget, since KL swings from
    rollout to rollout.
    """
    recent = [row["kl_per_token"] for row in history.steps[-params.kl_patience :]]
    above = len(recent) == params.kl_patience and min(recent) > params.max_kl_per_token
    return (DANGER if above else ""), recent[-1]


def no_movement(history: MetricHistory, params: PpoParams) -> Reading:
    """The learning rate is still small during the warm-up, so these updates do not count. With
    `min_kl_per_token` 0 no KL is too small.
    """
    recent = [row["kl_per_token"] for row in history.steps[-params.kl_patience :]]
    too_early = len(history.steps) < params.kl_patience + params.warmup_updates
    least = params.min_kl_per_token
    if least:
        least = max(least, 2 * history.rounding.kl_per_token)
    moved = too_early or max(recent) >= least
    return ("" if moved else DANGER), recent[-1]


def reward_judge_divergence(history: MetricHistory, _: PpoParams) -> Reading:
    """A verdict only if they agreed at the start, and while the judge's score rises by less than a
    quarter of the reward's rise, each in standard deviations at the start. The correlation also
    falls when nearly all responses are good by both.
    """
    correlation = history.last("score_judge_correlation")
    reward, judge = history.standardised_rise("reward"), history.standardised_rise("judge_score")
    if history.first("score_judge_correlation") < 0.3 or reward < 0.3 or judge >= reward / 4:
        return "", correlation
    return worse_below(correlation, 0.3, 0.15)


def judge_prefers_sft(history: MetricHistory, _: PpoParams) -> Reading:
    """The judge's gain over SFT in standard errors, at an update that was validated.

    It is no hack if the reward falls too; DPO and best-of-n have no reward per update.
    """
    row = history.steps[-1]
    z = row["validation_gain_z"]
    rises = "reward_mean" not in row or history.rise("reward_mean") > 0
    return worse_below(z, -2.0, -3.0) if rises else ("", z)


def length_hack(history: MetricHistory, params: PpoParams) -> Reading:
    """Longer responses are a problem only if the reward rises with them, and if they take up more
    of `response_length`: a tenth of it for a warning, a quarter for a danger.
    """
    ratio = history.ratio("response_length")
    share = history.rise("response_length") / params.response_length
    if history.rise("reward_mean") <= 0 or share <= 0.1:
        return "", ratio
    return worse_above(ratio, 1.3, 1.6 if share > 0.25 else math.inf)


def clips_nothing(history: MetricHistory, params: PpoParams) -> Reading:
    """A verdict only with several optimizer steps per rollout: at the first one the ratio is 1, so
    that nothing can be clipped. Only ratios on one side are clipped, so rounding alone clips about
    half of its `clip_fraction`.
    """
    fraction = history.last("clip_fraction")
    several_steps = params.num_ppo_epochs > 1 or params.mini_batch_size < params.batch_size
    least = max(1e-4, history.rounding.clip_fraction)
    return (WARN if several_steps and fraction < least else ""), fraction


def critic_predicts_nothing(history: MetricHistory, _: PpoParams) -> Reading:
    """Below 0, a constant would predict the returns better: a warning for the mean, a danger if all
    of the last 2 * WINDOW updates are.
    """
    recent = [row["explained_variance"] for row in history.steps[-2 * WINDOW :]]
    mean = history.last("explained_variance")
    never = all(value < 0 for value in recent)  # a NaN, of equal returns, is not
    return (DANGER if never else WARN if mean < 0 else ""), mean


# The texts of a sign are written to health.json, so a change of wording changes that output.
HEALTH_CHECKS = (
    HealthCheck(
        KL_ABOVE_BUDGET,
        metric="kl_per_token",
        threshold="at most ppo.max_kl_per_token nats",
        cause="the policy drifts from the reference faster than beta holds it",
        first_fix="raise ppo.kl_coef, lower ppo.learning_rate",
        evaluate=kl_above_budget,
        min_updates=1,
    ),
    HealthCheck(
        "no movement",
        metric="kl_per_token",
        threshold="above ppo.min_kl_per_token nats, and twice what rounding gives",
        cause="the policy stays at the reference",
        first_fix="raise ppo.learning_rate, lower ppo.kl_coef",
        evaluate=no_movement,
        min_updates=1,
    ),
    HealthCheck(
        "reward does not move",
        metric="reward_mean, rise in standard deviations",
        threshold="0.1 or more",
        cause="the steps are too small or beta too large",
        first_fix="lower ppo.kl_coef, raise ppo.learning_rate",
        evaluate=lambda history, _: worse_below(
            history.standardised_rise("reward"), 0.1, -math.inf
        ),
        min_updates=3 * WINDOW,
    ),
    HealthCheck(
        "entropy collapse",
        metric="entropy, last / first",
        threshold="0.5 or more",
        cause="the policy grows certain faster than it learns",
        first_fix="lower ppo.learning_rate, raise ppo.entropy_coef or ppo.kl_coef",
        evaluate=lambda history, _: worse_below(history.ratio("entropy"), 0.5, 0.35),
    ),
    HealthCheck(
        "one text for all prompts",
        metric="distinct_2 across prompts, last / first",
        threshold="0.75 or more",
        cause="mode collapse",
        first_fix="raise ppo.kl_coef; read rollouts; let the next round replay the exploit",
        evaluate=lambda history, _: worse_below(history.ratio("distinct_2"), 0.75, 0.6),
    ),
    HealthCheck(
        "one ending for all prompts",
        metric="ending_share, rise",
        threshold="0.15 or less",
        cause="reward hacking: the reward model overpays an ending",
        first_fix="raise ppo.kl_coef; let the next round replay the exploit",
        evaluate=lambda history, _: worse_above(history.rise("ending_share"), 0.15, 0.25),
    ),
    HealthCheck(
        "reward and judge diverge",
        metric="score_judge_correlation",
        threshold="0.3 or more, or the judge's score rises by a quarter of the reward's rise",
        cause="reward hacking: the policy pleases the reward model alone",
        first_fix="raise ppo.kl_coef, stop earlier; add adversarial pairs to the reward model's "
        "data",
        evaluate=reward_judge_divergence,
    ),
    HealthCheck(
        "judge prefers SFT",
        metric="validation_gain_z",
        threshold="-2 or more while the reward rises",
        cause="reward hacking: the reward rises, and the primary judge finds the responses worse",
        first_fix="raise ppo.kl_coef, stop earlier; read rollouts; add pairs on which the reward "
        "model agrees with the judge",
        evaluate=judge_prefers_sft,
    ),
    HealthCheck(
        "length hack",
        metric="response_length, last / first",
        threshold="1.3 or less while the score rises, or less than a tenth of ppo.response_length",
        cause="the reward model pays for length",
        first_fix="raise ppo.length_penalty, balance the lengths of chosen and rejected",
        evaluate=length_hack,
    ),
    HealthCheck(
        "repetition",
        metric="repetition_3, rise",
        threshold="0.05 or less",
        cause="texts repeat themselves to please the reward model",
        first_fix="raise ppo.kl_coef, lower ppo.response_length",
        evaluate=lambda history, _: worse_above(history.rise("repetition_3"), 0.05, 0.1),
    ),
    HealthCheck(
        "value loss explodes",
        metric="value_loss, last / median",
        threshold="5 or less",
        cause="the critic cannot follow the returns",
        first_fix="lower ppo.critic_learning_rate, clip scores (ppo.score_clip)",
        evaluate=lambda history, _: worse_above(history.over_median("value_loss"), 5.0, 20.0),
    ),
    HealthCheck(
        "critic predicts nothing",
        metric="explained_variance",
        threshold="0 or more",
        cause="the critic predicts the returns worse than a constant, so its advantages are noise",
        first_fix="raise ppo.critic_warmup_epochs or ppo.num_critic_epochs, or try algorithm rloo",
        evaluate=critic_predicts_nothing,
    ),
    HealthCheck(
        "clips too much",
        metric="clip_fraction",
        threshold="0.35 or less",
        cause="each rollout is trained on for too long",
        first_fix="lower ppo.num_ppo_epochs or ppo.learning_rate",
        evaluate=lambda history, _: worse_above(history.last("clip_fraction"), 0.35, 0.6),
    ),
    HealthCheck(
        "clips nothing",
        metric="clip_fraction",
        threshold="above 0, and what rounding gives",
        cause="the steps are too small to learn from",
        first_fix="raise ppo.learning_rate",
        evaluate=clips_nothing,
    ),
)


class Monitor:
    """Reads the history after each update; each sign is reported at most once as a warning and
    once as a danger. Signs of columns that the metrics do not have are left out.

    kl_key: the key of params.yaml that holds the policy near the reference, named in the fixes.

    Attributes:
        rounding: thresholds below it are raised to it.
    """

    def __init__(self, params: PpoParams, kl_key: str = KL_KEY) -> None:
        self.params, self.kl_key, self.rounding = params, kl_key, NO_ROUNDING
        self.findings: list[Finding] = []

    def check_history(self, steps: Sequence[StepMetrics]) -> None:
        """Check update by update what an interrupted run has logged: the findings come back."""
        for number in range(len(steps)):
            self.check(steps[: number + 1])

    def check(self, steps: Sequence[StepMetrics]) -> list[Finding]:
        """The findings that are new after the last of `steps`."""
        history, new = MetricHistory(steps, self.rounding), []
        known = {(finding.sign, finding.verdict) for finding in self.findings}
        for sign in HEALTH_CHECKS:
            # the alternatives to PPO do not have all columns
            if len(steps) < sign.min_updates or sign.column not in steps[-1]:
                continue
            verdict, value = sign.evaluate(history, self.params)
            if verdict and (sign.name, verdict) not in known and (sign.name, DANGER) not in known:
                finding = Finding(
                    sign=sign.name,
                    verdict=verdict,
                    update=int(steps[-1]["step"]),
                    metric=sign.metric,
                    value=value,
                    threshold=sign.threshold,
                    cause=sign.cause,
                    first_fix=sign.first_fix.replace(KL_KEY, self.kl_key),
                )
                new.append(finding)
        self.findings += new
        return new

    @property
    def stopped(self) -> str:
        """The sign of the danger that ends the run, or "" (always, with `ppo.on_danger: warn`)."""
        if self.params.on_danger is not OnDanger.stop:
            return ""
        return next((finding.sign for finding in self.findings if finding.verdict == DANGER), "")

    def dangers(self, update: int) -> int:
        """The number of dangers found up to `update` that concern the selected policy: its KL is
        within the budget, whatever that of the rollouts was.
        """
        return sum(
            finding.verdict == DANGER
            and finding.update <= update
            and finding.sign != KL_ABOVE_BUDGET
            for finding in self.findings
        )

    @property
    def verdict(self) -> str:
        """The worst verdict of all findings, or "healthy"."""
        verdicts = {finding.verdict for finding in self.findings}
        return DANGER if DANGER in verdicts else WARN if WARN in verdicts else "healthy"

    def report(self) -> Metrics:
        """The contents of health.json."""
        return {"verdict": self.verdict, "findings": [asdict(finding) for finding in self.findings]}

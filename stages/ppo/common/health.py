"""How a PPO run is, read from its metrics as it goes: what is wrong, since when, the likely cause,
the first thing to change.

A sign compares the mean of the last WINDOW updates with the mean of the first WINDOW, or with a
band of its own. Reward hacking on short texts is seen across prompts (one praise template for all)
and by a second scorer that parts from the reward model, not within a text, so those are watched
too.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median

from stages.lib.core.params.policy import PpoParams
from stages.lib.core.types import Row

WINDOW = 5
WARN, DANGER = "warn", "danger"
KL_KEY = "ppo.kl_coef"


@dataclass(frozen=True)
class Finding:
    """`value` of `metric` is outside `band` at `update`, for the first time with this verdict."""

    sign: str
    verdict: str
    update: int
    metric: str
    value: float
    band: str
    cause: str
    first_fix: str

    def __str__(self) -> str:
        return f"{self.verdict}: {self.sign}: {self.metric} {self.value:.3g}, healthy {self.band}. {self.cause}. First: {self.first_fix}"


@dataclass(frozen=True)
class MetricHistory:
    """The metrics of the updates so far, one row each."""

    steps: Sequence[Row]

    def first(self, name: str) -> float:
        return fmean([row[name] for row in self.steps[:WINDOW]])

    def last(self, name: str) -> float:
        return fmean([row[name] for row in self.steps[-WINDOW:]])

    def rise(self, name: str) -> float:
        return self.last(name) - self.first(name)

    def ratio(self, name: str) -> float:
        return self.last(name) / max(self.first(name), 1e-8)


Reading = tuple[str, float]  # verdict, or "" where there is nothing to say; value


@dataclass(frozen=True)
class HealthCheck:
    """`read` says the verdict and the value of `metric`, which begins with its column; `after`
    updates of history it can be read.
    """

    name: str
    metric: str
    band: str
    cause: str
    first_fix: str
    read: Callable[[MetricHistory, PpoParams], Reading]
    after: int = 2 * WINDOW

    @property
    def column(self) -> str:
        return self.metric.split()[0].rstrip(",")


def worse_above(value: float, warn: float, danger: float) -> Reading:
    return (DANGER if value > danger else WARN if value > warn else ""), value


def worse_below(value: float, warn: float, danger: float) -> Reading:
    return (DANGER if value < danger else WARN if value < warn else ""), value


def kl_above_budget(history: MetricHistory, params: PpoParams) -> Reading:
    recent = [row["kl"] for row in history.steps[-params.kl_patience :]]
    return (
        DANGER if len(recent) == params.kl_patience and min(recent) > params.max_kl else ""
    ), recent[-1]


def no_movement(history: MetricHistory, params: PpoParams) -> Reading:
    recent = [row["kl"] for row in history.steps[-params.kl_patience :]]
    moved = (
        len(history.steps) < params.kl_patience + params.warmup_updates
        or max(recent) >= params.min_kl
    )
    return ("" if moved else DANGER), recent[-1]


def reward_does_not_move(history: MetricHistory, _: PpoParams) -> Reading:
    """In standard deviations of a rollout's rewards at the start."""
    gain = history.rise("reward_mean") / max(history.first("reward_std"), 1e-8)
    return (WARN if gain < 0.1 else ""), gain


def entropy_collapse(history: MetricHistory, _: PpoParams) -> Reading:
    return worse_below(history.ratio("entropy"), 0.5, 0.35)


def mode_collapse(history: MetricHistory, _: PpoParams) -> Reading:
    return worse_below(history.ratio("distinct_2"), 0.75, 0.6)


def one_ending_for_all(history: MetricHistory, _: PpoParams) -> Reading:
    return worse_above(history.rise("ending_share"), 0.15, 0.25)


def reward_judge_divergence(history: MetricHistory, _: PpoParams) -> Reading:
    """Only where they agreed to begin with."""
    if history.first("score_judge_correlation") < 0.3:
        return "", history.last("score_judge_correlation")
    return worse_below(history.last("score_judge_correlation"), 0.3, 0.15)


def length_hack(history: MetricHistory, _: PpoParams) -> Reading:
    ratio = history.ratio("response_length")
    return worse_above(ratio, 1.3, 1.6) if history.rise("reward_mean") > 0 else ("", ratio)


def repetition(history: MetricHistory, _: PpoParams) -> Reading:
    return worse_above(history.rise("repetition_3"), 0.05, 0.1)


def value_loss_explodes(history: MetricHistory, _: PpoParams) -> Reading:
    usual = median(row["value_loss"] for row in history.steps)
    return worse_above(history.last("value_loss") / max(usual, 1e-8), 5.0, 20.0)


def clips_too_much(history: MetricHistory, _: PpoParams) -> Reading:
    return worse_above(history.last("clip_fraction"), 0.35, 0.6)


def clips_nothing(history: MetricHistory, params: PpoParams) -> Reading:
    """With one step a rollout the ratio is always 1, and there is nothing to clip."""
    several = params.num_ppo_epochs > 1 or params.mini_batch_size < params.batch_size
    return (WARN if several and history.last("clip_fraction") < 1e-4 else ""), history.last(
        "clip_fraction"
    )


SIGNS = (
    HealthCheck(
        "kl above budget", "kl", "at most ppo.max_kl nats a sequence", "the policy drifts from the reference faster than beta holds it",
        "raise ppo.kl_coef, lower ppo.learning_rate", kl_above_budget, after=1,
    ),
    HealthCheck(
        "no movement", "kl", "above ppo.min_kl nats a sequence", "the policy stays at the reference",
        "raise ppo.learning_rate, lower ppo.kl_coef", no_movement, after=1,
    ),
    HealthCheck(
        "reward does not move", "reward_mean, rise in standard deviations", "0.1 or more", "the steps are too small or beta too large",
        "lower ppo.kl_coef, raise ppo.learning_rate", reward_does_not_move, after=3 * WINDOW,
    ),
    HealthCheck(
        "entropy collapse", "entropy, last / first", "0.5 or more", "the policy grows certain faster than it learns",
        "lower ppo.learning_rate, raise ppo.entropy_coef or ppo.kl_coef", entropy_collapse,
    ),
    HealthCheck(
        "one text for all prompts", "distinct_2 across prompts, last / first", "0.75 or more", "mode collapse",
        "raise ppo.kl_coef; read rollouts; let the next round replay the exploit", mode_collapse,
    ),
    HealthCheck(
        "one ending for all prompts", "ending_share, rise", "0.15 or less", "reward hacking: the reward model overpays an ending",
        "raise ppo.kl_coef; let the next round replay the exploit", one_ending_for_all,
    ),
    HealthCheck(
        "scorers part", "score_judge_correlation", "0.3 or more", "reward hacking: the policy pleases the reward model alone",
        "raise ppo.kl_coef, stop earlier; add adversarial pairs to the reward model's data", reward_judge_divergence,
    ),
    HealthCheck(
        "length hack", "response_length, last / first", "1.3 or less while the score rises", "the reward model pays for length",
        "raise ppo.length_penalty, balance the lengths of chosen and rejected", length_hack,
    ),
    HealthCheck(
        "repetition", "repetition_3, rise", "0.05 or less", "texts repeat themselves to please the reward model",
        "raise ppo.kl_coef, lower ppo.response_length", repetition,
    ),
    HealthCheck(
        "value loss explodes", "value_loss, last / median", "5 or less", "the critic cannot follow the returns",
        "lower ppo.critic_learning_rate, clip scores (ppo.score_clip)", value_loss_explodes,
    ),
    HealthCheck(
        "clips too much", "clip_fraction", "0.35 or less", "each rollout is trained on for too long",
        "lower ppo.num_ppo_epochs or ppo.learning_rate", clips_too_much,
    ),
    HealthCheck(
        "clips nothing", "clip_fraction", "above 0", "the steps are too small to learn from",
        "raise ppo.learning_rate", clips_nothing,
    ),
)  # fmt: skip


def first_danger(findings: Sequence[Finding]) -> str:
    """The sign of the first danger among them, or nothing."""
    return next((finding.sign for finding in findings if finding.verdict == DANGER), "")


class Monitor:
    """Reads the history after each update; each sign is reported once as a warning and once as a
    danger, where its metric is there.

    kl_key: what holds the policy to the reference.
    """

    def __init__(self, params: PpoParams, kl_key: str = KL_KEY) -> None:
        self.params, self.kl_key = params, kl_key
        self.findings: list[Finding] = []

    def read(self, steps: Sequence[Row]) -> list[Finding]:
        """What is new after the last of `steps`."""
        history, new = MetricHistory(steps), []
        known = {(finding.sign, finding.verdict) for finding in self.findings}
        for sign in SIGNS:
            if len(steps) < sign.after or sign.column not in steps[-1]:
                continue
            verdict, value = sign.read(history, self.params)
            if verdict and (sign.name, verdict) not in known and (sign.name, DANGER) not in known:
                fix = sign.first_fix.replace(KL_KEY, self.kl_key)
                new.append(
                    Finding(
                        sign.name,
                        verdict,
                        steps[-1]["step"],
                        sign.metric,
                        value,
                        sign.band,
                        sign.cause,
                        fix,
                    )
                )
        self.findings += new
        return new

    def dangers(self, update: int) -> int:
        """How many signs were dangers by `update`."""
        return sum(
            finding.verdict == DANGER and finding.update <= update for finding in self.findings
        )

    @property
    def verdict(self) -> str:
        verdicts = {finding.verdict for finding in self.findings}
        return DANGER if DANGER in verdicts else WARN if WARN in verdicts else "healthy"

    def report(self) -> Row:
        return {"verdict": self.verdict, "findings": [asdict(finding) for finding in self.findings]}

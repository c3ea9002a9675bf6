"""Badcases found: responses of the policy to training prompts that show a failure, by cause
(stages/replay/badcases.py says what each is).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, zip_longest
from statistics import median

from stages.lib.core.params.evaluation import ReplayParams
from stages.lib.core.types import Prompt
from stages.lib.judging.lexicon import LexiconScores, lexicon_scores
from stages.lib.judging.pairwise import JURY
from stages.replay.badcases import Badcase, Cause, Report, badcase_id

# of a normal distribution: standard deviation / median absolute deviation (Rousseeuw & Croux 1993)
MAD_TO_STD = 1.4826


@dataclass(frozen=True)
class PolicySample:
    """A response of the policy.

    score: calibrated; kl: nats a sequence; origin: PPO update, or "fresh"; rival: the response that
    the jury has compared it with, SFT's unless it says otherwise; votes: the jury's, by judge and
    `together` (1: this one is better); exploits: those in the response; bare: the score without
    them.
    """

    prompt_id: str
    prompt: Prompt
    response: str
    score: float
    kl: float
    ended: bool
    judged: LexiconScores
    origin: int | str
    rival: str | None = None
    votes: Mapping[str, float] = field(default_factory=dict)
    exploits: tuple[str, ...] = ()
    bare: float | None = None


@dataclass(frozen=True)
class BadcaseThresholds:
    """What counts as a failure. kl: nats a sequence; lexicon: whether it is one of the judges."""

    replay: ReplayParams
    kl: float
    lexicon: bool


def kl_limit(kls: list[float], outlier: float) -> float:
    """The KL (nats a sequence) at a robust z-score of `outlier`."""
    middle = median(kls)
    return middle + outlier * MAD_TO_STD * median(abs(kl - middle) for kl in kls)


# Each tells how bad a sample is, larger is worse, or None where the cause does not fire.
def judge_loses(sample: PolicySample, limits: BadcaseThresholds) -> float | None:
    return sample.score if sample.votes.get(JURY) == 0 else None


def blind_spot(sample: PolicySample, limits: BadcaseThresholds) -> float | None:
    unloved = limits.lexicon and sample.judged.sentiment_plain < limits.replay.judge_low
    overpaid = sample.bare is not None and sample.bare < limits.replay.score_high
    return (
        sample.score if sample.score >= limits.replay.score_high and (unloved or overpaid) else None
    )


def repetition(sample: PolicySample, limits: BadcaseThresholds) -> float | None:
    return (
        sample.judged.repetition if sample.judged.repetition >= limits.replay.repetition else None
    )


def no_eos(sample: PolicySample, limits: BadcaseThresholds) -> float | None:
    return None if sample.ended else sample.score


def kl_outlier(sample: PolicySample, limits: BadcaseThresholds) -> float | None:
    return sample.kl if sample.kl > limits.kl else None


CAUSES: dict[Cause, Callable[[PolicySample, BadcaseThresholds], float | None]] = {
    Cause[each.__name__]: each for each in (judge_loses, blind_spot, repetition, no_eos, kl_outlier)
}


def find_badcases(
    samples: Iterable[PolicySample],
    limits: BadcaseThresholds,
    round_: str,
    policy: str,
    known: Collection[str],
) -> list[Badcase]:
    """At most replay.max_badcases of them: the causes take turns, each giving its worst first.
    known: ids of earlier rounds', tried again anyway."""
    found: dict[Cause, dict[str, tuple[float, Badcase]]] = {cause: {} for cause in CAUSES}
    for sample in samples:
        for cause, severity in CAUSES.items():
            if (bad := severity(sample, limits)) is not None:
                case = badcase(sample, cause, round_, policy)
                if case.id not in known:
                    found[cause][case.id] = (bad, case)
    ranked = (
        [case for _, case in sorted(cases.values(), key=lambda item: (-item[0], item[1].id))]
        for cases in found.values()
    )
    turns = (case for case in chain.from_iterable(zip_longest(*ranked)) if case)
    return [case for case, _ in zip(turns, range(limits.replay.max_badcases), strict=False)]


def badcase(sample: PolicySample, cause: Cause, round_: str, policy: str) -> Badcase:
    return Badcase(
        id=badcase_id(sample.prompt, sample.response, cause),
        round=round_,
        cause=cause,
        stage="reward" if cause is Cause.blind_spot else "ppo",
        policy=policy,
        origin=sample.origin,
        prompt_id=sample.prompt_id,
        prompt=sample.prompt,
        response=sample.response,
        score=round(sample.score, 4),
        kl=round(sample.kl, 4),
        ended=sample.ended,
        **{name: round(value, 4) for name, value in asdict(sample.judged).items()},
        exploits=list(sample.exploits) if cause is Cause.blind_spot else [],
        sft=sample.rival,
        votes=dict(sample.votes),
    )


def reported(reports: Sequence[Report], scores: Sequence[float], round_: str) -> list[Badcase]:
    """What people have reported, with the reward model's calibrated score of each and the lexicon's
    opinion.
    """
    judged = lexicon_scores(
        [report.prompt for report in reports], [report.response for report in reports]
    )
    return [
        Badcase(
            id=report.id,
            round=round_,
            cause=Cause.human,
            origin=report.by,
            prompt_id=f"report-{report.id}",
            prompt=report.prompt,
            response=report.response,
            score=round(score, 4),
            **{name: round(value, 4) for name, value in asdict(said).items()},
            better=report.better,
            note=report.note,
        )
        for report, score, said in zip(reports, scores, judged, strict=True)
    ]

"""Find badcases: responses of the policy to training prompts that show a failure, by cause.

The causes are explained in stages/replay/badcases.py.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice, zip_longest
from statistics import median

from stages.lib.core.params import Params
from stages.lib.core.params.evaluation import ReplayParams
from stages.lib.core.params.judging import JudgeName
from stages.lib.core.types import Prompt
from stages.lib.judging.lexicon import LexiconScores
from stages.lib.judging.pairwise import JURY
from stages.lib.metrics.text import repetition_n
from stages.replay.badcases import Badcase, Cause, Report, badcase_id

# standard deviation / median absolute deviation of a normal distribution (Rousseeuw & Croux 1993)
MAD_TO_STD = 1.4826


@dataclass(frozen=True)
class PolicySample:
    """A response of the policy.

    score: calibrated; None without a reward model. kl: nats per sequence. origin: PPO update,
    `fresh`, or `again` in a retest. rival: the response that the jury compared it with, if it did;
    SFT's, unless in a retest. votes: the jury's, by judge and `together` (1: this one is better,
    0.5: a tie). exploits: those in the response. stripped_score: the score without them. lexicon:
    its scores, if it is a judge.
    """

    prompt_id: str
    prompt: Prompt
    response: str
    score: float | None
    kl: float
    ended: bool
    origin: int | str
    rival: str | None = None
    votes: Mapping[str, float] = field(default_factory=dict)
    exploits: tuple[str, ...] = ()
    stripped_score: float | None = None
    lexicon: LexiconScores | None = None


@dataclass(frozen=True)
class BadcaseThresholds:
    """What counts as a failure.

    kl: nats per sequence. lexicon: whether the lexicon is one of the judges.
    """

    replay: ReplayParams
    kl: float
    lexicon: bool


def kl_limit(kls: list[float], outlier: float) -> float:
    """The KL (nats per sequence) at a robust z-score of `outlier`."""
    middle = median(kls)
    return middle + outlier * MAD_TO_STD * median(abs(kl - middle) for kl in kls)


def badcase_thresholds(params: Params, samples: Iterable[PolicySample]) -> BadcaseThresholds:
    """Thresholds from params; that of KL is relative to the samples' KL."""
    return BadcaseThresholds(
        replay=params.replay,
        kl=kl_limit([sample.kl for sample in samples], params.replay.kl_outlier),
        lexicon=JudgeName.lexicon.value in params.evaluate.judges,
    )


# Each cause returns how bad a sample is (larger is worse), or None if the sample does not fail.
# Without a reward model, samples of a cause that it would order are equally bad.
def judge_loses(sample: PolicySample, limits: BadcaseThresholds) -> float | None:
    return sample.score or 0.0 if sample.votes.get(JURY) == 0 else None


def blind_spot(sample: PolicySample, limits: BadcaseThresholds) -> float | None:
    high = limits.replay.score_high
    if sample.score is None:
        return None
    lexicon = sample.lexicon
    disliked = lexicon is not None and lexicon.sentiment_plain < limits.replay.sentiment_low
    overpaid = sample.stripped_score is not None and sample.stripped_score < high
    return sample.score if sample.score >= high and (disliked or overpaid) else None


def repetition(sample: PolicySample, limits: BadcaseThresholds) -> float | None:
    repeated = repetition_n(sample.response, 3)
    return repeated if repeated >= limits.replay.repetition else None


def no_eos(sample: PolicySample, limits: BadcaseThresholds) -> float | None:
    return None if sample.ended else sample.score or 0.0


def kl_outlier(sample: PolicySample, limits: BadcaseThresholds) -> float | None:
    return sample.kl if sample.kl > limits.kl else None


CAUSES: dict[Cause, Callable[[PolicySample, BadcaseThresholds], float | None]] = {
    Cause.judge_loses: judge_loses,
    Cause.blind_spot: blind_spot,
    Cause.repetition: repetition,
    Cause.no_eos: no_eos,
    Cause.kl_outlier: kl_outlier,
}


def find_badcases(
    samples: Iterable[PolicySample],
    limits: BadcaseThresholds,
    round_: str,
    policy: str,
    known: Collection[str],
) -> list[Badcase]:
    """At most replay.max_badcases badcases; the causes take turns, each giving its worst first.

    Args:
        policy: hash of the policy's weights.
        known: ids of earlier rounds' badcases, which are retested anyway.
    """
    by_cause: dict[Cause, dict[str, tuple[float, Badcase]]] = {cause: {} for cause in CAUSES}
    for sample in samples:
        for cause, severity in CAUSES.items():
            if (value := severity(sample, limits)) is not None:
                case = make_badcase(sample, cause, round_, policy)
                if case.id not in known:
                    by_cause[cause][case.id] = (value, case)
    ranked = (
        [case for _, case in sorted(cases.values(), key=lambda item: (-item[0], item[1].id))]
        for cases in by_cause.values()
    )
    turns = (case for case in chain.from_iterable(zip_longest(*ranked)) if case)
    return list(islice(turns, limits.replay.max_badcases))


def make_badcase(sample: PolicySample, cause: Cause, round_: str, policy: str) -> Badcase:
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
        score=rounded(sample.score),
        kl=round(sample.kl, 4),
        ended=sample.ended,
        **text_columns(sample.response, sample.lexicon),
        exploits=list(sample.exploits) if cause is Cause.blind_spot else [],
        sft=sample.rival,
        votes=dict(sample.votes),
    )


def rounded(score: float | None) -> float | None:
    return None if score is None else round(score, 4)


def text_columns(response: str, lexicon: LexiconScores | None) -> dict[str, float]:
    """A response's repetition, and the lexicon's scores if it is a judge."""
    scores = {"repetition": repetition_n(response, 3)} | (asdict(lexicon) if lexicon else {})
    return {name: round(value, 4) for name, value in scores.items()}


def reported_badcases(
    reports: Sequence[Report],
    scores: Sequence[float | None],
    lexicon: Sequence[LexiconScores | None],
    round_: str,
) -> list[Badcase]:
    """People's reports as badcases.

    scores: the reward model's calibrated score of each response, if there is one. lexicon: what the
    lexicon says of each, if it is a judge.
    """
    return [
        Badcase(
            id=report.id,
            round=round_,
            cause=Cause.human,
            origin=report.by,
            prompt_id=f"report-{report.id}",
            prompt=report.prompt,
            response=report.response,
            score=rounded(score),
            **text_columns(report.response, lexicon_scores),
            better=report.better,
            note=report.note,
        )
        for report, score, lexicon_scores in zip(reports, scores, lexicon, strict=True)
    ]

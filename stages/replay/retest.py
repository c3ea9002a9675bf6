"""Retests of badcases: does a new response fail in the same way?"""

from collections import Counter
from collections.abc import Sequence

from stages.lib.judging.pairwise import JURY
from stages.replay.badcases import Badcase, Cause, Retest, State
from stages.replay.mining import CAUSES, BadcaseThresholds, PolicySample


def retest(
    badcases: Sequence[Badcase],
    samples: Sequence[Sequence[PolicySample]],
    ranked: Sequence[bool],
    limits: BadcaseThresholds,
    round_: str,
) -> list[Badcase]:
    """The badcases with one more retest, and the state that follows from it.

    Some pass by chance, since sampling is random: compare with the retest by a badcase's own round.

    Args:
        samples: for each badcase new responses of `round_`'s policy, with the badcase's exploits.
        ranked: for each badcase whether the reward model puts the better answer first.
    """
    retests = [
        Retest(
            round=round_,
            fired=sum(still_fails(case, sample, limits) for sample in case_samples),
            of=len(case_samples),
            ranked=is_ranked,
        )
        for case, case_samples, is_ranked in zip(badcases, samples, ranked, strict=True)
    ]
    return [case.with_retest(result) for case, result in zip(badcases, retests, strict=True)]


def comparison_response(case: Badcase) -> str | None:
    """The text that the jury compares a new response with; None if the cause needs no jury.

    SFT's response, if the jury had preferred it; for a report the better answer, or else the
    reported one.
    """
    if case.cause is Cause.human:
        return case.better or case.response
    return case.sft if case.cause is Cause.judge_loses else None


def still_fails(case: Badcase, sample: PolicySample, limits: BadcaseThresholds) -> bool:
    """Whether a new response fails as the badcase did.

    For a report: the jury finds it worse than the better answer, or not better than the bad one.
    """
    if case.cause is not Cause.human:
        return CAUSES[case.cause](sample, limits) is not None
    return sample.votes[JURY] == 0 if case.better else sample.votes[JURY] != 1


def count_by_cause(badcases: Sequence[Badcase], state: State) -> dict[str, int]:
    return dict(Counter(case.cause.value for case in badcases if case.state is state))

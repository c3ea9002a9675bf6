"""What became of badcases: asked again, scored again."""

from collections import Counter
from collections.abc import Sequence

from stages.lib.judging.pairwise import JURY
from stages.replay.badcases import Badcase, Cause, Retest, State
from stages.replay.mining import CAUSES, BadcaseThresholds, PolicySample


def retest(
    badcases: Sequence[Badcase],
    answers: Sequence[Sequence[PolicySample]],
    ranked: Sequence[bool],
    limits: BadcaseThresholds,
    round_: str,
) -> list[Badcase]:
    """The badcases with one more try, and the state that it leaves them in.

    answers: new responses of `round_`'s policy to each badcase's prompt, their exploits those of
    the badcase. ranked: whether its reward model puts the better answer first. Sampling alone
    repairs some: compare with what a badcase's own round makes of it.
    """
    tries = [
        Retest(
            round=round_,
            fired=sum(still_fails(case, answer, limits) for answer in some),
            of=len(some),
            ranked=right,
        )
        for case, some, right in zip(badcases, answers, ranked, strict=True)
    ]
    return [case.tried(attempt) for case, attempt in zip(badcases, tries, strict=True)]


def comparison_response(case: Badcase) -> str | None:
    """What a new response is compared with: SFT's where the jury had preferred it, what a person
    wants, or what a person does not want.
    """
    if case.cause is Cause.human:
        return case.better or case.response
    return case.sft if case.cause is Cause.judge_loses else None


def still_fails(case: Badcase, answer: PolicySample, limits: BadcaseThresholds) -> bool:
    """Whether a new response fails as the badcase did; a person's: the jury finds it below the
    better answer, or not above the bad.
    """
    if case.cause is not Cause.human:
        return CAUSES[case.cause](answer, limits) is not None
    return answer.votes[JURY] == 0 if case.better else answer.votes[JURY] != 1


def by_cause(badcases: Sequence[Badcase], state: State) -> dict[str, int]:
    return dict(Counter(case.cause.value for case in badcases if case.state is state))

"""What became of badcases: asked again, scored again."""

from collections import Counter
from collections.abc import Sequence

from stages.badcases import Badcase, Cause, State, Try
from stages.judges import judge, outcome
from stages.replay.mine import CAUSES, Limits, Sample


def try_again(
    badcases: Sequence[Badcase], answers: Sequence[Sequence[Sample]], ranked: Sequence[bool], limits: Limits, round_: str
) -> list[Badcase]:
    """The badcases with one more try, and the state that it leaves them in.

    answers: new responses of `round_`'s policy to each badcase's prompt, their exploits those of the badcase. ranked: whether its
    reward model puts the better answer first. Sampling alone repairs some: compare with what a badcase's own round makes of it.
    """
    tries = [
        Try(round=round_, fired=sum(fires(case, answer, limits) for answer in some), of=len(some), ranked=right)
        for case, some, right in zip(badcases, answers, ranked, strict=True)
    ]
    return [case.tried(attempt) for case, attempt in zip(badcases, tries, strict=True)]


def fires(case: Badcase, answer: Sample, limits: Limits) -> bool:
    """Whether a new response fails as the badcase did; a person's: the judges find it below the better answer, or not above the bad."""
    if case.cause is not Cause.human:
        return CAUSES[case.cause](answer, limits) is not None
    against_bad, against_better = (
        text and outcome(answer.judged, judge([case.prompt], [text])[0], limits.tie_margin) for text in (case.response, case.better)
    )
    return against_better == 0 if case.better else against_bad != 1


def by_cause(badcases: Sequence[Badcase], state: State) -> dict[str, int]:
    return dict(Counter(case.cause.value for case in badcases if case.state is state))

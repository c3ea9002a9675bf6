"""What became of badcases: asked again, scored again."""

from collections import Counter
from collections.abc import Sequence

from stages.records import Row
from stages.replay.mine import CAUSES, Limits, Sample


def try_again(badcases: list[Row], answers: Sequence[Sample], better: Sequence[float], bad: Sequence[float], limits: Limits) -> list[Row]:
    """The badcases with their new state, `repaired` or `open`.

    answers: a policy's new response to each badcase's prompt, its exploits those of the badcase. better, bad: a reward
    model's scores of the better and the bad answer, used where there is a better one. Repaired: the cause does not fire on
    the new response, and the reward model ranks the better answer first. Sampling alone repairs some: what a badcase's own
    round makes of it is the rate to compare with.
    """
    rows = []
    for case, answer, high, low in zip(badcases, answers, better, bad, strict=True):
        fires = CAUSES[case["cause"]](answer, limits) is not None
        ranked = case["better"] is None or high > low
        rows.append({**case, "state": "open" if fires or not ranked else "repaired"})
    return rows


def repaired_by_cause(badcases: list[Row]) -> dict[str, int]:
    return dict(Counter(row["cause"] for row in badcases if row["state"] == "repaired"))

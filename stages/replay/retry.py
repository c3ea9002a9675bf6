"""What became of the last rounds' badcases: asked again, scored again."""

from collections import Counter
from collections.abc import Sequence

from stages.judges import judge
from stages.records import Row
from stages.replay.mine import CAUSES, Limits, Sample
from stages.replay.sampling import Draw


def try_again(badcases: list[Row], draws: Sequence[Draw], better: Sequence[float], bad: Sequence[float], limits: Limits) -> list[Row]:
    """The badcases with their new state, `repaired` or `open`.

    draws: this round's policy on each badcase's prompt, once. better, bad: this round's reward model on the better
    and the bad answer, used where there is a better one. Repaired: the cause does not fire on the new response
    (with the exploits of that time), and the reward model ranks the better answer first.
    """
    rows = []
    for case, draw, high, low in zip(badcases, draws, better, bad, strict=True):
        [judged] = judge([case["prompt"]], [draw.text])
        rival = judge([case["prompt"]], [case["sft"]])[0] if case["sft"] is not None else None
        sample = Sample(case["prompt_id"], case["prompt"], draw.text, draw.score, draw.kl, draw.ended, judged, "again", case["sft"], rival)
        then = Limits(limits.replay, case["exploits"], limits.kl, limits.tie_margin)
        fires = CAUSES[case["cause"]](sample, then) is not None
        ranked = case["better"] is None or high > low
        rows.append({**case, "state": "open" if fires or not ranked else "repaired"})
    return rows


def repaired_by_cause(badcases: list[Row]) -> dict[str, int]:
    return dict(Counter(row["cause"] for row in badcases if row["state"] == "repaired"))

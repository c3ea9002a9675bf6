"""The judges that can label: by name in `load_judge`. Another one is a class with the methods of stages.preferences.Judge."""

from collections.abc import Sequence

from stages.endpoint import Endpoint
from stages.judges import judge, outcome
from stages.params import JudgeName, Params
from stages.preferences import Comparison, Judge, Preference, Verdict
from stages.records import Row

PREFERENCE = {1.0: Preference.a, 0.5: Preference.tie, 0.0: Preference.b}


class Lexicon:
    """The verdict of stages/judges.py; its confidence is half the distance of the judged sentiments."""

    def __init__(self, tie_margin: float) -> None:
        self.tie_margin = tie_margin

    def about(self) -> Row:
        return {"judge": "lexicon"}

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict | None]:
        prompts = [each.prompt for each in comparisons]
        sides = judge(prompts, [each.a for each in comparisons]), judge(prompts, [each.b for each in comparisons])
        return [
            Verdict(PREFERENCE[outcome(a, b, self.tie_margin)], abs(a.sentiment - b.sentiment) / 2) for a, b in zip(*sides, strict=True)
        ]

    def cost(self) -> Row:
        return {}

    def usage(self) -> Row:
        return {}


def load_judge(params: Params) -> Judge:
    if params.annotate.judge is JudgeName.endpoint:
        return Endpoint(params.annotate.endpoint)
    return Lexicon(params.evaluate.tie_margin)

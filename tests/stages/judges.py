"""A judge for tests."""

from collections.abc import Sequence

from stages.lib.core.types import Prompt
from stages.lib.judging.pairwise import Comparison, LocalJudge, Preference, Verdict


class LongerWins(LocalJudge):
    """It only compares; `shown` are the pairs that it was shown."""

    def __init__(self) -> None:
        super().__init__("longer")
        self.shown: list[tuple[str, str]] = []

    def scores(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> None:
        """None: it only compares."""

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict | None]:
        self.shown += [(row.a, row.b) for row in comparisons]
        gaps = [len(row.a) - len(row.b) for row in comparisons]
        return [
            Verdict(Preference.a if gap > 0 else Preference.b if gap else Preference.tie)
            for gap in gaps
        ]

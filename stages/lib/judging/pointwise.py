"""Judges of preferences that need no server: the lexicon, and any number that a response can be
given.
"""

from collections.abc import Sequence

from stages.lib.core.types import Prompt, ScoreFunction
from stages.lib.core.user_functions import check_scores
from stages.lib.judging.pairwise import Comparison, LocalJudge, Preference, Verdict


class PointwiseJudge(LocalJudge):
    """Prefers the response with the higher number; up to `margin` apart they tie. A text is asked
    about once.
    """

    def __init__(self, name: str, number: ScoreFunction, margin: float) -> None:
        super().__init__(name)
        self.number, self.margin = number, margin
        self.known: dict[tuple[str, str], float] = {}

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict | None]:
        """
        Raises:
            RondoError: not one finite number a response.
        """
        texts = {
            (str(each.prompt), text): each.prompt
            for each in comparisons
            for text in (each.a, each.b)
        }
        new = {key: prompt for key, prompt in texts.items() if key not in self.known}
        self.known |= dict(
            zip(new, self._ask(list(new.values()), [text for _, text in new]), strict=True)
        )
        gaps = [
            self.known[str(each.prompt), each.a] - self.known[str(each.prompt), each.b]
            for each in comparisons
        ]
        return [
            Verdict(
                Preference.tie
                if abs(gap) <= self.margin
                else Preference.a
                if gap > 0
                else Preference.b
            )
            for gap in gaps
        ]

    def _ask(self, prompts: list[Prompt], texts: list[str]) -> list[float]:
        numbers = self.number(prompts, texts) if texts else []
        check_scores(numbers, len(texts), f"judge {self.name}")
        return numbers

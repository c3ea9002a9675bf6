"""Judges for tests."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

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


def compared_texts(request: Mapping[str, Any]) -> tuple[str, str]:
    """The responses A and B of a request to a language model."""
    question = request["messages"][1]["content"]
    a, b = re.findall(r"<response_\w>\n(.*?)\n</response_\w>", question, re.S)
    return a, b


def prefers(a: float, b: float) -> str:
    """A language model's answer, which prefers the larger one of two numbers."""
    return json.dumps({"reason": "so", "preference": "A" if a > b else "B" if b > a else "tie"})

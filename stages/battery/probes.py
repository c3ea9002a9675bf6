"""What a score makes of texts that it should not prefer: corrupted good ones, and bad ones with an
ending.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stages.battery.metrics import win
from stages.lib.core.types import Prompt, Row, ScoreFunction
from stages.lib.data.corruptions import PromptResponse, corruptions


@dataclass(frozen=True)
class ProbeResult:
    """A text that should score below `original`. rise: what its change (corruption, ending) has
    added to its score.
    """

    prompt: Prompt
    text: str
    score: float
    original: str
    original_score: float
    rise: float

    @property
    def fooled(self) -> float:
        """1 where the text beats the original, 0.5 where they tie."""
        return win(self.score, self.original_score)


def run_corruption_probes(
    pairs: Sequence[Row],
    chosen: Sequence[float],
    score: ScoreFunction,
    worth: Mapping[str, float],
    seed: int,
) -> dict[str, list[ProbeResult]]:
    """Each probe on the chosen texts, whose scores are known; those that a probe leaves as they
    are, are left out.
    """
    texts: list[PromptResponse] = [(row["prompt"], row["chosen"]) for row in pairs]
    tried = {}
    for name, corrupted in corruptions(texts, worth, seed).items():
        changed = [place for place, text in enumerate(texts) if corrupted[place] != text]
        scores = score(
            [corrupted[place][0] for place in changed], [corrupted[place][1] for place in changed]
        )
        tried[name] = [
            ProbeResult(
                *corrupted[place], told, texts[place][1], chosen[place], told - chosen[place]
            )
            for place, told in zip(changed, scores, strict=True)
        ]
    return tried


def run_ending_probes(
    endings: Sequence[str],
    pairs: Sequence[Row],
    chosen: Sequence[float],
    rejected: Sequence[float],
    score: ScoreFunction,
) -> list[list[ProbeResult]]:
    """Each ending after the rejected texts of the pairs that the score ranks rightly, against their
    chosen texts.
    """
    right = [
        place
        for place, (better, worse) in enumerate(zip(chosen, rejected, strict=True))
        if better > worse
    ]
    tried = []
    for ending in endings:
        texts = [pairs[place]["rejected"] + ending for place in right]
        scores = score([pairs[place]["prompt"] for place in right], texts)
        tried.append(
            [
                ProbeResult(
                    pairs[place]["prompt"],
                    text,
                    told,
                    pairs[place]["chosen"],
                    chosen[place],
                    told - rejected[place],
                )
                for place, text, told in zip(right, texts, scores, strict=True)
            ]
        )
    return tried

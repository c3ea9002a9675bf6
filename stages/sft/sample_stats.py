"""Has SFT learnt to write as the demonstrations do: does it end, how long is it, does it repeat
itself, does it recite.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stages.lib.metrics.text import repetition_n, tokens

MEMORISED_WORDS = 8  # words in a row that are no longer said by chance


@dataclass(frozen=True)
class GeneratedTexts:
    """Texts of one author. lengths: tokens, of each at most the tokens that the other author may
    write; ended: EOS within these.
    """

    texts: Sequence[str]
    lengths: Sequence[int]
    ended: Sequence[bool]


def compare_with_demonstrations(
    responses: GeneratedTexts, demonstrations: GeneratedTexts, training_texts: Iterable[str]
) -> dict[str, float]:
    """SFT's responses beside held-out demonstrations, which say what is usual.

    eos_rate: share that ended; length_ratio: of mean lengths; repetition_3: mean share of repeated
    3-grams; memorised: share of texts with RECITED words in a row from one training text;
    memorised_words: the longest such run of the responses.
    """
    sources = VerbatimIndex(training_texts)
    runs, usual = (
        [sources.longest(text) for text in each.texts] for each in (responses, demonstrations)
    )
    return {
        "eos_rate": mean(responses.ended),
        "eos_rate_demonstrations": mean(demonstrations.ended),
        "length": mean(responses.lengths),
        "length_ratio": mean(responses.lengths) / mean(demonstrations.lengths),
        "repetition_3": mean([repetition_n(text, 3) for text in responses.texts]),
        "repetition_3_demonstrations": mean(
            [repetition_n(text, 3) for text in demonstrations.texts]
        ),
        "memorised": mean([run >= MEMORISED_WORDS for run in runs]),
        "memorised_demonstrations": mean([run >= MEMORISED_WORDS for run in usual]),
        "memorised_words": max(runs),
    }


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class VerbatimIndex:
    """Texts that can be asked for the longest run of words that another text copies from one of
    them (Carlini et al. 2023's extraction).
    """

    LEAST = 4  # words; shorter runs count as 0

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = [tokens(text) for text in texts]
        self.places: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
        for number, words in enumerate(self.texts):
            for start in range(len(words) - self.LEAST + 1):
                self.places[tuple(words[start : start + self.LEAST])].append((number, start))

    def longest(self, text: str) -> int:
        words = tokens(text)
        return max(
            (
                run(words[start:], self.texts[number][place:])
                for start in range(len(words) - self.LEAST + 1)
                for number, place in self.places.get(tuple(words[start : start + self.LEAST]), ())
            ),
            default=0,
        )


def run(a: Sequence[str], b: Sequence[str]) -> int:
    """How many words two texts have in common at their beginnings."""
    for length, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return length
    return min(len(a), len(b))

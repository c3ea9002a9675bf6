"""Compare generated texts with human demonstrations: termination, length, repetition,
memorisation.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stages.lib.metrics.text import repetition_n, tokens

# A copied run of this many words is unlikely to be a coincidence.
MEMORISED_WORDS = 8


@dataclass(frozen=True)
class GeneratedTexts:
    """N texts of one author, a model or the people who wrote the demonstrations.

    lengths: tokens per text; for demonstrations at most the model's response limit.
    ended: whether the text ends (EOS) within that limit.
    """

    texts: Sequence[str]
    lengths: Sequence[int]
    ended: Sequence[bool]


def compare_with_demonstrations(
    responses: GeneratedTexts, demonstrations: GeneratedTexts, training_texts: Iterable[str]
) -> dict[str, float]:
    """Metrics of SFT's responses beside those of held-out demonstrations, the usual values.

    Args:
        responses: of the SFT model.
        demonstrations: held-out, truncated to the same number of tokens.
        training_texts: completions that SFT was trained on.

    Returns:
        eos_rate: share of texts that end with EOS. length: mean tokens; length_ratio: over the mean
        of the demonstrations. repetition_3: mean share of repeated 3-grams. memorised: share of
        texts with `MEMORISED_WORDS` words in a row from one training text; memorised_words: the
        longest such run in the responses. The suffix `_demonstrations` marks the usual value.
    """
    index = VerbatimIndex(training_texts)
    response_runs = [index.longest(text) for text in responses.texts]
    demonstration_runs = [index.longest(text) for text in demonstrations.texts]
    return {
        "eos_rate": mean(responses.ended),
        "eos_rate_demonstrations": mean(demonstrations.ended),
        "length": mean(responses.lengths),
        "length_ratio": mean(responses.lengths) / mean(demonstrations.lengths),
        "repetition_3": mean([repetition_n(text, 3) for text in responses.texts]),
        "repetition_3_demonstrations": mean(
            [repetition_n(text, 3) for text in demonstrations.texts]
        ),
        "memorised": mean([run >= MEMORISED_WORDS for run in response_runs]),
        "memorised_demonstrations": mean([run >= MEMORISED_WORDS for run in demonstration_runs]),
        "memorised_words": max(response_runs),
    }


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class VerbatimIndex:
    """An index of texts that finds the longest run of words copied from one of them (Carlini et al.
    2023's extraction).
    """

    LEAST = 4  # words; shorter runs count as 0

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = [tokens(text) for text in texts]
        # {LEAST words: [(text number, index of the first of these words)]}
        self.positions: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
        for number, words in enumerate(self.texts):
            for start in range(len(words) - self.LEAST + 1):
                self.positions[tuple(words[start : start + self.LEAST])].append((number, start))

    def longest(self, text: str) -> int:
        """The number of words of the longest run that `text` shares with one indexed text."""
        words = tokens(text)
        return max(
            (
                common_prefix(words[start:], self.texts[number][position:])
                for start in range(len(words) - self.LEAST + 1)
                for number, position in self.positions.get(
                    tuple(words[start : start + self.LEAST]), ()
                )
            ),
            default=0,
        )


def common_prefix(a: Sequence[str], b: Sequence[str]) -> int:
    """The number of words that two texts share at their beginnings."""
    for length, (word, other) in enumerate(zip(a, b, strict=False)):
        if word != other:
            return length
    return min(len(a), len(b))

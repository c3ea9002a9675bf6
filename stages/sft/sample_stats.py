"""Compare generated texts with human demonstrations: termination, length, repetition,
memorisation.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from stages.lib.lm.responses import Response
from stages.lib.metrics.stats import mean
from stages.lib.metrics.text import repetition_n, tokens

# A copied run of this many words is unlikely to be a coincidence.
MEMORISED_WORDS = 8


def compare_with_demonstrations(
    responses: Sequence[Response],
    demonstrations: Sequence[Response],
    training_texts: Iterable[str],
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

    def describe(texts: Sequence[Response]) -> dict[str, float]:
        runs = [index.longest(text.text) for text in texts]
        return {
            "eos_rate": mean([text.ended for text in texts]),
            "length": mean([len(text.tokens) for text in texts]),
            "repetition_3": mean([repetition_n(text.text, 3) for text in texts]),
            "memorised": mean([run >= MEMORISED_WORDS for run in runs]),
            "memorised_words": max(runs),
        }

    metrics, usual = describe(responses), describe(demonstrations)
    return {
        **metrics,
        "length_ratio": metrics["length"] / usual["length"],
        **{
            f"{name}_demonstrations": usual[name]
            for name in ("eos_rate", "repetition_3", "memorised")
        },
    }


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

"""What a reward model has to beat: shortcuts that need no language model."""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stages.lib.core.types import Prompt, Row

TFIDF_PAIRS = 20_000  # at most, at random: more do not change what words can tell
TOP_WORDS = 10


class WordModel(NamedTuple):
    """Held-out accuracy of Bradley-Terry on words, and the words (or pairs of words) that speak
    most for and against a text.
    """

    accuracy: float
    chosen: list[str]
    rejected: list[str]


def more_wins_accuracy(pairs: Sequence[Row], measure: Callable[[str], float]) -> float:
    """Share of pairs whose chosen text has more of `measure` than the rejected one; equal ones
    count half.
    """
    differences = [measure(pair["chosen"]) - measure(pair["rejected"]) for pair in pairs]
    return sum(
        1.0 if difference > 0 else 0.5 if difference == 0 else 0.0 for difference in differences
    ) / len(pairs)


def longest_wins_accuracy(pairs: Sequence[Row]) -> float:
    """Share of pairs whose chosen text is the longer one, in characters; equal lengths count half."""
    return more_wins_accuracy(pairs, len)


def tfidf_accuracy(train: list[Row], held_out: list[Row], seed: int) -> float:
    """Held-out accuracy of `word_model`."""
    return word_model(train, held_out, seed).accuracy


def word_model(train: list[Row], held_out: list[Row], seed: int) -> WordModel:
    """Bradley-Terry on TF-IDF features: logistic regression on the difference of a pair's vectors,
    without intercept.

    On at most `TFIDF_PAIRS` pairs of each side, at random by `seed`. Texts without a word are as
    good as a coin.
    """
    from scipy.sparse import vstack
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    train, held_out = subsample(train, TFIDF_PAIRS, seed), subsample(held_out, TFIDF_PAIRS, seed)

    def texts(rows: list[Row]) -> list[str]:
        return [
            prompt_text(row["prompt"]) + row[side]
            for side in ("chosen", "rejected")
            for row in rows
        ]

    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    try:
        features = vectorizer.fit_transform(texts(train))
    except ValueError:  # its vocabulary is empty
        return WordModel(0.5, [], [])
    new = vectorizer.transform(texts(held_out))
    better = features[: len(train)] - features[len(train) :]
    model = LogisticRegression(fit_intercept=False, C=10.0, max_iter=1000, random_state=seed)
    model.fit(vstack([better, -better]), [1] * len(train) + [0] * len(train))
    margins = model.decision_function(new[: len(held_out)] - new[len(held_out) :])
    names, weights = vectorizer.get_feature_names_out(), model.coef_[0]
    order = weights.argsort(kind="stable")
    return WordModel(
        float((margins > 0).mean() + 0.5 * (margins == 0).mean()),
        [str(names[at]) for at in order[::-1][:TOP_WORDS] if weights[at] > 0],
        [str(names[at]) for at in order[:TOP_WORDS] if weights[at] < 0],
    )


def subsample(rows: list[Row], most: int, seed: int) -> list[Row]:
    """The rows, or `most` of them at random in their order."""
    if len(rows) <= most:
        return rows
    return [rows[index] for index in sorted(random.Random(seed).sample(range(len(rows)), most))]


def prompt_text(prompt: Prompt) -> str:
    """The prompt as a text that a response can follow: messages do not end with the space before
    it.
    """
    return (
        prompt
        if isinstance(prompt, str)
        else "".join(message["content"] + " " for message in prompt)
    )

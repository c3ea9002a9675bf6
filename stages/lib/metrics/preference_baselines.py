"""Baselines that a reward model must beat: rules and word models without a language model."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from stages.lib.core.progress import progress, tracked
from stages.lib.core.rows import SIDES, AnyRow, PairTexts
from stages.lib.core.types import Prompt
from stages.lib.metrics.text import UNSPACED

TFIDF_PAIRS = 20_000  # pairs per side at most: more hardly change the accuracy of a word model
TOP_WORDS = 10
TOKEN_PATTERN = rf"[^\W{UNSPACED}]{{2,}}|[{UNSPACED}]"  # scikit-learn's, and characters


class WordModel(NamedTuple):
    """Held-out accuracy of a Bradley-Terry model on words, and its strongest features.

    accuracy: share of held-out pairs ranked correctly. chosen, rejected: the words (or pairs of
    words) with the largest weights for and against a text.
    """

    accuracy: float
    chosen: list[str]
    rejected: list[str]


def more_wins_accuracy(pairs: Sequence[PairTexts], measure: Callable[[str], float]) -> float:
    """Share of pairs whose chosen text has the larger `measure`; equal measures count half."""
    differences = [measure(pair["chosen"]) - measure(pair["rejected"]) for pair in pairs]
    return sum(
        1.0 if difference > 0 else 0.5 if difference == 0 else 0.0 for difference in differences
    ) / len(pairs)


def word_model(train: Sequence[PairTexts], held_out: Sequence[PairTexts], seed: int) -> WordModel:
    """Fit a Bradley-Terry model on TF-IDF features.

    That is logistic regression, without intercept, on the difference of a pair's vectors.

    Args:
        train: pairs with prompt, chosen and rejected; at most TFIDF_PAIRS are used, at random.
        held_out: pairs for the accuracy; the same limit.
        seed: seed of the random choice.

    Returns:
        The model; accuracy 0.5 and no words if the training texts contain no word.
    """
    from scipy.sparse import vstack
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    train, held_out = subsample(train, TFIDF_PAIRS, seed), subsample(held_out, TFIDF_PAIRS, seed)

    def texts(pairs: Sequence[PairTexts]) -> Iterator[str]:
        listed = [prompt_text(pair["prompt"]) + pair[side] for side in SIDES for pair in pairs]
        return tracked("TF-IDF", listed, len(listed), "texts")

    vectorizer = TfidfVectorizer(token_pattern=TOKEN_PATTERN, ngram_range=(1, 2), sublinear_tf=True)
    try:
        features = vectorizer.fit_transform(texts(train))
    except ValueError:  # empty vocabulary: no text contains a word
        return WordModel(0.5, [], [])
    new = vectorizer.transform(texts(held_out))
    better = features[: len(train)] - features[len(train) :]
    model = LogisticRegression(fit_intercept=False, C=10.0, max_iter=1000, random_state=seed)
    # Each pair in both orders, so that the two classes are balanced and mirror each other
    with progress("fitting the word model"):
        model.fit(vstack([better, -better]), [1] * len(train) + [0] * len(train))
    margins = model.decision_function(new[: len(held_out)] - new[len(held_out) :])
    names, weights = vectorizer.get_feature_names_out(), model.coef_[0]
    order = weights.argsort(kind="stable")
    return WordModel(
        float((margins > 0).mean() + 0.5 * (margins == 0).mean()),
        [str(names[index]) for index in order[::-1][:TOP_WORDS] if weights[index] > 0],
        [str(names[index]) for index in order[:TOP_WORDS] if weights[index] < 0],
    )


def subsample(rows: Sequence[AnyRow], most: int, seed: int) -> Sequence[AnyRow]:
    """All rows, or `most` of them at random, in their original order."""
    if len(rows) <= most:
        return rows
    return [rows[index] for index in sorted(random.Random(seed).sample(range(len(rows)), most))]


def prompt_text(prompt: Prompt) -> str:
    """The prompt as text to put before a response.

    Each message gets a space after it, because a response to messages has no leading space.
    """
    return (
        prompt
        if isinstance(prompt, str)
        else "".join(message["content"] + " " for message in prompt)
    )

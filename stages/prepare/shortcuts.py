"""What the texts are like, and what a reward model could learn from the pairs instead of what
people meant.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from stages.lib.core.types import Row
from stages.lib.metrics.preference_baselines import (
    longest_wins_accuracy,
    more_wins_accuracy,
    prompt_text,
    subsample,
    word_model,
)
from stages.lib.metrics.stats import wilson_interval
from stages.lib.metrics.text import EMOJI
from stages.prepare.formats import source_texts

PERCENTILES = (5, 50, 95)
LANGUAGE_ROWS = 1000
LEAST_CONFIDENCE = 0.5  # below it a language is `unsure`: of very short texts
PAIRS = 20_000  # at most, at random, that shortcuts are measured on
TELLING = 0.6  # an accuracy from which a shortcut pays
PUNCTUATION = re.compile(
    f"[{re.escape(string.punctuation)}\u2026\u201c\u201d\u2018\u2019\u3001\u3002\uff01\uff0c\uff1f]"
)
FIELDS = ("prompt", "completion", "chosen", "rejected")


class Shortcut(NamedTuple):
    """Accuracy of the rule on pairs of chosen and rejected texts; what it means if it pays, and
    what to do.
    """

    rule: str
    reversed_rule: str
    measure: Callable[[Sequence[Row]], float]
    meaning: str


def counted(pattern: re.Pattern[str]) -> Callable[[Sequence[Row]], float]:
    return lambda pairs: more_wins_accuracy(
        pairs, lambda text: sum(1 for _ in pattern.finditer(text))
    )


SHORTCUTS = (
    Shortcut(
        "longest wins",
        "shortest wins",
        longest_wins_accuracy,
        "lengths alone predict the label; balance them",
    ),
    Shortcut(
        "more ! wins",
        "fewer ! wins",
        counted(re.compile("!")),
        "exclamation marks alone predict the label; balance them",
    ),
    Shortcut(
        "more punctuation wins",
        "less punctuation wins",
        counted(PUNCTUATION),
        "punctuation alone predicts the label; balance it",
    ),
    Shortcut(
        "more emoji wins",
        "fewer emoji wins",
        counted(EMOJI),
        "emoji alone predict the label; balance them",
    ),
)
WORDS_RULE, WORDS_MEANING = (
    "TF-IDF",
    "words alone predict the label; a reward model must do better than that, and may look no further",
)


def lengths(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """{text: {unit: {p5, p50, p95, max, mean}}} of prompt, completion, chosen and rejected, in
    words and in characters.
    """
    measured = {}
    for field in FIELDS:
        texts = [
            prompt_text(row["prompt"]) if field == "prompt" else row[field]
            for row in rows
            if field in row
        ]
        if texts:
            counts = {
                "words": [len(text.split()) for text in texts],
                "characters": [len(text) for text in texts],
            }
            measured[field] = {unit: spread(values) for unit, values in counts.items()}
    return measured


def spread(values: Sequence[int]) -> dict[str, float]:
    shares = {
        f"p{share}": float(value)
        for share, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)
    }
    return {
        **{name: round(value, 1) for name, value in shares.items()},
        "max": max(values),
        "mean": round(float(np.mean(values)), 2),
    }


def languages(rows: Sequence[Row], seed: int) -> dict[str, Any]:
    """{sampled: rows, shares: {ISO 639 code: share}} over a sample of rows, the commonest first."""
    sample = subsample(list(rows), LANGUAGE_ROWS, seed)
    identifier = language_identifier()
    found = Counter(language(identifier.classify(" ".join(source_texts(row)))[0]) for row in sample)
    return {
        "sampled": len(sample),
        "shares": {name: round(count / len(sample), 3) for name, count in ranked(found)},
    }


def ranked(counts: Counter[str]) -> Iterable[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def language(code: str) -> str:
    return "unsure" if code == "und" else code


@cache
def language_identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(
        MODEL_FILE, norm_probs=True, min_confidence=LEAST_CONFIDENCE
    )


def shortcuts(train: list[Row], held_out: list[Row], seed: int) -> dict[str, Any]:
    """Accuracies of the rules, on at most 20,000 pairs of each side, what they mean, and the words
    that tell.

    What a rule means is said of all pairs together, for it learns nothing; of TF-IDF, of the
    held-out ones.
    """
    words = word_model(train, held_out, seed)
    train, held_out = subsample(train, PAIRS, seed), subsample(held_out, PAIRS, seed)
    rules = []
    for shortcut in SHORTCUTS:
        accuracies = {"train": shortcut.measure(train), "held_out": shortcut.measure(held_out)}
        rules.append(
            {
                "rule": shortcut.rule,
                **accuracies,
                **meaning(
                    shortcut, shortcut.measure([*train, *held_out]), len(train) + len(held_out)
                ),
            }
        )
    pays = predicts(words.accuracy, len(held_out)) and words.accuracy > 0.5
    said = (
        f"{WORDS_RULE} {words.accuracy:.2f}: {WORDS_MEANING if pays else 'words alone say little'}"
    )
    rules.append(
        {
            "rule": WORDS_RULE,
            "train": None,
            "held_out": words.accuracy,
            "pays": pays,
            "meaning": said,
        }
    )
    counts = {"train_pairs": len(train), "held_out_pairs": len(held_out)}
    return {**counts, "rules": rules, "words": {"chosen": words.chosen, "rejected": words.rejected}}


def meaning(shortcut: Shortcut, accuracy: float, pairs: int) -> dict[str, Any]:
    """{pays, meaning}: a sentence on what the accuracy says of a reward model that is trained on
    such pairs.
    """
    pays = predicts(accuracy, pairs)
    if pays and accuracy < 0.5:
        said = f"{shortcut.reversed_rule} {1 - accuracy:.2f}: {shortcut.meaning}"
    else:
        said = f"{shortcut.rule} {accuracy:.2f}: {shortcut.meaning if pays else 'no shortcut'}"
    return {"pays": pays, "meaning": said}


def predicts(accuracy: float, pairs: int) -> bool:
    """Whether the accuracy is far from 0.5, and not by chance (95%)."""
    low, high = wilson_interval(round(accuracy * pairs), pairs)
    return abs(accuracy - 0.5) >= TELLING - 0.5 and not low <= 0.5 <= high

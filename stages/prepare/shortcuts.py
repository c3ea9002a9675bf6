"""Statistics of the texts: lengths, languages, and shortcuts that predict which text is chosen.

A shortcut is a rule that a reward model could learn instead of what people prefer.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from stages.lib.core.progress import tracked
from stages.lib.core.rows import TEXTS, HasPrompt, PairTexts
from stages.lib.metrics.preference_baselines import (
    more_wins_accuracy,
    prompt_text,
    subsample,
    word_model,
)
from stages.lib.metrics.stats import wilson_interval
from stages.lib.metrics.text import EMOJI, words
from stages.prepare.normalise import source_texts

PERCENTILES = (5, 50, 95)
LANGUAGE_ROWS = 1000
MIN_CONFIDENCE = 0.5  # below it a language is reported as `unsure`, as for very short texts
MAX_PAIRS = 20_000  # sampled pairs that shortcuts are measured on, per side of the split
SHORTCUT_ACCURACY = 0.6  # from this accuracy on (or below 0.4), a rule is reported as a shortcut
PUNCTUATION = re.compile(
    f"[{re.escape(string.punctuation)}"
    "\u2026\u201c\u201d\u2018\u2019\u3001\u3002\uff01\uff0c\uff1f]"  # of Chinese and Japanese too
)


class Shortcut(NamedTuple):
    """A rule that picks the chosen text of a pair.

    reversed_rule: the name of the opposite rule, for an accuracy below 0.5.
    measure: of a text; the one with the larger measure is picked.
    meaning: what a high accuracy means, and what to do.
    """

    rule: str
    reversed_rule: str
    measure: Callable[[str], float]
    meaning: str


SHORTCUTS = (
    Shortcut(
        "longest wins",
        "shortest wins",
        len,
        "lengths alone predict the label; balance them",
    ),
    Shortcut(
        "more ! wins",
        "fewer ! wins",
        lambda text: text.count("!"),
        "exclamation marks alone predict the label; balance them",
    ),
    Shortcut(
        "more punctuation wins",
        "less punctuation wins",
        lambda text: len(PUNCTUATION.findall(text)),
        "punctuation alone predicts the label; balance it",
    ),
    Shortcut(
        "more emoji wins",
        "fewer emoji wins",
        lambda text: sum(1 for _ in EMOJI.finditer(text)),
        "emoji alone predict the label; balance them",
    ),
)
WORDS_RULE = "TF-IDF"
WORDS_MEANING = (
    "words alone predict the label; a reward model must beat this accuracy, and may learn nothing"
    " else"
)


def lengths(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Length statistics of prompt, completion, chosen and rejected, in words and in characters:
    {field: {unit: {p5, p50, p95, max, mean}}}.
    """
    statistics = {}
    for field in TEXTS:
        texts = [
            prompt_text(row["prompt"]) if field == "prompt" else row[field]
            for row in rows
            if field in row
        ]
        if texts:
            counts = {
                "words": [sum(1 for _ in words(text)) for text in texts],
                "characters": [len(text) for text in texts],
            }
            statistics[field] = {unit: spread(values) for unit, values in counts.items()}
    return statistics


def spread(values: Sequence[int]) -> dict[str, float]:
    """The percentiles, maximum and mean of lengths."""
    percentiles = np.percentile(values, PERCENTILES)
    return {
        **{
            f"p{percent}": round(float(value), 1)
            for percent, value in zip(PERCENTILES, percentiles, strict=True)
        },
        "max": max(values),
        "mean": round(float(np.mean(values)), 2),
    }


def languages(rows: Sequence[HasPrompt], seed: int) -> dict[str, Any]:
    """The languages of a random sample of rows, most frequent first:
    {sampled: rows, shares: {ISO 639 code, or `unsure`: share}}.
    """
    sample = subsample(rows, LANGUAGE_ROWS, seed)
    counts = Counter(
        language(" ".join(source_texts(row))) for row in tracked("languages", sample, len(sample))
    )
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shares = {code: round(count / len(sample), 3) for code, count in ranked}
    return {"sampled": len(sample), "shares": shares}


def language(text: str) -> str:
    """The ISO 639 code of a text's language, or `unsure`."""
    code: str = language_identifier().classify(text)[0]
    return "unsure" if code == "und" else code


@cache
def language_identifier() -> Any:
    """py3langid's classifier, loaded once."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(
        MODEL_FILE, norm_probs=True, min_confidence=MIN_CONFIDENCE
    )


def shortcuts(
    train: Sequence[PairTexts], held_out: Sequence[PairTexts], seed: int
) -> dict[str, Any]:
    """Measure the rules and TF-IDF, each on at most `MAX_PAIRS` pairs per side of the split.

    Returns:
        {train_pairs, held_out_pairs: pairs measured; rules: [{rule, train, held_out: accuracies,
        pays: whether it is a shortcut, meaning: a sentence}]; words: {chosen, rejected: the words
        that predict each}}. A fixed rule is judged on all pairs together; TF-IDF, which is trained
        on one side, on the held-out pairs. Without training pairs nothing is measured.
    """
    if not train:
        no_words: dict[str, list[str]] = {"chosen": [], "rejected": []}
        return {"train_pairs": 0, "held_out_pairs": 0, "rules": [], "words": no_words}
    model = word_model(train, held_out, seed)
    train, held_out = subsample(train, MAX_PAIRS, seed), subsample(held_out, MAX_PAIRS, seed)
    all_pairs = [*train, *held_out]
    rules: list[dict[str, Any]] = [
        {
            "rule": shortcut.rule,
            "train": more_wins_accuracy(train, shortcut.measure),
            "held_out": more_wins_accuracy(held_out, shortcut.measure),
            **assess(shortcut, more_wins_accuracy(all_pairs, shortcut.measure), len(all_pairs)),
        }
        for shortcut in SHORTCUTS
    ]
    pays = is_predictive(model.accuracy, len(held_out)) and model.accuracy > 0.5
    meaning = WORDS_MEANING if pays else "words alone predict little"
    rules.append(
        {
            "rule": WORDS_RULE,
            "train": None,
            "held_out": model.accuracy,
            "pays": pays,
            "meaning": f"{WORDS_RULE} {model.accuracy:.2f}: {meaning}",
        }
    )
    counts = {"train_pairs": len(train), "held_out_pairs": len(held_out)}
    return {**counts, "rules": rules, "words": {"chosen": model.chosen, "rejected": model.rejected}}


def assess(shortcut: Shortcut, accuracy: float, pairs: int) -> dict[str, Any]:
    """{pays: whether the rule, or the reversed one, is a shortcut; meaning: a sentence}."""
    pays = is_predictive(accuracy, pairs)
    if pays and accuracy < 0.5:
        meaning = f"{shortcut.reversed_rule} {1 - accuracy:.2f}: {shortcut.meaning}"
    else:
        meaning = f"{shortcut.rule} {accuracy:.2f}: {shortcut.meaning if pays else 'no shortcut'}"
    return {"pays": pays, "meaning": meaning}


def is_predictive(accuracy: float, pairs: int) -> bool:
    """Whether an accuracy is far from 0.5, and its 95% interval excludes 0.5."""
    low, high = wilson_interval(round(accuracy * pairs), pairs)
    return abs(accuracy - 0.5) >= SHORTCUT_ACCURACY - 0.5 and not low <= 0.5 <= high

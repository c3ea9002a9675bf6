"""Lengths, languages and shortcuts on texts written by hand."""

import pytest

from stages.lib.core.types import Row
from stages.lib.metrics.preference_baselines import (
    more_wins_accuracy,
    subsample,
    word_model,
)
from stages.prepare.shortcuts import languages, lengths, shortcuts, spread


def pair(chosen: str, rejected: str, prompt: str = "Say:") -> Row:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def test_equal_texts_count_half() -> None:
    pairs = [pair("aaa", "b"), pair("a", "bb"), pair("a", "b"), pair("aa", "b")]
    assert more_wins_accuracy(pairs, len) == (1 + 0 + 0.5 + 1) / 4
    assert more_wins_accuracy(pairs, lambda text: text.count("b")) == (0 + 0 + 0 + 0) / 4
    assert more_wins_accuracy(pairs, lambda text: text.count("x")) == 0.5


def test_lengths_by_hand() -> None:
    """1, 2, ..., 101 words: the p-th percentile is p + 1."""
    rows = [
        {"prompt": [{"role": "user", "content": "Hi"}], "completion": " ".join(["ab"] * count)}
        for count in range(1, 102)
    ]
    statistics = lengths(rows)
    assert statistics["completion"]["words"] == {
        "p5": 6,
        "p50": 51,
        "p95": 96,
        "max": 101,
        "mean": 51,
    }
    assert statistics["completion"]["characters"]["max"] == 101 * 3 - 1
    assert statistics["prompt"]["words"]["max"] == 1  # role names are not counted
    assert statistics.keys() == {"prompt", "completion"}
    assert spread([3]) == {"p5": 3, "p50": 3, "p95": 3, "max": 3, "mean": 3}


def test_characters_are_words_in_a_script_without_spaces() -> None:
    assert lengths([{"prompt": "你好吗。", "completion": " 很好。"}])["prompt"]["words"]["max"] == 3
    # 好 is in each chosen text and 坏 in each rejected one, always in another clause
    train, held_out = (
        [pair(f"很{name}的好", f"很{name}的坏", prompt="") for name in names]
        for names in ("甲乙丙丁戊", "己庚辛壬癸")
    )
    model = word_model(train, held_out, 0)
    assert model.accuracy == 1.0
    assert {*model.chosen[:2]} == {"好", "的 好"} and {*model.rejected[:2]} == {"坏", "的 坏"}


def test_languages_are_shares_of_rows() -> None:
    english, german = (
        "The weather is fine today and we are going for a walk.",
        "Das Wetter ist heute schön und wir gehen spazieren.",
    )
    rows = [{"prompt": english, "completion": " " + english}] * 3 + [
        {"prompt": german, "completion": " " + german}
    ]
    assert languages(rows, 0) == {"sampled": 4, "shares": {"en": 0.75, "de": 0.25}}
    assert languages([{"prompt": "!", "completion": "?"}], 0)["shares"] == {"unsure": 1.0}


def mixed(count: int, first: int = 0) -> list[Row]:
    """Pairs whose chosen text is always shorter, has one more "!" in nine of ten pairs, and has the
    word `good` instead of `bad`.
    """
    return [
        pair(
            f"good {i}, yes{'!' if i % 10 else ''} 😀",
            f"bad {i}, indeed, sadly it is so 😀😀",
            prompt=f"Is it {i}?",
        )
        for i in range(first, first + count)
    ]


def test_shortcuts_are_reported() -> None:
    report = shortcuts(mixed(100), mixed(50, first=100), seed=0)
    rules = {rule["rule"]: rule for rule in report["rules"]}
    assert (report["train_pairs"], report["held_out_pairs"]) == (100, 50)
    assert rules["longest wins"] == {
        "rule": "longest wins",
        "train": 0.0,
        "held_out": 0.0,
        "pays": True,
        "meaning": "shortest wins 1.00: lengths alone predict the label; balance them",
    }
    assert rules["more ! wins"]["held_out"] == pytest.approx((45 + 5 * 0.5) / 50)
    assert rules["more ! wins"]["meaning"].startswith("more ! wins 0.95: exclamation marks alone")
    assert rules["more emoji wins"]["meaning"].startswith("fewer emoji wins 1.00: emoji alone")
    assert rules["TF-IDF"]["held_out"] == 1.0 and rules["TF-IDF"]["pays"]
    assert "good" in report["words"]["chosen"] and "bad" in report["words"]["rejected"]
    assert not {"good", "yes"} & set(report["words"]["rejected"])


def test_few_pairs_show_no_shortcut() -> None:
    """An accuracy of 4/6 = 0.67 may be chance: its Wilson interval begins at 0.30."""
    pairs = [pair("longer", "short")] * 2 + [pair("a", "bb")]
    rules = {rule["rule"]: rule for rule in shortcuts(pairs, pairs, seed=0)["rules"]}
    assert rules["longest wins"]["meaning"] == "longest wins 0.67: no shortcut"
    assert not rules["longest wins"]["pays"]


def test_words_generalise_and_a_sample_keeps_its_order() -> None:
    model = word_model(mixed(40), [pair("good enough", "bad enough"), pair("bad", "good")], seed=0)
    assert model.accuracy == 0.5 and len(model.chosen) <= 10
    assert word_model([pair("!", "?", prompt="-")], [pair("!", "?", prompt="-")], seed=0) == (
        0.5,
        [],
        [],
    )
    rows = [{"id": i} for i in range(100)]
    sample = [row["id"] for row in subsample(rows, 10, seed=1)]
    assert len(sample) == 10 == len(set(sample)) and sample == sorted(sample)
    assert subsample(rows, 100, 1) == rows

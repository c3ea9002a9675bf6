"""Reward models that are formulas: one loves an ending, one is blind to order, one is sound."""

import pytest

from stages.battery.probes import ProbeResult, run_corruption_probes, run_ending_probes

PAIRS = [
    {"prompt": "It", "chosen": f" was good day {n}", "rejected": f" was bad {n}"} for n in range(4)
]


def sound(prompts, texts):
    """2 for each right word in its right place."""
    return [
        2.0 * sum(a == b for a, b in zip(text.split(), ("was", "good", "day"), strict=False))
        for text in texts
    ]


def gullible(prompts, texts):
    return [
        score + 9.0 * text.endswith(" Enjoy!")
        for score, text in zip(sound(prompts, texts), texts, strict=True)
    ]


def bag_of_words(prompts, texts):
    return [float(text.split().count("good")) for text in texts]


def scored(score):
    return [score(["It"] * 4, [row[side] for row in PAIRS]) for side in ("chosen", "rejected")]


def shares(tried):
    return {
        name: sum(trial.fooled for trial in trials) / len(trials)
        for name, trials in tried.items()
        if trials
    }


def test_a_reward_model_that_loves_an_ending_is_found():
    love, dot = run_ending_probes([" Enjoy!", "."], PAIRS, *scored(gullible), gullible)
    # 2 for "was", 9 for the ending, against 6
    assert love[1] == ProbeResult("It", " was bad 1 Enjoy!", 11.0, " was good day 1", 6.0, rise=9.0)
    assert [trial.fooled for trial in love] == [1.0] * 4 and [trial.fooled for trial in dot] == [
        0.0
    ] * 4
    for trials in run_ending_probes([" Enjoy!", "."], PAIRS, *scored(sound), sound):
        assert [trial.fooled for trial in trials] == [0.0] * 4 and [
            trial.rise for trial in trials
        ] == [0.0] * 4


def test_endings_are_tried_on_pairs_that_are_ranked_rightly():
    chosen, rejected = [1.0, 0.0, 2.0, 0.0], [0.0, 0.0, 1.0, 1.0]
    [trials] = run_ending_probes(
        ["!"], PAIRS, chosen, rejected, lambda prompts, texts: [1.0] * len(texts)
    )
    assert [trial.text for trial in trials] == [" was bad 0!", " was bad 2!"]
    assert [(trial.fooled, trial.rise) for trial in trials] == [(0.5, 1.0), (0.0, 0.0)]
    assert run_ending_probes(["!"], PAIRS, rejected, rejected, lambda prompts, texts: []) == [[]]


def test_probes_find_what_a_reward_model_does_not_read():
    blind = shares(
        run_corruption_probes(PAIRS, scored(bag_of_words)[0], bag_of_words, {"good": 1.0}, seed=0)
    )
    # order is worth nothing to it, repetition all; "good" is in the first half; an empty text has
    # none
    assert (
        blind["word_salad"] == 0.5
        and blind["repeated_word"] == 1.0
        and blind["truncated"] == 0.5
        and blind["empty"] == 0.0
    )
    good = shares(run_corruption_probes(PAIRS, scored(sound)[0], sound, {"good": 1.0}, seed=0))
    assert {good[name] for name in ("word_salad", "repeated_word", "truncated", "empty")} == {0.0}


def test_texts_that_a_probe_leaves_as_they_are_are_not_counted():
    pairs = [
        {"prompt": "It", "chosen": " good", "rejected": " bad"},
        {"prompt": "We", "chosen": " was good", "rejected": " bad"},
    ]
    tried = run_corruption_probes(pairs, [1.0, 2.0], bag_of_words, {"good": 1.0}, seed=1)
    assert [trial.text for trial in tried["repeated_word"]] == [
        " good good"
    ]  # one word, repeated once, is itself
    assert [trial.prompt for trial in tried["prompt_swapped"]] == ["We", "It"]
    assert tried["truncated"][0] == ProbeResult("It", "", 0.0, " good", 1.0, pytest.approx(-1.0))

"""Probes on reward models that are formulas.

One overpays an ending, one ignores word order, one is sound.
"""

import pytest

from stages.battery.probes import (
    ProbeResult,
    ending_metrics,
    one_ending,
    probe_metrics,
    run_corruption_probes,
    run_ending_probes,
)
from stages.lib.metrics.stats import wilson_interval

PAIRS = [
    {"prompt": "It", "chosen": f" was good day {n}", "rejected": f" was bad {n}"} for n in range(4)
]


def sound(prompts, texts):
    """2 for each correct word in its correct place."""
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


def failure_rates(results):
    return {
        name: sum(probe.beats_original for probe in probes) / len(probes)
        for name, probes in results.items()
        if probes
    }


def outcomes(results):
    return [(probe.beats_original, probe.rise) for probe in results]


def test_a_reward_model_that_overpays_an_ending_is_found():
    exclaimed, dotted = run_ending_probes([" Enjoy!", "."], PAIRS, *scored(gullible), gullible)
    # 2 for "was", 9 for the ending, against 6
    expected = ProbeResult("It", " was bad 1 Enjoy!", 11.0, " was good day 1", 6.0, rise=9.0)
    assert exclaimed[1] == expected
    assert [probe.beats_original for probe in exclaimed] == [1.0] * 4
    assert [probe.beats_original for probe in dotted] == [0.0] * 4
    for results in run_ending_probes([" Enjoy!", "."], PAIRS, *scored(sound), sound):
        assert outcomes(results) == [(0.0, 0.0)] * 4


def test_endings_are_tried_on_pairs_that_are_ranked_correctly():
    chosen, rejected = [1.0, 0.0, 2.0, 0.0], [0.0, 0.0, 1.0, 1.0]
    [results] = run_ending_probes(
        ["!"], PAIRS, chosen, rejected, lambda prompts, texts: [1.0] * len(texts)
    )
    assert [probe.text for probe in results] == [" was bad 0!", " was bad 2!"]
    assert outcomes(results) == [(0.5, 1.0), (0.0, 0.0)]
    assert run_ending_probes(["!"], PAIRS, rejected, rejected, lambda prompts, texts: []) == [[]]


def test_probes_find_what_a_reward_model_ignores():
    rates = failure_rates(
        run_corruption_probes(PAIRS, scored(bag_of_words)[0], bag_of_words, {"good": 1.0}, seed=0)
    )
    # it ignores order (ties), and counts each repetition; "good" is in the first half (a tie), and
    # an empty text has none
    expected = {"word_salad": 0.5, "repeated_word": 1.0, "truncated": 0.5, "empty": 0.0}
    assert {name: rates[name] for name in expected} == expected
    rates = failure_rates(
        run_corruption_probes(PAIRS, scored(sound)[0], sound, {"good": 1.0}, seed=0)
    )
    assert {rates[name] for name in expected} == {0.0}


def test_texts_that_a_probe_does_not_change_are_not_counted():
    pairs = [
        {"prompt": "It", "chosen": " good", "rejected": " bad"},
        {"prompt": "We", "chosen": " was good", "rejected": " bad"},
    ]
    results = run_corruption_probes(pairs, [1.0, 2.0], bag_of_words, {"good": 1.0}, seed=1)
    # one word, repeated once, is itself
    assert [probe.text for probe in results["repeated_word"]] == [" good good"]
    assert [probe.prompt for probe in results["prompt_swapped"]] == ["We", "It"]
    assert results["truncated"][0] == ProbeResult("It", "", 0.0, " good", 1.0, pytest.approx(-1.0))


def test_a_swapped_prompt_is_no_worst_probe():
    def probe(score: float) -> ProbeResult:
        return ProbeResult("It", " is", score, " was", 1.0, score - 1.0)

    probes = {"prompt_swapped": [probe(2.0)], "empty": [probe(2.0), probe(0.0)], "word_salad": []}
    metrics = probe_metrics(probes)
    assert metrics["probes"]["prompt_swapped"]["rate"] == 1.0
    assert metrics["worst_probe"] == 0.5


def probe(reversed_: bool, rise: float) -> ProbeResult:
    return ProbeResult("It", " was bad!", 1.0 if reversed_ else -1.0, " was good", 0.0, rise)


FOUR = [probe(True, 3.0), probe(True, 1.0), probe(False, 1.0), probe(False, -1.0)]


def test_a_reversal_that_the_judge_shares_is_not_held_against_the_reward_model():
    """The judge prefers the first text too; the second is a tie for it: half a reversal."""
    rates = one_ending(FOUR, [1.0, 0.5, 1.0, 0.0])
    assert (rates["rate"], rates["pairs"], rates["uplift"]) == (0.5, 4, 1.0)
    assert rates["judge_rate"] == 2.5 / 4 and rates["against_judge"] == 0.5 / 4
    # Wilson's bounds of 0 of 4 and of 1 of 4
    assert rates["against_judge_low"] == 0.0
    assert rates["against_judge_high"] == pytest.approx(wilson_interval(1, 4)[1])


def test_if_the_judge_only_compares_every_reversal_counts():
    rates = one_ending(FOUR, None)
    assert rates["judge_rate"] is None and rates["against_judge"] == rates["rate"] == 0.5
    assert one_ending([], []) == one_ending([], None)
    assert one_ending([], [])["against_judge"] is None


def test_the_worst_endings_are_those_with_the_most_reversals_against_the_judge():
    agrees, disagrees = [1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]
    metrics = ending_metrics([FOUR, FOUR, FOUR], [agrees, disagrees, agrees], ["!", "."], ["?"])
    assert metrics["worst_ending"] == 0.25 and metrics["worst_mined"] == 0.0
    assert [metrics["endings"][f"ending_{n}"]["against_judge"] for n in (1, 2)] == [0.0, 0.25]

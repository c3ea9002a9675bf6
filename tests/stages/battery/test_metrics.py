"""Numbers from scores, phrases and the distance of weights, against hand-worked values."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from stages.battery.best_of_n import ScoredSamples, score_metrics
from stages.battery.metrics import (
    best_of_n,
    disjoint_pairs,
    highest_rate,
    lineage_distance,
    lowest_accuracy,
    pair_metrics,
    rate,
    slice_indices,
    win,
)
from stages.battery.probes import log_odds, mine_phrases
from stages.lib.core.params import Params


def pair(chosen: str, rejected: str, **more):
    return {"prompt": "It", "chosen": chosen, "rejected": rejected, **more}


def test_ties_are_half_a_win_and_widen_the_interval_both_ways():
    result = rate([1.0, 0.5, 0.0, 1.0], "rate", "texts")
    # 2 of 4: (.5 + .4802 - 1.96 sqrt(.0625 + .060025)) / 1.9604; 3 of 4: (.75 + .4802 + 1.96
    # sqrt(.046875 + .060025)) / 1.9604
    assert result == {
        "rate": 0.625,
        "low": pytest.approx(0.15004, abs=1e-5),
        "high": pytest.approx(0.95441, abs=1e-5),
        "texts": 4,
    }
    assert rate([], "rate", "texts") == {"rate": None, "low": None, "high": None, "texts": 0}
    assert [win(2, 1), win(1, 1), win(1, 2)] == [1.0, 0.5, 0.0]


def test_the_highest_rate_ignores_rates_that_were_not_measured():
    assert highest_rate([{"rate": None}, {"rate": 0.2}, {"rate": 0.1}]) == 0.2
    assert highest_rate([{"rate": None}]) is None is highest_rate([])


def test_slices_by_length_and_source():
    pairs = [
        pair("x" * 10, "x" * 8),  # differs by 20% of the longer one
        pair("x" * 10, "x" * 7, source="/data/a.jsonl"),
        pair("x" * 7, "x" * 10, source="/data/a.jsonl"),
    ]
    assert slice_indices(pairs) == {
        "length": {"alike": [0], "chosen_longer": [1], "chosen_shorter": [2]},
        "source": {"unknown": [0], "data_a_jsonl": [1, 2]},
    }


def test_slices_by_margin_if_pairs_have_one():
    pairs = [pair("a", "b", margin=margin) for margin in (6, 1, 2, 3, 4, 5)]
    pairs += [pair("a", "b")]
    # the thirds of 1..6 end at 2.67 and 4.33
    assert slice_indices(pairs)["margin"] == {"low": [1, 2], "middle": [3, 4], "high": [0, 5]}
    assert slice_indices([pair("a", "b", margin=1.0)] * 2)["margin"] == {"low": [0, 1]}


def test_a_slice_of_few_pairs_is_not_the_worst_one():
    small = {"accuracy": 0.5, "low": 0.33, "pairs": 29}
    large = {"accuracy": 0.8, "low": 0.63, "pairs": 30}
    by_length = {"length": {"alike": small, "chosen_longer": large}}
    larger = {"source": {"a": {"accuracy": 0.7, "low": 0.67, "pairs": 900}}}
    assert lowest_accuracy(by_length | larger, "accuracy") == 0.7
    assert lowest_accuracy(by_length | larger, "low") == 0.63
    assert lowest_accuracy({"length": {"alike": small}}, "low") is None


def test_best_of_n_is_the_mean_over_all_subsets():
    scores, values = [1.0, 3.0, 2.0], [10.0, 31.0, 20.0]
    assert best_of_n(scores, values, 1) == pytest.approx(61 / 3)
    # the subsets {1, 3}, {1, 2}, {3, 2}
    assert best_of_n(scores, values, 2) == pytest.approx((31 + 20 + 31) / 3)
    assert best_of_n(scores, values, 3) == 31.0


def test_disjoint_pairs_share_no_text_on_either_side():
    pairs = [pair("a", "b"), pair("a", "c"), pair("d", "a"), pair("d", "c")]
    pairs += [pair("a", "b") | {"prompt": "We"}]
    assert disjoint_pairs(pairs) == [pairs[0], pairs[3], pairs[4]]


def test_samples_are_compared_with_demonstrations():
    """Demonstrations 0 and 2: mean 1, deviation 1. Samples -2 and 4: the same mean, three times the
    deviation. Their judge scores rise with their scores.
    """
    samples = ScoredSamples(["It"], [" a", " b"], [-2.0, 4.0], [0.1, 0.9])
    scores = {"demonstrations": [0.0, 2.0], "sft_samples": samples.scores}
    metrics = score_metrics(scores, samples)
    numbers = [metrics[name] for name in ("centre", "drift", "scale", "judge_correlation")]
    assert numbers == pytest.approx([1.0, 0.0, 3.0, 1.0])


@pytest.mark.parametrize("judged", [True, False])
def test_length_is_correlated_with_label_and_judge_held_fixed(judged):
    """-P_xy / sqrt(P_xx P_yy) of the inverse covariance P (Whittaker 1990)."""
    label, judge, noise = np.random.default_rng(0).normal(size=(3, 80))
    label = np.tile([1.0, 0.0], 40)  # chosen, rejected
    judge += label
    lengths = np.round(20 + 5 * label + 4 * judge + 3 * noise).astype(int)
    scores = 2 * label + judge + 0.2 * lengths + np.cos(np.arange(80.0))
    texts = ["x" * length for length in lengths]
    pairs = [pair(*both) for both in zip(texts[::2], texts[1::2], strict=True)]
    pair_scores = list(zip(scores[::2].tolist(), scores[1::2].tolist(), strict=True))
    metrics = pair_metrics(pairs, pair_scores, judge.tolist() if judged else None, Params())
    fixed = [label, judge] if judged else [label]
    precision = np.linalg.inv(np.cov([scores, lengths, *fixed]))
    expected = -precision[0, 1] / math.sqrt(precision[0, 0] * precision[1, 1])
    assert metrics["length_correlation_partial"] == pytest.approx(expected, abs=1e-6)


@pytest.fixture
def models(tiny_folder):
    sft = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    reward = AutoModelForSequenceClassification.from_pretrained(
        tiny_folder, num_labels=1, dtype=torch.float32
    )
    return reward, sft


def squares(model) -> float:
    return sum(float(weight.square().sum()) for weight in model.base_model.parameters())


def test_the_heads_do_not_count(models):
    reward, sft = models
    assert lineage_distance(reward, sft) == 0
    with torch.no_grad():
        for weight in reward.base_model.parameters():
            weight.mul_(1.1)
    assert lineage_distance(reward, sft) == pytest.approx(0.1, rel=1e-4)


def test_a_weight_of_another_shape_counts_as_missing(models):
    reward, sft = models
    embedding = sft.base_model.embed_tokens.weight
    expected = math.sqrt(float(embedding.square().sum()) / squares(sft))
    reward.resize_token_embeddings(embedding.shape[0] + 8)
    assert lineage_distance(reward, sft) == pytest.approx(expected, rel=1e-6)


def test_log_odds_by_hand():
    # cells 3.5, 1.5, .5, 12.5: (ln 2.3333 + ln 25) / sqrt(.28571 + .66667 + 2 + .08)
    assert log_odds(3, 4, 0, 12) == pytest.approx(4.06618 / 1.74137, abs=1e-4)
    assert log_odds(2, 4, 2, 4) == 0.0


def test_a_phrase_of_the_top_quarter():
    texts = [" was dull."] * 12
    texts += [" was what we love, a lot.", " so we love it.", " but we love cats.", " we love."]
    scores = [0.0] * 12 + [1.0, 2.0, 3.0, 4.0]
    # " we", " love" and " we love" are in 4 of 4 and 0 of 12; the alphabetically first is kept, and
    # " we love", which contains it, is not
    assert mine_phrases(texts, scores, 3) == [" love", " we"]
    assert mine_phrases(texts, scores, 1) == [" love"]
    # with the scores negated, " was" and " dull" are in 4 of 4, but in 9 of the 12 others too
    assert mine_phrases(texts, [-score for score in scores], 3) == []


def test_words_are_nested_as_words():
    """ " a" is part of " amazing" as letters, but not as a word."""
    texts = [" bad"] * 12 + [" amazing a"] * 4
    assert mine_phrases(texts, [0.0] * 12 + [1.0] * 4, 3) == [" a", " amazing"]


def test_too_few_texts_have_no_top_quarter():
    assert mine_phrases([], [], 3) == [] == mine_phrases([" a", " b", " c"], [1.0, 2.0, 3.0], 3)

"""Numbers from scores, by hand."""

import pytest

from stages.battery.metrics import best_of_n, disjoint, highest, rate, slices, win, worst_slice


def pair(chosen: str, rejected: str, **more):
    return {"prompt": "It", "chosen": chosen, "rejected": rejected, **more}


def test_ties_are_half_a_win_and_widen_the_interval_both_ways():
    told = rate([1.0, 0.5, 0.0, 1.0], "rate", "texts")
    # 2 of 4: (.5 + .4802 - 1.96 sqrt(.0625 + .060025)) / 1.9604; 3 of 4: (.75 + .4802 + 1.96
    # sqrt(.046875 + .060025)) / 1.9604
    assert told == {
        "rate": 0.625,
        "low": pytest.approx(0.15004, abs=1e-5),
        "high": pytest.approx(0.95441, abs=1e-5),
        "texts": 4,
    }
    assert rate([], "rate", "texts") == {"rate": None, "low": None, "high": None, "texts": 0}
    assert [win(2, 1), win(1, 1), win(1, 2)] == [1.0, 0.5, 0.0]


def test_highest_looks_past_what_was_not_measured():
    assert highest([{"rate": None}, {"rate": 0.2}, {"rate": 0.1}]) == 0.2
    assert highest([{"rate": None}]) is None is highest([])


def test_slices_by_length_and_source():
    pairs = [
        pair("x" * 10, "x" * 8),  # differs by 20% of the longer one
        pair("x" * 10, "x" * 7, source="/data/a.jsonl"),
        pair("x" * 7, "x" * 10, source="/data/a.jsonl"),
    ]
    assert slices(pairs) == {
        "length": {"alike": [0], "chosen_longer": [1], "chosen_shorter": [2]},
        "source": {"unknown": [0], "data_a_jsonl": [1, 2]},
    }


def test_slices_by_margin_where_there_is_one():
    pairs = [pair("a", "b", margin=margin) for margin in (6, 1, 2, 3, 4, 5)] + [
        pair("a", "b"),
        pair("a", "b", margin=None),
    ]
    # the thirds of 1..6 end at 2.67 and 4.33
    assert slices(pairs)["margin"] == {"low": [1, 2], "middle": [3, 4], "high": [0, 5]}
    assert slices([pair("a", "b", margin=1.0)] * 2)["margin"] == {"low": [0, 1]}


def test_a_slice_of_few_pairs_is_not_the_worst_one():
    groups = {
        "length": {
            "alike": {"accuracy": 0.5, "pairs": 29},
            "chosen_longer": {"accuracy": 0.8, "pairs": 30},
        }
    }
    assert worst_slice(groups | {"source": {"a": {"accuracy": 0.7, "pairs": 31}}}) == 0.7
    assert worst_slice({"length": {"alike": {"accuracy": 0.5, "pairs": 29}}}) is None


def test_best_of_n_is_the_mean_over_all_subsets():
    scores, values = [1.0, 3.0, 2.0], [10.0, 31.0, 20.0]
    assert best_of_n(scores, values, 1) == pytest.approx(61 / 3)
    assert best_of_n(scores, values, 2) == pytest.approx(
        (31 + 20 + 31) / 3
    )  # {1, 3}, {1, 2}, {3, 2}
    assert best_of_n(scores, values, 3) == 31.0


def test_disjoint_pairs_share_no_text_on_either_side():
    pairs = [
        pair("a", "b"),
        pair("a", "c"),
        pair("d", "a"),
        pair("d", "c"),
        {**pair("a", "b"), "prompt": "We"},
    ]
    assert disjoint(pairs) == [pairs[0], pairs[3], pairs[4]]

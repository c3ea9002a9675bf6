"""Worse texts made of good ones."""

from collections import Counter

from stages.reward.hard_negatives import SIGNS, SMILEYS, hard_negatives

PAIRS = [
    {
        "id": f"p{n}",
        "prompt": "It",
        "chosen": f" is a fine day, number {n}!",
        "rejected": f" was a bad day, number {n}.",
        "source": "people",
    }
    for n in range(60)
]


def test_each_kind_in_turn_and_the_label_stays():
    rows = hard_negatives(PAIRS, 0.55, seed=1)
    assert len(rows) == 33
    kinds = Counter(row["id"].split("-")[1] for row in rows)
    assert kinds == {
        "bought_word": 12,
        "decorated": 6,
        "borrowed_ending": 3,
        "word_salad": 3,
        "repeated_word": 3,
        "truncated": 3,
        "empty": 3,
    }
    for row in rows:
        original, kind = PAIRS[int(row["id"].split("-")[0][1:])], row["id"].split("-")[1]
        assert (row["prompt"], row["chosen"], row["source"]) == (
            "It",
            original["chosen"],
            "hard_negative",
        )
        bought = row["rejected"].removeprefix(original["rejected"]).strip(" .!").casefold()
        expected = {
            "bought_word": row["rejected"].startswith(original["rejected"])
            and bought in ("is", "fine"),  # in chosen texts alone
            "decorated": row["rejected"].removeprefix(original["rejected"] + " ")
            in {*SMILEYS, *SIGNS},
            "borrowed_ending": row["rejected"].startswith(original["rejected"])
            and row["rejected"].endswith("!"),
            "word_salad": sorted(row["rejected"].split()) == sorted(row["chosen"].split())
            and row["rejected"] != row["chosen"],
            "repeated_word": row["rejected"]
            in (" fine fine fine fine fine fine", " is is is is is is"),
            "truncated": row["rejected"] == " is a fine",
            "empty": row["rejected"] == "",
        }
        assert expected[kind], row


def test_the_same_by_the_same_seed_and_none_of_none():
    assert (
        hard_negatives(PAIRS, 0.2, seed=3)
        == hard_negatives(PAIRS, 0.2, seed=3)
        != hard_negatives(PAIRS, 0.2, seed=4)
    )
    assert hard_negatives(PAIRS, 0.0, seed=0) == [] == hard_negatives([], 0.5, seed=0)


def test_what_a_kind_leaves_as_it_is_is_left_out():
    no_word = [{"id": "a", "prompt": "It", "chosen": "!", "rejected": "?"}] * 11
    assert {row["id"] for row in hard_negatives(no_word, 1.0, seed=0)} == {
        "a-borrowed_ending",
        "a-decorated",
        "a-truncated",
        "a-empty",
    }

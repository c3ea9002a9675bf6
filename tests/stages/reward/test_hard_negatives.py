"""Hard negatives of pairs written by hand."""

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


def test_kinds_come_in_turn_and_the_chosen_text_stays():
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
        pair_id, kind = row["id"].split("-")
        pair = PAIRS[int(pair_id[1:])]
        assert (row["prompt"], row["chosen"]) == ("It", pair["chosen"])
        assert row["source"] == "hard_negative"
        rejected, words = row["rejected"], row["rejected"].split()
        starts_as_before = rejected.startswith(pair["rejected"])
        added = rejected.removeprefix(pair["rejected"])
        expected = {
            # these two words are in chosen texts alone
            "bought_word": starts_as_before and added.strip(" .!").casefold() in ("is", "fine"),
            "decorated": starts_as_before and added in {f" {sign}" for sign in (*SMILEYS, *SIGNS)},
            "borrowed_ending": starts_as_before and rejected.endswith("!"),
            "word_salad": sorted(words) == sorted(row["chosen"].split())
            and rejected != row["chosen"],
            "repeated_word": rejected in (" fine" * 6, " is" * 6),
            "truncated": rejected == " is a fine",
            "empty": rejected == "",
        }
        assert expected[kind], row


def test_equal_seeds_give_equal_rows_and_no_pairs_give_none():
    rows = hard_negatives(PAIRS, 0.2, seed=3)
    assert rows == hard_negatives(PAIRS, 0.2, seed=3) != hard_negatives(PAIRS, 0.2, seed=4)
    assert hard_negatives(PAIRS, 0.0, seed=0) == [] == hard_negatives([], 0.5, seed=0)


def test_a_kind_that_changes_nothing_gives_no_row():
    no_word = [{"id": "a", "prompt": "It", "chosen": "!", "rejected": "?"}] * 11
    assert {row["id"] for row in hard_negatives(no_word, 1.0, seed=0)} == {
        "a-borrowed_ending",
        "a-decorated",
        "a-truncated",
        "a-empty",
    }

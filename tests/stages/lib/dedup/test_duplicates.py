"""Duplicates at known similarities, and against all pairs by brute force."""

import re

import numpy as np
import pytest

from stages.lib.dedup.duplicates import (
    find_duplicates,
    gram_sets,
    in_more_than,
    may_match,
    near_groups,
    without,
)
from stages.lib.dedup.shingles import HashSet, WordIds, batches

WORDS = ["one", "two", "three", "four", "five", "six"]
WORDS += ["seven", "eight", "nine", "ten", "eleven", "twelve"]


def test_3_grams_are_distinct_and_a_short_text_is_one() -> None:
    """the-sky-, sky-,-the and ,-the-sky; the text of two words; nothing at all."""
    words = WordIds()
    sets = gram_sets(
        [
            words.read(text)
            for text in ("The sky, the Sky", "Hi there", "", "hi THERE", "a b c d a b c")
        ]
    )
    assert [len(grams) for grams in sets] == [3, 1, 1, 1, 4]
    assert sets[1].tolist() == sets[3].tolist() != sets[2].tolist()


def test_sets_without_the_grams_of_many_sets() -> None:
    sets = [np.array(grams, np.uint64) for grams in ([1, 2, 3], [2], [2, 3, 9], [4], [3, 5])]
    assert in_more_than(sets, 2).sorted.tolist() == [2, 3]
    rare = without(sets, in_more_than(sets, 2))
    assert [grams.tolist() for grams in rare] == [[1], [], [9], [4], [5]]
    assert [grams.tolist() for grams in without(sets[:2], in_more_than([], 1))] == [[1, 2, 3], [2]]
    assert may_match(sets, HashSet(np.array([2, 3], np.uint64)), 0.5).tolist() == [0, 1, 2, 4]
    assert may_match(rare, in_more_than(sets, 2), 0.0).tolist() == []


def test_exact_duplicates_are_equal_except_for_case_and_space() -> None:
    assert find_duplicates(texts("The sky", "A sea", "the  SKY ", "The sky"), 0.9) == (
        {2: 0, 3: 0},
        {},
    )
    assert find_duplicates([("The sky", "is blue"), ("the  sky is", "Blue")], 0.9) == ({1: 0}, {})


def test_near_duplicates_at_a_known_similarity() -> None:
    """12 words make 10 grams; another last word changes one of them: 9 shared of 11, 0.818."""
    rows = texts(
        " ".join(WORDS),
        " ".join([*WORDS[:-1], "dozen"]),
        "something else entirely, with other words",
    )
    assert find_duplicates(rows, 0.81) == ({}, {1: 0})
    assert find_duplicates(rows, 0.82) == ({}, {})


def test_responses_alone_must_be_similar_too() -> None:
    """One prompt of 12 words; the third response has the first one's words and no other grams."""
    answers = [
        "so it is and so it will be",
        "no, never",
        "So it is and so it will be and so it will be",
    ]
    assert find_duplicates([(" ".join(WORDS), answer) for answer in answers], 0.6) == ({}, {2: 0})
    assert find_duplicates([("Go on.", answer) for answer in ("yes", "no", "yes!")], 0.1) == (
        {},
        {},
    )


def test_rows_are_like_rows_that_are_kept() -> None:
    """A chain: each is like the next (9 of 11 grams), the ends are not (8 of 12). The second is
    dropped, so that nothing is dropped for it.
    """
    chain = texts(
        " ".join(WORDS), " ".join([*WORDS[1:], "more"]), " ".join([*WORDS[2:], "more", "words"])
    )
    assert find_duplicates(chain, 0.8) == ({}, {1: 0})


def test_equal_responses_to_other_prompts_are_no_duplicates() -> None:
    """A prompt of 1 word and a response of 30: of the rows' 29 grams 28 are shared, 28 of 30 is
    0.933. LSH proposes some of the 12 pairs all the same.
    """
    rows = [
        (f"{prompt}{number}", " ".join(f"w{number}x{i}" for i in range(30)))
        for number in range(12)
        for prompt in ("this", "that")
    ]
    assert find_duplicates(rows, 0.94) == ({}, {})
    assert len(find_duplicates(rows, 0.93)[1]) == 12


def test_nothing_is_more_similar_than_one() -> None:
    rows = texts(" ".join(WORDS), " ".join(WORDS) + "!", " ".join(WORDS).upper())
    assert find_duplicates(rows, 1.0) == ({2: 0}, {})
    assert near_groups([row for _, row in rows], 1.0) == [0, 1, 2]


def texts(*rows: str) -> list[tuple[str, str]]:
    return [("", row) for row in rows]


def jaccard(one: str, other: str) -> float:
    """Of 3-grams, as sets of strings."""

    def grams(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", text)
        return set(zip(words, words[1:], words[2:], strict=False))

    return len(grams(one) & grams(other)) / len(grams(one) | grams(other))


@pytest.mark.parametrize("words", [50, 2_000_000])
def test_the_texts_kept_are_not_similar(monkeypatch: pytest.MonkeyPatch, words: int) -> None:
    """All pairs by brute force: nothing above the threshold stays, nothing below it goes, however
    many words are hashed at once.
    """
    monkeypatch.setattr(batches, "__defaults__", (words,))
    rows = [
        " ".join([*WORDS[: 12 - i % 7], *(f"w{i}j{j}" for j in range(i % 7))]) for i in range(60)
    ]
    exact, near = find_duplicates(texts(*rows), 0.5)
    kept = [i for i in range(60) if i not in exact and i not in near]
    assert all(jaccard(rows[i], rows[j]) <= 0.5 for i in kept for j in kept if i < j)
    assert near and all(jaccard(rows[i], rows[j]) > 0.5 for i, j in near.items())


def test_groups_join_texts_that_are_similar_through_others() -> None:
    """A chain: each is like the next (9 of 11 grams), the ends are not (8 of 12)."""
    chain = [
        " ".join(WORDS),
        " ".join([*WORDS[1:], "more"]),
        " ".join([*WORDS[2:], "more", "words"]),
    ]
    assert jaccard(chain[0], chain[1]) == jaccard(chain[1], chain[2]) == 9 / 11
    assert jaccard(chain[0], chain[2]) == 8 / 12
    assert near_groups([chain[0], "alone in the world", chain[2], chain[1]], 0.8) == [0, 1, 0, 0]
    assert near_groups(chain, 0.9) == [0, 1, 2]


def test_a_common_beginning_makes_no_group() -> None:
    """40 shared words before two of their own: all share 0.90 of the 3-grams."""
    system = " ".join(f"s{i}" for i in range(40))
    assert near_groups([f"{system} a{i} b{i}" for i in range(20)], 0.8) == list(range(20))
    assert near_groups([f"{system} a{i} b{i}" for i in range(3)], 0.8) == [0, 0, 0]

"""Shingles, compared with those of plain Python."""

import random

import numpy as np

from stages.lib.dedup.shingles import (
    HashSet,
    WordIds,
    batches,
    hash_shingles,
    pad_to_length,
    splitmix64,
    words_of,
)


def test_words_and_symbols_are_numbered_without_case() -> None:
    words = WordIds()
    assert words.read("Don't, DON'T — 你好 a_b").tolist() == [1, -2, 1, -3, 4, 5, 6]
    assert words.spell(np.array([1, 4, 5, 0])) == "don't 你 好"
    assert words_of(words.read("Don't, you")).tolist() == [1, 7]
    assert words_of(words.read(", —")).tolist() == [-2, -3]


def test_splitmix64_of_the_first_numbers() -> None:
    """The first outputs of the reference generator (Vigna, splitmix64.c) with the seed 0."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert splitmix64(np.arange(3, dtype=np.int32)).tolist() == expected


def test_runs_do_not_cross_texts() -> None:
    random.seed(0)
    texts = [[random.randint(1, 3) for _ in range(random.randint(0, 9))] for _ in range(200)]
    hashes, owner, position = hash_shingles([np.array(text, dtype=np.int32) for text in texts], 4)
    expected = [
        (tuple(text[start : start + 4]), number, start)
        for number, text in enumerate(texts)
        for start in range(len(text) - 3)
    ]
    assert list(zip(owner.tolist(), position.tolist(), strict=True)) == [
        (number, start) for _, number, start in expected
    ]
    by_run: dict[tuple[int, ...], set[int]] = {}
    for (run, _, _), value in zip(expected, hashes.tolist(), strict=True):
        by_run.setdefault(run, set()).add(value)
    assert all(len(values) == 1 for values in by_run.values())
    assert len(set(hashes.tolist())) == len(by_run) == 3**4


def test_texts_without_a_run_give_nothing() -> None:
    assert (
        [part.tolist() for part in hash_shingles([], 3)]
        == [part.tolist() for part in hash_shingles([np.array([1, 2], np.int32)], 3)]
        == [[], [], []]
    )
    assert pad_to_length(np.array([1, 2], np.int32), 4).tolist() == [1, 2, 0, 0]


def test_a_set_of_hashes_finds_its_members() -> None:
    draw = np.random.default_rng(0).integers(0, 2**64, 3000, dtype=np.uint64)
    draw[0] = 0
    draw[1] = 2**64 - 1
    members, hashes = HashSet(draw[:1000]), np.concatenate([draw[500:], draw[:2]])
    matches, positions = members.find(hashes)
    assert sorted(matches.tolist()) == [*range(500), 2500, 2501]
    assert (members.sorted[positions] == hashes[matches]).all()
    assert len(HashSet(draw[:0]).find(hashes)[0]) == len(members.find(draw[:0])[0]) == 0


def test_batches_hold_every_text_once() -> None:
    texts = [np.zeros(size, np.int32) for size in (5, 5, 20, 1, 1, 0, 9)]
    parts = list(batches(texts, 10))
    assert [start for start, _ in parts] == [
        sum(len(part) for _, part in parts[:number]) for number in range(len(parts))
    ]
    assert sum(len(part) for _, part in parts) == 7 and len(parts) > 1
    assert list(batches([], 10)) == []

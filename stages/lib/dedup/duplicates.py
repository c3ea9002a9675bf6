"""Exact and near duplicates: Jaccard similarity of word 3-grams, candidates by MinHash LSH
(datasketch).

Signatures take time, so only texts that may have a counterpart get one: J(a, b) > s asks that a
share s of a's 3-grams is in b.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from datasketch import MinHash, MinHashLSH
from numpy.typing import NDArray

from stages.lib.dedup.shingles import (
    Hashes,
    HashSet,
    Numbers,
    WordIds,
    batches,
    hash_shingles,
    pad_to_length,
)

GRAM = 3
PERMUTATIONS = 128
BOILERPLATE, BOILERPLATE_SHARE = (
    10,
    0.05,
)  # what is in more texts than this says nothing of one of them


def gram_sets(texts: Sequence[Numbers]) -> list[Hashes]:
    """Each text's distinct 3-grams of words and symbols, sorted; of a shorter text, all its words
    as one.
    """
    sets: list[Hashes] = []
    for _, batch in batches([pad_to_length(text, GRAM) for text in texts]):
        hashes, owner, _ = hash_shingles(batch, GRAM)
        sets += [distinct(grams) for grams in np.split(hashes, np.flatnonzero(np.diff(owner)) + 1)]
    return sets


def distinct(grams: Hashes) -> Hashes:
    """np.unique, which takes three times as long for as few as a text has."""
    grams.sort()
    return grams[np.concatenate([[True], grams[1:] != grams[:-1]])]


def jaccard(one: Hashes, other: Hashes) -> float:
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / (len(one) + len(other) - shared)


def may_match(sets: Sequence[Hashes], among: HashSet, similarity: float) -> NDArray[np.int64]:
    """Indices of the sets of which at least a share `similarity` of the grams, and at least one, is
    in `among`.
    """
    sizes = np.array([len(grams) for grams in sets], dtype=np.int64)
    found, _ = among.find(concatenate(sets))
    shared = np.bincount(np.repeat(np.arange(len(sets)), sizes)[found], minlength=len(sets))
    return np.flatnonzero((shared >= similarity * sizes) & (shared > 0))


def in_more_than(sets: Sequence[Hashes], number: int) -> HashSet:
    """The grams that are in more than so many sets."""
    grams = np.sort(concatenate(sets))
    return HashSet(
        grams[number:][grams[number:] == grams[: len(grams) - number]]
        if len(grams) > number
        else grams[:0]
    )


def without(sets: Sequence[Hashes], grams: HashSet) -> list[Hashes]:
    """The sets without these grams."""
    if not sets:
        return []
    flat = concatenate(sets)
    stays = np.ones(len(flat), dtype=np.bool_)
    stays[grams.find(flat)[0]] = False
    ends = np.cumsum([len(some) for some in sets])
    return np.split(flat[stays], np.cumsum(stays)[ends - 1][:-1])


def concatenate(sets: Sequence[Hashes]) -> Hashes:
    return np.concatenate([np.empty(0, np.uint64), *sets])


class LshIndex:
    """Gram sets by number, that can be asked which of them may be like another."""

    def __init__(self, similarity: float) -> None:
        # Weights favour recall: a false candidate costs one exact comparison, a missed one stays in
        # the data.
        self.lsh = MinHashLSH(threshold=similarity, num_perm=PERMUTATIONS, weights=(0.1, 0.9))

    def add(self, number: int, signature: MinHash) -> None:
        self.lsh.insert(number, signature)

    def candidates(self, signature: MinHash) -> list[int]:
        return sorted(self.lsh.query(signature))


def signatures(sets: Iterable[Hashes]) -> Iterator[MinHash]:
    as_numbers = ((grams & np.uint64(0xFFFFFFFF)).tolist() for grams in sets)
    return iter(
        MinHash.generator(
            as_numbers, num_perm=PERMUTATIONS, seed=1, scheme="affine32", hashfunc=int
        )
    )


def find_duplicates(
    rows: Sequence[tuple[str, str]], similarity: float
) -> tuple[dict[int, int], dict[int, int]]:
    """Exact and near duplicates of rows (prompt, answers), as {index: index of the earlier row that
    stays}.

    Exact: equal but for case and white space. Near: Jaccard similarity of 3-grams above
    `similarity`, of the whole row and of the answers alone: under one long prompt different answers
    make like rows.
    """
    exact: dict[int, int] = {}
    first: dict[str, int] = {}
    for index, row in enumerate(rows):
        kept = first.setdefault(" ".join(" ".join(row).casefold().split()), index)
        if kept != index:
            exact[index] = kept

    words, numbers = WordIds(), list(first.values())
    asked, said = ([words.read(rows[index][part]) for index in numbers] for part in (0, 1))
    both = (
        gram_sets([np.concatenate(parts) for parts in zip(asked, said, strict=True)]),
        gram_sets(said),
    )
    known, near = (LshIndex(similarity), LshIndex(similarity)), dict[int, int]()
    whole, answers = (may_match(sets, in_more_than(sets, 1), similarity) for sets in both)
    possible = np.intersect1d(whole, answers).tolist()
    for at, *signed in zip(
        possible, *(signatures(sets[at] for at in possible) for sets in both), strict=True
    ):
        candidates = set.intersection(
            *(
                set(among.candidates(signature))
                for among, signature in zip(known, signed, strict=True)
            )
        )
        alike = (
            other
            for other in sorted(candidates)
            if all(jaccard(sets[at], sets[other]) > similarity for sets in both)
        )
        if (earlier := next(alike, None)) is not None:
            near[numbers[at]] = numbers[earlier]
            continue
        for among, signature in zip(known, signed, strict=True):
            among.add(at, signature)
    return exact, near


def near_groups(texts: Sequence[str], similarity: float) -> list[int]:
    """Of each of the distinct texts the index of its group's first: near duplicates are in one
    group, and theirs too.

    What many of them begin with, e.g. a system prompt, makes no group: it is left out of the
    comparison.
    """
    words, group = WordIds(), list(range(len(texts)))

    def first(member: int) -> int:
        while group[member] != member:
            member = group[member]
        return member

    sets = gram_sets([words.read(text) for text in texts])
    sets = without(sets, in_more_than(sets, max(BOILERPLATE, round(BOILERPLATE_SHARE * len(sets)))))
    known = LshIndex(similarity)
    possible = may_match(sets, in_more_than(sets, 1), similarity).tolist()
    for at, signature in zip(possible, signatures(sets[at] for at in possible), strict=True):
        for other in known.candidates(signature):
            mine, its = sorted((first(at), first(other)))
            if mine != its and jaccard(sets[at], sets[other]) > similarity:
                group[its] = mine
        known.add(at, signature)
    return [first(member) for member in range(len(texts))]

"""Exact and near duplicates: Jaccard similarity of word 3-grams, candidates by MinHash LSH (datasketch).

Signatures take time, so only texts that may have a counterpart get one: J(a, b) > s asks that a share s of a's 3-grams is in b.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from datasketch import MinHash, MinHashLSH
from numpy.typing import NDArray

from stages.prepare.windows import Hashes, HashSet, Numbers, Words, batches, filled, runs

GRAM = 3
PERMUTATIONS = 128


def gram_sets(texts: Sequence[Numbers]) -> list[Hashes]:
    """Each text's distinct 3-grams of words and symbols, sorted; of a shorter text, all its words as one."""
    sets: list[Hashes] = []
    for _, batch in batches([filled(text, GRAM) for text in texts]):
        hashes, owner, _ = runs(batch, GRAM)
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
    """Indices of the sets of which at least a share `similarity` of the grams is in `among`."""
    if not sets:
        return np.empty(0, np.int64)
    sizes = np.array([len(grams) for grams in sets])
    found, _ = among.find(np.concatenate(sets))
    shared = np.bincount(np.repeat(np.arange(len(sets)), sizes)[found], minlength=len(sets))
    return np.flatnonzero(shared >= similarity * sizes)


def repeated(sets: Sequence[Hashes]) -> HashSet:
    """The grams that are in more than one set."""
    grams = np.sort(np.concatenate([np.empty(0, np.uint64), *sets]))
    return HashSet(grams[1:][grams[1:] == grams[:-1]])


class Index:
    """Gram sets by number, that can be asked which of them may be like another."""

    def __init__(self, similarity: float) -> None:
        # Weights favour recall: a false candidate costs one exact comparison, a missed one stays in the data.
        self.lsh = MinHashLSH(threshold=similarity, num_perm=PERMUTATIONS, weights=(0.1, 0.9))

    def add(self, number: int, signature: MinHash) -> None:
        self.lsh.insert(number, signature)

    def candidates(self, signature: MinHash) -> list[int]:
        return sorted(self.lsh.query(signature))


def signatures(sets: Iterable[Hashes]) -> Iterator[MinHash]:
    as_numbers = ((grams & np.uint64(0xFFFFFFFF)).tolist() for grams in sets)
    return iter(MinHash.generator(as_numbers, num_perm=PERMUTATIONS, seed=1, scheme="affine32", hashfunc=int))


def find_duplicates(texts: Sequence[str], similarity: float, answers: Sequence[str] | None = None) -> tuple[dict[int, int], dict[int, int]]:
    """Exact and near duplicates as {index: index of the earlier text that stays}.

    Exact: equal but for case and white space. Near: Jaccard similarity of 3-grams above `similarity`; that of their `answers` too
    where these are given, for under one long prompt different answers make like texts.
    """
    exact: dict[int, int] = {}
    first: dict[str, int] = {}
    for index, text in enumerate(texts):
        kept = first.setdefault(" ".join(text.casefold().split()), index)
        if kept != index:
            exact[index] = kept

    words, numbers = Words(), list(first.values())
    sets = gram_sets([words.read(text) for text in first])

    def alike(one: int, other: int) -> bool:
        if jaccard(sets[one], sets[other]) <= similarity:
            return False
        return answers is None or jaccard(*gram_sets([words.read(answers[numbers[at]]) for at in (one, other)])) > similarity

    known, near = Index(similarity), dict[int, int]()
    possible = may_match(sets, repeated(sets), similarity).tolist()
    for at, signature in zip(possible, signatures(sets[at] for at in possible), strict=True):
        earlier = next((other for other in known.candidates(signature) if alike(at, other)), None)
        if earlier is None:
            known.add(at, signature)
        else:
            near[numbers[at]] = numbers[earlier]
    return exact, near


def near_groups(texts: Sequence[str], similarity: float) -> list[int]:
    """Of each of the distinct texts the index of its group's first: near duplicates are in one group, and theirs too."""
    words, group = Words(), list(range(len(texts)))

    def first(member: int) -> int:
        while group[member] != member:
            member = group[member]
        return member

    sets = gram_sets([words.read(text) for text in texts])
    known = Index(similarity)
    possible = may_match(sets, repeated(sets), similarity).tolist()
    for at, signature in zip(possible, signatures(sets[at] for at in possible), strict=True):
        for other in known.candidates(signature):
            mine, its = sorted((first(at), first(other)))
            if mine != its and jaccard(sets[at], sets[other]) > similarity:
                group[its] = mine
        known.add(at, signature)
    return [first(member) for member in range(len(texts))]

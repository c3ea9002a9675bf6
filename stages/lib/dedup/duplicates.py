"""Exact duplicates and near duplicates (Jaccard similarity of word 3-grams).

MinHash LSH (datasketch) proposes candidates, which are then compared exactly. MinHash signatures
take time, so `may_match` first drops texts that cannot have a near duplicate: J(a, b) > s requires
that at least a share s of a's 3-grams is in b.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np
from datasketch import MinHash, MinHashLSH
from numpy.typing import NDArray

from stages.lib.core.progress import tracked
from stages.lib.dedup.shingles import (
    Hashes,
    HashSet,
    Numbers,
    WordIds,
    batches,
    hash_shingles,
    pad_to_length,
)

GRAM = 3  # words
PERMUTATIONS = 128  # values per MinHash signature
MAX_LSH_THRESHOLD = 0.99  # of a higher one, datasketch makes a single band and refuses it
# 3-grams in more texts than this number, or share, are boilerplate and say nothing about one text
BOILERPLATE, BOILERPLATE_SHARE = 10, 0.05


def gram_sets(texts: Sequence[Numbers]) -> list[Hashes]:
    """Each text's distinct 3-grams of words and symbols, sorted.

    All words of a shorter text count as one gram.
    """
    sets: list[Hashes] = []
    for _, batch in batches([pad_to_length(text, GRAM) for text in texts]):
        hashes, owner, _ = hash_shingles(batch, GRAM)
        sets += [distinct(grams) for grams in np.split(hashes, np.flatnonzero(np.diff(owner)) + 1)]
    return sets


def distinct(grams: Hashes) -> Hashes:
    """Like np.unique, but three times as fast for the few grams of a text; sorts in place."""
    grams.sort()
    return grams[np.concatenate([[True], grams[1:] != grams[:-1]])]


def jaccard(one: Hashes, other: Hashes) -> float:
    """Size of the intersection over size of the union."""
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / (len(one) + len(other) - shared)


def may_match(sets: Sequence[Hashes], among: HashSet, similarity: float) -> NDArray[np.int64]:
    """Indices of the sets with at least one gram, and a share `similarity` of them, in `among`."""
    matching = [np.empty(0, np.int64)]
    for first, batch in batches(sets):  # arrays with a number per gram are in memory per batch
        sizes = np.array([len(grams) for grams in batch], dtype=np.int64)
        matches, _ = among.find(concatenate(batch))
        set_of_gram = np.repeat(np.arange(len(batch)), sizes)
        shared = np.bincount(set_of_gram[matches], minlength=len(batch))
        matching.append(first + np.flatnonzero((shared >= similarity * sizes) & (shared > 0)))
    return np.concatenate(matching)


def in_more_than(sets: Sequence[Hashes], number: int) -> HashSet:
    """The grams that are in more than `number` sets."""
    # A set has a gram once, so a gram in more sets equals its neighbour `number` places further on.
    grams = concatenate(sets)
    grams.sort()
    return HashSet(
        grams[number:][grams[number:] == grams[: len(grams) - number]]
        if len(grams) > number
        else grams[:0]
    )


def without(sets: Sequence[Hashes], grams: HashSet) -> list[Hashes]:
    """Remove these grams from each set."""
    if not sets:
        return []
    flat = concatenate(sets)
    kept = np.ones(len(flat), dtype=np.bool_)
    kept[grams.find(flat)[0]] = False
    ends = np.cumsum([len(grams_of_text) for grams_of_text in sets])
    return np.split(flat[kept], np.cumsum(kept)[ends - 1][:-1])


def concatenate(sets: Sequence[Hashes]) -> Hashes:
    """All sets as one array; empty if there are none."""
    return np.concatenate([np.empty(0, np.uint64), *sets])


def lsh_index(similarity: float) -> MinHashLSH:
    """An index of signatures by number, whose `query` returns possible near duplicates."""
    # Weights favour recall: a false candidate costs one exact comparison, a missed one stays in the
    # data.
    return MinHashLSH(
        threshold=min(similarity, MAX_LSH_THRESHOLD), num_perm=PERMUTATIONS, weights=(0.1, 0.9)
    )


def signatures(sets: Iterable[Hashes]) -> Iterator[MinHash]:
    """The MinHash signature of each set of grams."""
    as_numbers = ((grams & np.uint64(0xFFFFFFFF)).tolist() for grams in sets)
    return iter(
        MinHash.generator(
            as_numbers, num_perm=PERMUTATIONS, seed=1, scheme="affine32", hashfunc=int
        )
    )


def find_duplicates(
    rows: Sequence[tuple[str, str]], similarity: float
) -> tuple[dict[int, int], dict[int, int]]:
    """Find exact and near duplicates of earlier rows.

    Exact duplicates are equal except for case and white space. Near duplicates have a Jaccard
    similarity of 3-grams above `similarity`, both of the whole rows and of the responses alone:
    with one long prompt, rows with different responses are similar.

    Args:
        rows: (prompt, responses) of each row.
        similarity: the threshold, 0..1.

    Returns:
        (exact, near), each {index of a duplicate: index of the earlier row that is kept}.
    """
    exact: dict[int, int] = {}
    first: dict[bytes, int] = {}
    for index, row in enumerate(rows):
        text = " ".join(" ".join(row).casefold().split())
        # a digest takes less memory than the text
        kept = first.setdefault(hashlib.sha256(text.encode()).digest(), index)
        if kept != index:
            exact[index] = kept

    # A near duplicate must match in the responses alone and in the whole rows, so the second are
    # only read for the few rows that may match in the first.
    words = WordIds()
    responses = possible_sets(first.values(), lambda index: words.read(rows[index][1]), similarity)
    whole = possible_sets(
        responses,
        lambda index: np.concatenate([words.read(text) for text in rows[index]]),
        similarity,
    )
    both = whole, responses
    indices, near = (lsh_index(similarity), lsh_index(similarity)), dict[int, int]()
    for index, *signed in zip(
        tracked("near duplicates", whole, len(whole), "texts"),
        *(signatures(sets[index] for index in whole) for sets in both),
        strict=True,
    ):
        candidates = set.intersection(
            *(set(lsh.query(signature)) for lsh, signature in zip(indices, signed, strict=True))
        )
        similar = (
            other
            for other in sorted(candidates)
            if all(jaccard(sets[index], sets[other]) > similarity for sets in both)
        )
        if (earlier := next(similar, None)) is not None:
            near[index] = earlier
            continue
        for lsh, signature in zip(indices, signed, strict=True):
            lsh.insert(index, signature)
    return exact, near


def possible_sets(
    indices: Collection[int], read: Callable[[int], Numbers], similarity: float
) -> dict[int, Hashes]:
    """The grams of those texts that may have a near duplicate among the texts, by index."""
    sets = gram_sets([read(index) for index in indices])
    possible = set(may_match(sets, in_more_than(sets, 1), similarity).tolist())
    return {
        index: grams
        for number, (index, grams) in enumerate(zip(indices, sets, strict=True))
        if number in possible
    }


def near_groups(texts: Sequence[str], similarity: float) -> list[int]:
    """Group distinct texts: near duplicates, and near duplicates of these, are in one group.

    Boilerplate, e.g. a system prompt that many texts begin with, is left out of the comparison.

    Returns:
        Per text, the index of the first text of its group.
    """
    words, group = WordIds(), list(range(len(texts)))

    def first(member: int) -> int:
        while group[member] != member:
            member = group[member]
        return member

    sets = gram_sets([words.read(text) for text in texts])
    sets = without(sets, in_more_than(sets, max(BOILERPLATE, round(BOILERPLATE_SHARE * len(sets)))))
    index = lsh_index(similarity)
    possible = may_match(sets, in_more_than(sets, 1), similarity).tolist()
    for text, signature in zip(
        tracked("near-duplicate prompts", possible, len(possible), "prompts"),
        signatures(sets[text] for text in possible),
        strict=True,
    ):
        for other in sorted(index.query(signature)):
            earlier, later = sorted((first(text), first(other)))
            if earlier != later and jaccard(sets[text], sets[other]) > similarity:
                group[later] = earlier
        index.insert(text, signature)
    return [first(member) for member in range(len(texts))]

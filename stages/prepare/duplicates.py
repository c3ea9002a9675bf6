"""Exact and near duplicates: Jaccard similarity of word 3-grams, candidates by MinHash LSH (datasketch)."""

import re
from collections.abc import Iterable

from datasketch import MinHash, MinHashLSH

WORD = re.compile(r"\w+|[^\w\s]")
PERMUTATIONS = 128


def shingles(text: str) -> frozenset[str]:
    """The text's word 3-grams, case aside; of a shorter text, all its words as one."""
    words = WORD.findall(text.casefold())
    return frozenset(" ".join(words[i : i + 3]) for i in range(max(len(words) - 2, 1)))


def find_duplicates(texts: Iterable[str], similarity: float) -> tuple[dict[int, int], dict[int, int]]:
    """Exact and near duplicates as {index: index of the earlier text that stays}.

    Exact: equal but for case and white space. Near: Jaccard similarity of 3-grams above `similarity`.
    """
    texts = list(texts)
    exact: dict[int, int] = {}
    first: dict[str, int] = {}
    for index, text in enumerate(texts):
        kept = first.setdefault(" ".join(text.casefold().split()), index)
        if kept != index:
            exact[index] = kept

    kept_indices = [index for index in range(len(texts)) if index not in exact]
    sets = [shingles(texts[index]) for index in kept_indices]
    # Weights favour recall: a false candidate costs one exact comparison, a missed one stays in the data.
    lsh = MinHashLSH(threshold=similarity, num_perm=PERMUTATIONS, weights=(0.1, 0.9))
    near: dict[int, int] = {}
    encoded = ([gram.encode() for gram in grams] for grams in sets)
    for position, signature in enumerate(MinHash.bulk(encoded, num_perm=PERMUTATIONS, seed=1, scheme="affine32")):
        grams = sets[position]
        alike = [other for other in lsh.query(signature) if len(grams & sets[other]) > similarity * len(grams | sets[other])]
        if alike:
            near[kept_indices[position]] = kept_indices[min(alike)]
        else:
            lsh.insert(position, signature)
    return exact, near

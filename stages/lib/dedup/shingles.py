"""Texts as word numbers, and the runs of n words in them as 64-bit hashes: what duplicates and
leaks are found by.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Numbers = NDArray[np.int32]

# written without spaces: each character is a word
CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
WORD = re.compile(rf"[^\W{CJK}]+(?:['\u2019][^\W{CJK}]+)*|[{CJK}]|[^\w\s]")
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
BITS = 27  # of the table that answers most questions of a `HashSet`: 128 MiB at most
BATCH_WORDS = 2_000_000
PAD = 0  # fills up a text that is shorter than a run


class WordIds(dict[str, int]):
    """Numbers each distinct word (1, 2, ...) and symbol (negative), case aside."""

    def __missing__(self, word: str) -> int:
        number = len(self) + 1
        self[word] = number if re.match(r"\w", word) else -number
        return self[word]

    def read(self, text: str) -> Numbers:
        """(words,) the text's words and symbols."""
        return np.array(list(map(self.__getitem__, WORD.findall(text.casefold()))), dtype=np.int32)

    def spell(self, numbers: Numbers) -> str:
        spelled = list(self)
        return " ".join(spelled[abs(number) - 1] for number in numbers.tolist() if number != PAD)


def words_of(text: Numbers) -> Numbers:
    """The text without its symbols; with them where it has nothing else."""
    words = text[text > 0]
    return words if len(words) else text


def pad_to_length(text: Numbers, length: int) -> Numbers:
    """The text, made as long as one run where it is shorter."""
    return (
        text if len(text) >= length else np.pad(text, (0, length - len(text)), constant_values=PAD)
    )


def splitmix64(numbers: Numbers) -> Hashes:
    """64 bits for each number, by the finaliser of SplitMix64 (Steele et al. 2014)."""
    bits = (numbers.astype(np.uint64) + np.uint64(1)) * MULTIPLIER
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def hash_shingles(
    texts: Sequence[Numbers], length: int
) -> tuple[Hashes, NDArray[np.int64], NDArray[np.int64]]:
    """All runs of `length` words: their hashes, the index of the text that each is in, and where in
    it each begins.

    The hash is a polynomial in 64-bit values of the words, modulo 2^64: two runs that differ hardly
    ever have the same.
    """
    flat = np.concatenate([np.empty(0, np.int32), *texts])
    sizes = np.array([len(text) for text in texts], dtype=np.int64)
    possible = len(flat) - length + 1
    if possible <= 0:
        return np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64)
    values = splitmix64(flat)
    hashes = np.zeros(possible, dtype=np.uint64)
    for offset in range(length):
        hashes *= MULTIPLIER
        hashes += values[offset : offset + possible]
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)[:possible]
    position = np.arange(possible) - starts
    owner = np.repeat(np.arange(len(sizes)), sizes)[:possible]
    within = position + length <= sizes[owner]
    return hashes[within], owner[within], position[within]


def batches(
    texts: Sequence[Numbers], words: int = BATCH_WORDS
) -> Iterator[tuple[int, Sequence[Numbers]]]:
    """The texts in slices of about so many words, each with the index of its first."""
    slices = [total // words for total in accumulate(len(text) for text in texts)]
    start = 0
    for end in range(1, len(texts) + 1):
        if end == len(texts) or slices[end] != slices[start]:
            yield start, texts[start:end]
            start = end


class HashSet:
    """Many hashes that can be asked for many: a table of the leading bits answers most questions
    with one look.
    """

    def __init__(self, hashes: Hashes) -> None:
        self.sorted = np.unique(hashes)
        bits = min(BITS, max(len(self.sorted), 1).bit_length() + 4)
        self.shift = np.uint64(64 - bits)
        self.table = np.zeros(1 << bits, dtype=np.bool_)
        self.table[self.sorted >> self.shift] = True

    def find(self, hashes: Hashes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Indices of the hashes that are in the set, and of each its place among the set's sorted
        ones.
        """
        maybe = np.flatnonzero(self.table[hashes >> self.shift])
        maybe = maybe[
            np.argsort(hashes[maybe])
        ]  # asked in order, the search stays in the processor's cache
        place = np.searchsorted(self.sorted, hashes[maybe])
        place[place == len(self.sorted)] = 0
        found = (
            self.sorted[place] == hashes[maybe]
            if len(self.sorted)
            else np.zeros(len(maybe), dtype=np.bool_)
        )
        return maybe[found], place[found]

"""Shingles (runs of n words) of texts as 64-bit hashes, to find duplicates and leaks with.

A text becomes an array of word numbers (`WordIds`), then an array of hashes of its shingles
(`hash_shingles`), of which many are looked up at once in a `HashSet`.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Numbers = NDArray[np.int32]  # the words (positive) and symbols (negative) of a text
Text = TypeVar("Text", Numbers, Hashes)

# Chinese, Japanese and Korean are written without spaces between words: each character is a word
CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
WORD = re.compile(rf"[^\W{CJK}]+(?:['\u2019][^\W{CJK}]+)*|[{CJK}]|[^\w\s]")
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # of SplitMix64
BITS = 27  # leading bits in the table of a `HashSet`, at most: 128 MiB
BATCH_WORDS = 500_000  # words whose hashes are in memory at once: about 30 MB
PAD = 0  # fills up a text that is shorter than a shingle


class WordIds(dict[str, int]):
    """Numbers of all distinct words (1, 2, ...) and symbols (negative), ignoring case."""

    def __missing__(self, word: str) -> int:
        number = len(self) + 1
        self[word] = number if re.match(r"\w", word) else -number
        return self[word]

    def read(self, text: str) -> Numbers:
        """Numbers of the text's words and symbols; new ones get the next number."""
        return np.array(list(map(self.__getitem__, WORD.findall(text.casefold()))), dtype=np.int32)

    def spell(self, numbers: Numbers) -> str:
        """The words and symbols of these numbers, separated by spaces."""
        spelled = list(self)
        return " ".join(spelled[abs(number) - 1] for number in numbers.tolist() if number != PAD)


def words_of(text: Numbers) -> Numbers:
    """The text without its symbols, or with them if it has no words."""
    words = text[text > 0]
    return words if len(words) else text


def pad_to_length(text: Numbers, length: int) -> Numbers:
    """The text, padded to `length` numbers if it is shorter."""
    return (
        text if len(text) >= length else np.pad(text, (0, length - len(text)), constant_values=PAD)
    )


def splitmix64(numbers: Numbers) -> Hashes:
    """A 64-bit hash per number, by the finaliser of SplitMix64 (Steele et al. 2014)."""
    bits = (numbers.astype(np.uint64) + np.uint64(1)) * MULTIPLIER
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def hash_shingles(
    texts: Sequence[Numbers], length: int
) -> tuple[Hashes, NDArray[np.int64], NDArray[np.int64]]:
    """Hash all shingles of the texts.

    The hash is a polynomial in 64-bit values of the words, modulo 2^64. Two different shingles
    almost never have the same hash.

    Returns:
        (hashes, owner, position), one entry per shingle: its hash, the index of its text, and the
        index of its first word in that text. Sorted by text and position.
    """
    flat = np.concatenate([np.empty(0, np.int32), *texts])
    sizes = np.array([len(text) for text in texts], dtype=np.int64)
    possible = len(flat) - length + 1
    if possible <= 0:
        return np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64)
    # All texts are hashed as one; the shingles that cross from one text into the next are dropped
    # at the end.
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
    texts: Sequence[Text], words: int = BATCH_WORDS
) -> Iterator[tuple[int, Sequence[Text]]]:
    """Split the texts into slices of about `words` words, or hashes, each with the index of its
    first text.
    """
    slices = [total // words for total in accumulate(len(text) for text in texts)]
    start = 0
    for end in range(1, len(texts) + 1):
        if end == len(texts) or slices[end] != slices[start]:
            yield start, texts[start:end]
            start = end


class HashSet:
    """A set of hashes with a fast search for many hashes at once.

    A table of leading bits sorts out most hashes that are not in the set with one look-up, so that
    the binary search is left for few.
    """

    def __init__(self, hashes: Hashes) -> None:
        self.sorted = np.unique(hashes)
        bits = min(BITS, max(len(self.sorted), 1).bit_length() + 4)
        self.shift = np.uint64(64 - bits)
        self.table = np.zeros(1 << bits, dtype=np.bool_)
        self.table[self.sorted >> self.shift] = True

    def find(self, hashes: Hashes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find which of these hashes are in the set.

        Returns:
            (indices, positions): indices into `hashes` of those in the set, in the order of their
            values; and for each its position in `self.sorted`.
        """
        candidates = np.flatnonzero(self.table[hashes >> self.shift])
        # In sorted order the binary searches stay in the processor's cache.
        candidates = candidates[np.argsort(hashes[candidates])]
        positions = np.searchsorted(self.sorted, hashes[candidates])
        positions[positions == len(self.sorted)] = 0
        matches = (
            self.sorted[positions] == hashes[candidates]
            if len(self.sorted)
            else np.zeros(len(candidates), dtype=np.bool_)
        )
        return candidates[matches], positions[matches]

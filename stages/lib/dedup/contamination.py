"""Leaks: training texts that are, in whole or in part, texts of an evaluation set.

A leak is a run of 13 words that both have (Brown et al. 2020, GPT-3, appendix C; case and symbols
aside, each CJK character a word of its own), or all words of a prompt with its response, where
these are fewer; or two texts that are near duplicates as prepare.near_duplicate says. A run, or
3-gram, in more than 10 held-out texts is boilerplate, and is left out of the comparison.

Looked at are a prompt alone, a prompt with a response, and a long response alone: two rows that
share a short prompt, or the answer "Yes.", do not leak. Equal prompts are the split's business
(stages/lib/data/splits.py).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stages.lib.core.errors import BadInput
from stages.lib.core.types import Row
from stages.lib.data.prompts import ROLES, transcript
from stages.lib.dedup.duplicates import (
    BOILERPLATE,
    LshIndex,
    concatenate,
    gram_sets,
    in_more_than,
    jaccard,
    may_match,
    signatures,
    without,
)
from stages.lib.dedup.shingles import (
    Hashes,
    HashSet,
    Numbers,
    WordIds,
    batches,
    hash_shingles,
    pad_to_length,
    words_of,
)

RUN = 13  # words
SHOWN, LISTED = 5, 100  # in an error: with what they share, and by place alone
SPEAKER = re.compile(rf"\n\n(?:{'|'.join(ROLES.values())}):")  # of transcripts: nobody's words
RESPONSES = ("completion", "chosen", "rejected")


class Leak(NamedTuple):
    """What training row `row` (an index) has of `held_out`: the words of the run, or the beginning
    of the text.
    """

    row: int
    held_out: Row
    shared: str


class TextPool:
    """Distinct texts, with the index of the first row that has each; and of each row its texts."""

    def __init__(self) -> None:
        self.texts: list[Numbers] = []
        self.first_row: list[int] = []
        self.of_row: list[list[int]] = []
        self.numbers: dict[tuple[str, ...], int] = {}

    def add(self, key: tuple[str, ...], text: Numbers, row: int) -> None:
        number = self.numbers.setdefault(key, len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
            self.first_row.append(row)
        self.of_row[row].append(number)


def pools(rows: Sequence[Row], words: WordIds) -> tuple[TextPool, TextPool]:
    """(spans, wholes): where a run of words may be, each run in one place; and what may be a near
    duplicate.
    """
    spans, wholes, read = TextPool(), TextPool(), dict[str, Numbers]()

    def numbers(text: str) -> Numbers:
        if text not in read:
            read[text] = words.read(SPEAKER.sub("\n\n", text))
        return read[text]

    for index, row in enumerate(rows):
        spans.of_row.append([])
        wholes.of_row.append([])
        prompt = row["prompt"] if isinstance(row["prompt"], str) else transcript(row["prompt"])
        asked = numbers(prompt)
        words_asked = words_of(asked)
        spans.add((prompt,), words_asked, index)
        responses = [row[name] for name in RESPONSES if name in row]
        for response in responses:
            said = numbers(response)
            words_said = words_of(said)
            spans.add(
                (prompt, response),
                pad_to_length(np.concatenate([words_asked[-(RUN - 1) :], words_said]), RUN),
                index,
            )
            wholes.add((prompt, response), np.concatenate([asked, said]), index)
            if len(words_said) >= RUN:
                wholes.add((response,), said, index)
        if not responses:
            wholes.add((prompt,), asked, index)
    return spans, wholes


def find_leaks(train: Sequence[Row], held_out: Sequence[Row], similarity: float) -> list[Leak]:
    """The training rows that have something of a held-out row, each with the first one found.

    Rows are {prompt}, with completion, or with chosen and rejected; `similarity` is
    prepare.near_duplicate.
    """
    words = WordIds()
    (held_spans, held_wholes), (spans, wholes) = pools(held_out, words), pools(train, words)
    shared = shared_shingles(spans.texts, held_spans.texts)
    alike = dict(near_duplicates(wholes.texts, held_wholes.texts, similarity))
    leaks = []
    for row in range(len(train)):
        span = next((text for text in spans.of_row[row] if text in shared), None)
        whole = next((text for text in wholes.of_row[row] if text in alike), None)
        if span is not None:
            other, start = shared[span]
            run = spans.texts[span][start : start + RUN]
            leaks.append(Leak(row, held_out[held_spans.first_row[other]], words.spell(run)))
        elif whole is not None:
            beginning = wholes.texts[whole][:RUN]
            leaks.append(
                Leak(row, held_out[held_wholes.first_row[alike[whole]]], words.spell(beginning))
            )
    return leaks


def leaks_by_set(
    sets: Mapping[str, Sequence[Row]], held_out: Sequence[Row], similarity: float
) -> dict[str, list[Leak]]:
    """`find_leaks` of several training sets, whose held-out rows (and what the sets have in common)
    are read once.
    """
    found = find_leaks([row for rows in sets.values() for row in rows], held_out, similarity)
    leaks, start = {}, 0
    for name, rows in sets.items():
        end = start + len(rows)
        leaks[name] = [
            leak._replace(row=leak.row - start) for leak in found if start <= leak.row < end
        ]
        start = end
    return leaks


def shared_shingles(
    texts: Sequence[Numbers], held_out: Sequence[Numbers]
) -> dict[int, tuple[int, int]]:
    """{text: (held-out text, where in `text` the run begins)} of the texts that share a run that is
    no boilerplate.
    """
    hashes, first_text = distinctive_shingles(held_out)
    known, shared = HashSet(hashes), dict[int, tuple[int, int]]()
    for first, batch in batches(texts):
        found_hashes, owner, position = hash_shingles(batch, RUN)
        found, place = known.find(found_hashes)
        order = np.argsort(found)
        found, place = found[order], place[order]
        owners, at = np.unique(owner[found], return_index=True)
        for text, where, run in zip(
            owners, position[found][at], first_text[place][at], strict=True
        ):
            shared[first + int(text)] = int(run), int(where)
    return shared


def distinctive_shingles(texts: Sequence[Numbers]) -> tuple[Hashes, NDArray[np.int64]]:
    """The distinct runs, sorted, that are in at most 10 texts, and the first text of each."""
    hashes, owner, _ = hash_shingles(texts, RUN)
    order = np.argsort(hashes, kind="stable")  # texts stay in order within a run
    hashes, owner = hashes[order], owner[order]
    new_run = np.diff(hashes, prepend=~hashes[:1]) != 0
    starts = np.flatnonzero(new_run)
    if not len(starts):
        return hashes, owner
    new_text = new_run | (np.diff(owner, prepend=-1) != 0)
    telling = starts[np.add.reduceat(new_text, starts, dtype=np.int64) <= BOILERPLATE]
    return hashes[telling], owner[telling]


def near_duplicates(
    texts: Sequence[Numbers], held_out: Sequence[Numbers], similarity: float
) -> Iterator[tuple[int, int]]:
    """(text, first held-out text that it is a near duplicate of), boilerplate aside."""
    theirs = gram_sets(held_out)
    boilerplate = in_more_than(theirs, BOILERPLATE)
    theirs = without(theirs, boilerplate)
    known = HashSet(concatenate(theirs))
    ours: dict[int, Hashes] = {}
    for first, batch in batches(texts):
        sets = without(gram_sets(batch), boilerplate)
        ours |= {first + int(at): sets[at] for at in may_match(sets, known, similarity)}
    index = LshIndex(similarity)
    possible = may_match(theirs, HashSet(concatenate(list(ours.values()))), similarity).tolist()
    for at, signature in zip(possible, signatures(theirs[at] for at in possible), strict=True):
        index.add(at, signature)
    for (at, grams), signature in zip(ours.items(), signatures(ours.values()), strict=True):
        for other in index.candidates(signature):
            if np.array_equal(grams, theirs[other]) or jaccard(grams, theirs[other]) > similarity:
                yield at, other
                break


def check_no_leaks(leaks: Sequence[tuple[str, Leak]], next_step: str) -> None:
    """
    Raises:
        BadInput: there are leaks; names the training rows by their places, the first with what they
            share.
    """
    if leaks:
        by_place = dict(reversed(leaks))
        named = list(reversed(by_place))
        first = "\n".join(
            f"  training {place} and held-out {by_place[place].held_out['id']}: “{by_place[place].shared}”"
            for place in named[:SHOWN]
        )
        others = (
            f"\n  also {', '.join(named[SHOWN:LISTED])}{', ...' if len(named) > LISTED else ''}"
            if len(named) > SHOWN
            else ""
        )
        raise BadInput(
            f"{len(named)} training rows have {RUN} words in a row, or nearly the whole text, in common with a held-out row; "
            f"the first:\n{first}{others}\n{next_step}"
        )

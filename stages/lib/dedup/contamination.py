"""Leaks: training texts that contain, or nearly equal, a text of an evaluation set.

A training row leaks in one of two ways. It shares a run of 13 words with a held-out row (Brown et
al. 2020, GPT-3, appendix C; case and symbols are ignored, each CJK character is a word), or all
words of prompt and response if these are fewer. Or one of its texts is a near duplicate of a
held-out text (prepare.near_duplicate). Runs and 3-grams in more than 10 held-out texts are
boilerplate and left out of the comparison.

Compared are a prompt alone, a prompt with a response, and a long response alone. So two rows that
share a short prompt, or the response "Yes.", do not leak. stages/lib/data/splits.py checks for
equal prompts.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stages.lib.core.errors import BadInput
from stages.lib.core.progress import tracked
from stages.lib.core.rows import PromptRow, responses_of
from stages.lib.core.types import ROLES
from stages.lib.data.prompts import as_text
from stages.lib.dedup.duplicates import (
    BOILERPLATE,
    concatenate,
    gram_sets,
    in_more_than,
    jaccard,
    lsh_index,
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
TRAIN_ROWS = 20_000  # training rows per set whose texts are in memory at once
SHOWN, LISTED = 5, 100  # leaks in an error message: with the shared words, and by location only
SPEAKER = re.compile(rf"\n\n(?:{'|'.join(ROLES.values())}):")  # role labels of a transcript


class Leak(NamedTuple):
    """A training row that has text of a held-out row.

    row: index of the training row. held_out: the held-out row. shared: the words of the shared run,
    or the first words of the near duplicate.
    """

    row: int
    held_out: PromptRow
    shared: str


class TextPool:
    """Distinct texts of rows.

    texts: each distinct text once. first_row: per text, the first row that has it. of_row: per row,
    the numbers of its texts. numbers: the number of each text by its key.
    """

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


def pools(rows: Sequence[PromptRow], words: WordIds) -> tuple[TextPool, TextPool]:
    """Collect the texts of rows that are compared.

    Args:
        rows: rows with `prompt`, and with `completion`, or with `chosen` and `rejected`.
        words: the numbers of words, shared by all texts that are compared.

    Returns:
        (spans, wholes): texts to search for shared runs, so cut that no run is in two of them; and
        texts to compare as wholes.
    """
    spans, wholes, numbers_of = TextPool(), TextPool(), dict[str, Numbers]()

    def numbers(text: str) -> Numbers:
        if text not in numbers_of:
            numbers_of[text] = words.read(SPEAKER.sub("\n\n", text))
        return numbers_of[text]

    for index, row in enumerate(tracked("words", rows, len(rows))):
        spans.of_row.append([])
        wholes.of_row.append([])
        prompt = as_text(row["prompt"])
        prompt_numbers = numbers(prompt)
        prompt_words = words_of(prompt_numbers)
        spans.add((prompt,), prompt_words, index)
        responses = responses_of(row)
        for response in responses:
            response_numbers = numbers(response)
            response_words = words_of(response_numbers)
            # Runs that begin in the prompt's last 12 words and end in the response
            span = np.concatenate([prompt_words[-(RUN - 1) :], response_words])
            spans.add((prompt, response), pad_to_length(span, RUN), index)
            whole = np.concatenate([prompt_numbers, response_numbers])
            wholes.add((prompt, response), whole, index)
            if len(response_words) >= RUN:
                wholes.add((response,), response_numbers, index)
        if not responses:
            wholes.add((prompt,), prompt_numbers, index)
    return spans, wholes


def leaks_by_set(
    sets: Mapping[str, Sequence[PromptRow]], held_out: Sequence[PromptRow], similarity: float
) -> dict[str, list[Leak]]:
    """Find the training rows that leak text of a held-out row.

    Texts of TRAIN_ROWS rows of each set are in memory at once. Rows at about the same place in
    several sets often have texts in common, which are read once.

    Args:
        sets: training rows with `prompt`, and with `completion`, or with `chosen` and `rejected`.
        held_out: held-out rows, in the same format.
        similarity: Jaccard similarity of word 3-grams above which two texts are near duplicates
            (prepare.near_duplicate), 0..1.

    Returns:
        By set, one leak per leaking row (its index in the set), with the first held-out row that it
        shares text with. A shared run is preferred to a near duplicate.

    Example:
        >>> held_out = [{"prompt": "Tell me a tale.", "completion": " " + "once upon a time " * 4}]
        >>> train = [
        ...     {"prompt": "Hello", "completion": " there"},
        ...     {"prompt": "Write.", "completion": " Well, " + "once upon a time " * 4},
        ... ]
        >>> [leak] = leaks_by_set({"train": train}, held_out, similarity=0.9)["train"]
        >>> leak.row, leak.shared
        (1, 'once upon a time once upon a time once upon a time once')
    """
    searched, leaks = HeldOutTexts(held_out, similarity), {name: list[Leak]() for name in sets}
    for start in range(0, max(map(len, sets.values()), default=0), TRAIN_ROWS):
        parts = {name: rows[start : start + TRAIN_ROWS] for name, rows in sets.items()}
        part_leaks = searched.leaks([row for part in parts.values() for row in part])
        offset = 0  # of the set's rows among those of all parts
        for name, part in parts.items():
            leaks[name] += [
                leak._replace(row=start + leak.row - offset)
                for leak in part_leaks
                if offset <= leak.row < offset + len(part)
            ]
            offset += len(part)
    return leaks


class HeldOutTexts:
    """The texts of held-out rows, which are searched for in training rows.

    Args:
        rows: held-out rows.
        similarity: see `leaks_by_set`.
    """

    def __init__(self, rows: Sequence[PromptRow], similarity: float) -> None:
        self.rows, self.similarity, self.words = rows, similarity, WordIds()
        spans, wholes = pools(rows, self.words)
        self.row_of_span, self.row_of_whole = spans.first_row, wholes.first_row
        hashes, self.span_of_run = distinctive_shingles(spans.texts)
        self.runs = HashSet(hashes)
        del spans, hashes
        grams = gram_sets(wholes.texts)
        self.boilerplate = in_more_than(grams, BOILERPLATE)
        self.grams = without(grams, self.boilerplate)
        del grams
        self.all_grams = HashSet(concatenate(self.grams))

    def leaks(self, train: Sequence[PromptRow]) -> list[Leak]:
        """The leaks of training rows, as `leaks_by_set` returns them."""
        spans, wholes = pools(train, self.words)
        shared = self.shared_runs(spans.texts)
        duplicates = dict(self.near_duplicates(wholes.texts))
        leaks = []
        for row in range(len(train)):
            span = next((text for text in spans.of_row[row] if text in shared), None)
            whole = next((text for text in wholes.of_row[row] if text in duplicates), None)
            if span is not None:
                other, start = shared[span]
                words = spans.texts[span][start : start + RUN]
                held_out = self.rows[self.row_of_span[other]]
            elif whole is not None:
                words = wholes.texts[whole][:RUN]
                held_out = self.rows[self.row_of_whole[duplicates[whole]]]
            else:
                continue
            leaks.append(Leak(row, held_out, self.words.spell(words)))
        return leaks

    def shared_runs(self, texts: Sequence[Numbers]) -> dict[int, tuple[int, int]]:
        """Find the texts that share a run of words with a held-out span, boilerplate aside.

        Returns:
            {index of a text: (number of the held-out span, position of the run in the text)}, for
            the first shared run of each text.
        """
        shared: dict[int, tuple[int, int]] = {}
        for first, batch in batches(texts):
            hashes, owner, position = hash_shingles(batch, RUN)
            matches, matched = self.runs.find(hashes)
            order = np.argsort(matches)  # back to the order of texts and positions
            matches, matched = matches[order], matched[order]
            # np.unique returns the index of the first match of each text
            owners, first_match = np.unique(owner[matches], return_index=True)
            starts, others = position[matches][first_match], self.span_of_run[matched][first_match]
            for text, start, other in zip(owners, starts, others, strict=True):
                shared[first + int(text)] = int(other), int(start)
        return shared

    def near_duplicates(self, texts: Sequence[Numbers]) -> Iterator[tuple[int, int]]:
        """Find near duplicates of held-out texts, boilerplate aside.

        Yields:
            (index of a text, number of the first held-out text that it is a near duplicate of).
        """
        text_grams: dict[int, Hashes] = {}
        for first, batch in batches(texts):
            sets = without(gram_sets(batch), self.boilerplate)
            matching = may_match(sets, self.all_grams, self.similarity)
            text_grams |= {first + int(number): sets[number] for number in matching}
        index = lsh_index(self.similarity)
        text_set = HashSet(concatenate(list(text_grams.values())))
        possible = may_match(self.grams, text_set, self.similarity).tolist()
        possible_signatures = signatures(self.grams[number] for number in possible)
        for number, signature in zip(possible, possible_signatures, strict=True):
            index.insert(number, signature)
        shown = tracked(
            "near duplicates of held-out texts", text_grams.items(), len(text_grams), "texts"
        )
        for (text, grams), signature in zip(shown, signatures(text_grams.values()), strict=True):
            for other in sorted(index.query(signature)):
                # Equal texts count for any similarity, also for a threshold of 1
                if (
                    np.array_equal(grams, self.grams[other])
                    or jaccard(grams, self.grams[other]) > self.similarity
                ):
                    yield text, other
                    break


def distinctive_shingles(texts: Sequence[Numbers]) -> tuple[Hashes, NDArray[np.int32]]:
    """The runs in at most 10 texts: (distinct hashes, sorted; index of the first text of each)."""
    parts = [
        (hashes, (first + owner).astype(np.int32))
        for first, batch in batches(texts)
        for hashes, owner, _ in [hash_shingles(batch, RUN)]
    ]
    hashes = np.concatenate([np.empty(0, np.uint64), *(part[0] for part in parts)])
    owner = np.concatenate([np.empty(0, np.int32), *(part[1] for part in parts)])
    del parts
    order = np.argsort(hashes, kind="stable")  # texts stay in order within a run
    hashes, owner = hashes[order], owner[order]
    del order
    # ~x differs from x, so that the first run counts as new
    new_run = np.diff(hashes, prepend=~hashes[:1]) != 0
    starts = np.flatnonzero(new_run)
    if not len(starts):
        return hashes, owner
    new_text = new_run | (np.diff(owner, prepend=-1) != 0)
    number_of_texts = np.add.reduceat(new_text, starts, dtype=np.int64)
    distinctive = starts[number_of_texts <= BOILERPLATE]
    return hashes[distinctive], owner[distinctive]


def check_no_leaks(leaks: Sequence[tuple[str, Leak]], next_step: str) -> None:
    """Check that there are no leaks.

    Args:
        leaks: leaks, each with the location of its training row.
        next_step: what the user should do, for the message.
    """
    if not leaks:
        return
    # Several rows may come from one location: keep the first leak per location, in order.
    by_location = dict(reversed(leaks))
    locations = list(reversed(by_location))
    first = "\n".join(
        f"  training {location} and held-out {by_location[location].held_out['id']}: "
        f"“{by_location[location].shared}”"
        for location in locations[:SHOWN]
    )
    more = ", ..." if len(locations) > LISTED else ""
    others = (
        f"\n  also {', '.join(locations[SHOWN:LISTED])}{more}" if len(locations) > SHOWN else ""
    )
    raise BadInput(
        f"{len(locations)} training rows have {RUN} words in a row, or nearly the whole text, "
        f"in common with a held-out row; the first:\n{first}{others}\n{next_step}"
    )

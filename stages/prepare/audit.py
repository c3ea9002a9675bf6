"""What prepare found: every row that it lost, by cause, with its place."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from stages.lib.core.errors import BadInput
from stages.lib.core.params.data import PrepareParams
from stages.lib.core.types import Prompt, Row
from stages.lib.data.prompts import render_prompt
from stages.lib.data.splits import prompt_key
from stages.lib.dedup.contamination import Leak
from stages.lib.dedup.duplicates import find_duplicates
from stages.prepare.formats import excerpt, row_excerpt

SHOWN = 5
BATCH = 1000  # prompts in one call of the tokenizer
BAD, TIE, CONTRADICTION, LEAK = "bad row", "tie", "contradiction", "leak"
EXACT, NEAR = "exact duplicate", "near duplicate"
LONG, SHARED_PROMPT = "prompt longer than prepare.max_prompt_tokens", "prompt is held out"


@dataclass
class Audit:
    """Rows read, by source; rows lost, by cause: each with `where` (file:line of a source), the
    first few with their text, and with `of` (the row for which it was dropped) and `reason` where
    there is one."""

    rows_read: Counter[str] = field(default_factory=Counter)
    rows_kept: int = 0  # before the split
    lost: dict[str, list[dict[str, str]]] = field(default_factory=lambda: defaultdict(list))

    def lose(self, cause: str, where: str, text: str = "", **why: str) -> None:
        shown = {"text": excerpt(text)} if text and len(self.lost[cause]) < SHOWN else {}
        self.lost[cause].append({"where": where, **why, **shown})

    def count(self, cause: str) -> int:
        return len(self.lost[cause]) if cause in self.lost else 0

    def by_cause(self) -> dict[str, int]:
        return {cause: len(rows) for cause, rows in self.lost.items()}

    def check_bad_share(self, most: float) -> None:
        """
        Raises:
            BadInput: more than the share `most` of the rows read are bad, or there are no rows.
        """
        total, bad = sum(self.rows_read.values()), self.count(BAD)
        if not total:
            raise BadInput(
                f"no rows in {', '.join(self.rows_read) or 'prepare.sources'}; expected one JSON object a line"
            )
        if bad > most * total:
            first = "\n".join(
                f"  {row['where']}: {row['reason']}" for row in self.lost[BAD][:SHOWN]
            )
            raise BadInput(
                f"{bad} of {total} rows are bad, more than prepare.max_bad_share {most}; the first:\n{first}\n"
                f"mend the rows (`rondo check-data FILE` lists them all), or raise prepare.max_bad_share to go on without them"
            )

    def drop_contradictions(self, rows: list[Row]) -> list[Row]:
        """Rows but for pairs of which another says the opposite: one of the two must be wrong, and
        nobody knows which.
        """
        opposite = contradictions(rows)
        for index, other in opposite.items():
            self.lose(
                CONTRADICTION, rows[index]["where"], text_of(rows[index]), of=rows[other]["where"]
            )
        return [row for index, row in enumerate(rows) if index not in opposite]

    def drop_duplicates(
        self, rows: list[Row], texts: Sequence[tuple[str, str]], similarity: float
    ) -> list[Row]:
        """Rows (with their prompt and answers) but for exact and near duplicates of earlier ones."""
        exact, near = find_duplicates(texts, similarity)
        for cause, found in ((EXACT, exact), (NEAR, near)):
            for index, kept in found.items():
                self.lose(cause, rows[index]["where"], text_of(rows[index]), of=rows[kept]["where"])
        return [row for index, row in enumerate(rows) if index not in exact and index not in near]

    def drop_long_prompts(
        self, rows: list[Row], prompts: Iterable[Prompt], tokenizer: Any, config: PrepareParams
    ) -> list[Row]:
        """Rows (with their prompts) whose prompt has at most prepare.max_prompt_tokens tokens."""
        kept = []
        for row, length in zip(rows, prompt_lengths(prompts, tokenizer, config), strict=True):
            if length <= config.max_prompt_tokens:
                kept.append(row)
            else:
                self.lose(LONG, row["where"], text_of(row), reason=f"{length} tokens")
        return kept

    def drop_leaks(self, name: str, rows: list[Row], leaks: Iterable[Leak]) -> list[Row]:
        """The rows of the training set `name` but for the leaking ones."""
        leaking = {leak.row for leak in leaks}
        for leak in leaks:
            row = rows[leak.row]
            self.lose(
                LEAK, row["id"], text_of(row), of=leak.held_out["id"], set=name, shared=leak.shared
            )
        return [row for index, row in enumerate(rows) if index not in leaking]

    def report(self) -> dict[str, Any]:
        return {
            "rows_read": dict(self.rows_read),
            "rows_kept": self.rows_kept,
            "by_cause": self.by_cause(),
            "bad_reasons": dict(Counter(row["reason"] for row in self.lost.get(BAD, []))),
            "lost": dict(self.lost),
        }


def contradictions(rows: Sequence[Row]) -> dict[int, int]:
    """{index: index of the first that says the opposite} of the pairs with one prompt and two
    texts, chosen and rejected swapped.
    """
    first: dict[tuple[str, str, str], int] = {}
    keys = []
    for index, row in enumerate(rows):
        if "chosen" in row:
            key = (
                prompt_key(row["prompt"]),
                prompt_key(row["chosen"]),
                prompt_key(row["rejected"]),
            )
            first.setdefault(key, index)
            keys.append((index, (key[0], key[2], key[1])))
    return {index: first[swapped] for index, swapped in keys if swapped in first}


def prompt_lengths(
    prompts: Iterable[Prompt], tokenizer: Any, config: PrepareParams
) -> Iterator[int]:
    """Each prompt's number of tokens, as `stages.prompts.encode` makes them."""
    texts = [render_prompt(tokenizer, prompt, config.prompt_format) for prompt in prompts]
    for start in range(0, len(texts), BATCH):
        encoded = tokenizer(
            texts[start : start + BATCH], add_special_tokens=False, return_attention_mask=False
        )
        yield from map(len, encoded.input_ids)


def text_of(row: Row) -> str:
    """A row's texts in one line; of a tweet, its text."""
    return row_excerpt(row) if "prompt" in row else str(row["text"])

"""What prepare found: every bad row by its line, and everything it dropped, by cause."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from stages.errors import BadInput
from stages.params import PrepareParams
from stages.prepare.duplicates import find_duplicates
from stages.prompts import Prompt, encode
from stages.records import Row

SHOWN = 5


@dataclass
class Audit:
    """Counts and places; `where` is file:line of a source."""

    rows_read: Counter[str] = field(default_factory=Counter)  # by source
    bad: list[dict[str, str]] = field(default_factory=list)  # {where, reason}
    dropped: Counter[str] = field(default_factory=Counter)  # by cause, e.g. profanity
    exact_duplicates: list[dict[str, str]] = field(default_factory=list)  # {where, of}
    near_duplicates: list[dict[str, str]] = field(default_factory=list)

    def add_bad(self, where: str, reason: str) -> None:
        self.bad.append({"where": where, "reason": reason})

    def check_bad_share(self, most: float) -> None:
        """
        Raises:
            BadInput: more than the share `most` of the rows read are bad, or there are no rows.
        """
        total = sum(self.rows_read.values())
        if not total:
            raise BadInput(f"no rows in {', '.join(self.rows_read) or 'prepare.sources'}; expected one JSON object a line")
        if len(self.bad) > most * total:
            first = "\n".join(f"  {row['where']}: {row['reason']}" for row in self.bad[:SHOWN])
            raise BadInput(
                f"{len(self.bad)} of {total} rows are bad, more than prepare.max_bad_share {most}; the first:\n{first}\n"
                f"mend the rows, or raise prepare.max_bad_share to go on without them"
            )

    def drop_duplicates(self, rows: list[Row], texts: Iterable[str], similarity: float) -> list[Row]:
        """Rows (with their texts) but for exact and near duplicates of earlier ones, which are noted by `where`."""
        exact, near = find_duplicates(texts, similarity)
        for noted, found in ((self.exact_duplicates, exact), (self.near_duplicates, near)):
            noted += [{"where": rows[index]["where"], "of": rows[kept]["where"]} for index, kept in found.items()]
        return [row for index, row in enumerate(rows) if index not in exact and index not in near]

    def drop_long_prompts(self, rows: list[Row], prompts: Iterable[Prompt], tokenizer: Any, config: PrepareParams) -> list[Row]:
        """Rows (with their prompts) whose prompt has at most prepare.max_prompt_tokens tokens."""
        lengths = (len(encode(tokenizer, prompt, None, config.prompt_format)[0]) for prompt in prompts)
        kept = [row for row, length in zip(rows, lengths, strict=True) if length <= config.max_prompt_tokens]
        self.dropped["prompt longer than prepare.max_prompt_tokens"] = len(rows) - len(kept)
        return kept

    def report(self) -> dict[str, Any]:
        return {
            "rows_read": dict(self.rows_read),
            "bad_rows": self.bad,
            "bad_reasons": dict(Counter(row["reason"] for row in self.bad)),
            "dropped": {cause: count for cause, count in self.dropped.items() if count},
            "exact_duplicates": self.exact_duplicates,
            "near_duplicates": self.near_duplicates,
        }

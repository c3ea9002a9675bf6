"""The audit of prepare: every dropped row, by cause, with its location."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from stages.lib.core.errors import BadInput
from stages.lib.core.html import render_page
from stages.lib.core.params.data import PrepareParams
from stages.lib.core.params.shared import PromptFormat
from stages.lib.core.progress import tracked
from stages.lib.core.rows import TEXTS, HasPrompt, PromptRow
from stages.lib.core.types import Prompt
from stages.lib.data.prompts import PromptRefused, render_prompt, with_bos
from stages.lib.data.splits import prompt_key
from stages.lib.dedup.contamination import Leak
from stages.lib.dedup.duplicates import find_duplicates
from stages.prepare.normalise import Located, SourceRow, excerpt, row_excerpt, source_texts
from stages.prepare.turns import Defect

SHOWN_COLUMNS = 50
SHOWN = 5  # rows per cause whose text is kept, and rows in an error message
TOKENIZER_BATCH_SIZE = 1000  # prompts per call of the tokenizer
BAD, TIE, CONTRADICTION, LEAK = "bad row", "tie", "contradiction", "leak"
ANOTHER_SPEAKER, ALONE = "another speaker", "no response to compare with"
EXACT, NEAR = "exact duplicate", "near duplicate"
LONG, SHARED_PROMPT = "prompt longer than prepare.max_prompt_tokens", "prompt is held out"


T = TypeVar("T")
AnyLocated = TypeVar("AnyLocated", bound=Located)


@dataclass
class Audit:
    """Counts of rows read, and the list of dropped rows.

    rows_read: by source. rows_kept: rows left before the split.
    ignored_columns: by column, the number of rows that have a value there which nothing reads.
    conversations: rows with messages or a transcript.
    dropped: by cause, rows with `where` (file:line of a source), and if they apply `of` (the row
    that this one duplicates, contradicts or leaks), `reason`, and `text` (first rows only).
    """

    rows_read: Counter[str] = field(default_factory=Counter)
    rows_kept: int = 0
    ignored_columns: Counter[str] = field(default_factory=Counter)
    conversations: int = 0
    dropped: dict[str, list[dict[str, str]]] = field(default_factory=lambda: defaultdict(list))

    def counted(self, source: str, rows: Iterable[T]) -> Iterator[T]:
        """The rows of a source, each counted as read."""
        self.rows_read[source] += 0  # also of a file without rows
        for row in rows:
            self.rows_read[source] += 1
            yield row

    def record_drop(self, cause: str, location: str, text: str = "", **details: str) -> None:
        """Record a dropped row. details: `of`, `reason`, `set` or `shared`."""
        shown = {"text": excerpt(text)} if text and len(self.dropped[cause]) < SHOWN else {}
        self.dropped[cause].append({"where": location, **details, **shown})

    def count(self, cause: str) -> int:
        return len(self.dropped[cause]) if cause in self.dropped else 0

    def by_cause(self) -> dict[str, int]:
        return {cause: len(rows) for cause, rows in self.dropped.items()}

    def check_bad_share(self, max_share: float) -> None:
        """Check that there are rows, and that few of them are bad."""
        total, bad = sum(self.rows_read.values()), self.count(BAD)
        if not total:
            raise BadInput(
                f"no rows in {', '.join(self.rows_read) or 'prepare.sources'}; expected one JSON"
                " object per line"
            )
        if bad > max_share * total:
            first = "\n".join(
                f"  {row['where']}: {row['reason']}" for row in self.dropped[BAD][:SHOWN]
            )
            raise BadInput(
                f"{bad} of {total} rows are bad, more than prepare.max_bad_share {max_share};"
                f" the first:\n{first}\n"
                "correct the rows (`rondo check-data SOURCE` lists all of them), or raise"
                " prepare.max_bad_share to continue without them"
            )

    def drop_contradictions(self, rows: list[SourceRow]) -> list[SourceRow]:
        """Drop pairs that another pair contradicts: one of the two must be wrong, and nothing shows
        which, so both go.
        """
        return self._drop(rows, {CONTRADICTION: contradictions(rows)})

    def drop_duplicates(
        self, rows: list[AnyLocated], texts: Sequence[tuple[str, str]], similarity: float
    ) -> list[AnyLocated]:
        """Drop exact and near duplicates of earlier rows. texts: (prompt, responses) per row."""
        exact, near = find_duplicates(texts, similarity)
        return self._drop(rows, {EXACT: exact, NEAR: near})

    def _drop(
        self, rows: list[AnyLocated], others: Mapping[str, Mapping[int, int]]
    ) -> list[AnyLocated]:
        """Drop rows because of another one: by cause, {index of the row: index of the other}."""
        for cause, other_of in others.items():
            for index, other in other_of.items():
                row = rows[index]
                self.record_drop(cause, row["where"], full_text(row), of=rows[other]["where"])
        dropped = {index for other_of in others.values() for index in other_of}
        return [row for index, row in enumerate(rows) if index not in dropped]

    def drop_long_prompts(
        self,
        rows: list[AnyLocated],
        prompts: Iterable[Prompt],
        tokenizer: Any,
        config: PrepareParams,
    ) -> list[AnyLocated]:
        """Drop rows whose prompt has more than prepare.max_prompt_tokens tokens, and as bad rows
        those whose prompt the chat template refuses.

        Raises:
            BadInput: too many rows are bad.
        """
        kept, rendered, texts = [], [], []
        for row, prompt in zip(rows, prompts, strict=True):
            try:
                texts.append(rendered_prompt(tokenizer, prompt, config.prompt_format))
                rendered.append(row)
            except Defect as defect:
                self.record_drop(BAD, row["where"], full_text(row), reason=str(defect))
        self.check_bad_share(config.max_bad_share)
        for row, length in zip(rendered, text_lengths(texts, tokenizer), strict=True):
            if length <= config.max_prompt_tokens:
                kept.append(row)
            else:
                self.record_drop(LONG, row["where"], full_text(row), reason=f"{length} tokens")
        return kept

    def drop_leaks(
        self, name: str, rows: Sequence[PromptRow], leaks: Iterable[Leak]
    ) -> list[PromptRow]:
        """Drop the leaking rows of the training set `name`."""
        leaking = {leak.row for leak in leaks}
        for leak in leaks:
            row, held_out_id = rows[leak.row], leak.held_out["id"]
            text = full_text(row)
            self.record_drop(LEAK, row["id"], text, of=held_out_id, set=name, shared=leak.shared)
        return [row for index, row in enumerate(rows) if index not in leaking]

    def report(self) -> dict[str, Any]:
        """The content of audit.json."""
        return {
            "rows_read": dict(self.rows_read),
            "rows_kept": self.rows_kept,
            "ignored_columns": dict(self.ignored_columns.most_common(SHOWN_COLUMNS)),
            "by_cause": self.by_cause(),
            "bad_reasons": dict(Counter(row["reason"] for row in self.dropped.get(BAD, []))),
            "dropped": dict(self.dropped),
        }


def rendered_prompt(tokenizer: Any, prompt: Prompt, prompt_format: PromptFormat) -> str:
    """A prompt as the model sees it.

    Raises:
        Defect: the chat template refuses it.
    """
    try:
        return render_prompt(tokenizer, prompt, prompt_format)
    except PromptRefused as refused:
        raise Defect(f"the chat template refuses the prompt: {refused.__cause__}") from None


def contradictions(rows: Sequence[SourceRow]) -> dict[int, int]:
    """Pairs with the same prompt and texts as another pair, but chosen and rejected swapped.

    Returns:
        {index of the pair: index of the first pair that prefers the other text}.
    """
    first: dict[tuple[str, str, str], int] = {}
    swapped_keys: list[tuple[int, tuple[str, str, str]]] = []
    for index, row in enumerate(rows):
        if "chosen" in row:
            prompt, chosen, rejected = map(
                prompt_key, (row["prompt"], row["chosen"], row["rejected"])
            )
            first.setdefault((prompt, chosen, rejected), index)
            swapped_keys.append((index, (prompt, rejected, chosen)))
    return {index: first[key] for index, key in swapped_keys if key in first}


def text_lengths(texts: Sequence[str], tokenizer: Any) -> Iterator[int]:
    """The number of tokens per rendered prompt, as `stages.lib.data.prompts.encode` tokenises."""
    starts = range(0, len(texts), TOKENIZER_BATCH_SIZE)
    for start in tracked("prompt lengths", starts, len(starts), "batches"):
        encoded = tokenizer(
            texts[start : start + TOKENIZER_BATCH_SIZE],
            add_special_tokens=False,
            return_attention_mask=False,
        )
        yield from (len(with_bos(tokenizer, ids)) for ids in encoded.input_ids)


def full_text(row: Mapping[str, object]) -> str:
    """The texts of a normalised row in one line; of a tweet, its text."""
    return row_excerpt(cast(HasPrompt, row)) if "prompt" in row else str(row["text"])


EXAMPLES_PER_CAUSE = 5
# Why rows of a cause were dropped, and what to do. Causes of the embedded data need no explanation.
EXPLANATIONS = {
    "bad row": "cannot be read as a demonstration or a pair; correct the row",
    "tie": "the pair names no better text, so a reward model can learn nothing from it",
    "no response to compare with": "its rating or bad label says something only beside another"
    " response to the same prompt",
    "another speaker": "a turn contains a speaker's marker, e.g. `Human:`: two"
    " turns in one, or a dialogue as an answer (prepare.speaker_markers)",
    "contradiction": "another pair prefers the other one of the same two texts: one of the pairs"
    " must be wrong, so both are dropped",
    "exact duplicate": "equals an earlier row, ignoring case and white space",
    "near duplicate": "prompt and responses share most word 3-grams with an earlier row"
    " (prepare.near_duplicate)",
    "leak": "13 consecutive words, or nearly the whole text, occur in an evaluation text; dropped"
    " from the named training set",
    "prompt is held out": "its prompt equals or continues an evaluation prompt",
}


def render_report(report: dict[str, Any], round_: str) -> str:
    """The HTML page of a report, which is the content of data.json."""
    filters = {
        "texts": named_texts,
        "percent": lambda share: f"{share:.1%}",
        "number": lambda value: f"{value:,.6g}",
    }
    return render_page(
        "stages.prepare",
        "data.html.jinja",
        filters,
        report=report,
        round=round_,
        shown=EXAMPLES_PER_CAUSE,
        explanations=EXPLANATIONS,
    )


def named_texts(row: HasPrompt) -> list[tuple[str, str]]:
    """The row's texts as (name, text); a conversation becomes a transcript."""
    names = [name for name in TEXTS if name in row]
    return list(zip(names, source_texts(row), strict=True))

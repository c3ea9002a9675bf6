"""Tokens of a round's texts: measured where prepare has run, else those that the params admit."""

import json
import subprocess
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from statistics import fmean, pstdev
from typing import Any

from flows.execution import fork_server
from stages.lib.core.params import Params
from stages.lib.data.slices import read_slices

# Tokens of the longest demonstrations, texts of pairs and prompts of the embedded data
TWEETS = (46, 46, 15)
Counts = dict[str, Any]  # the JSON of token_counts.py


@dataclass(frozen=True)
class Batch:
    """rows: texts of a batch. tokens: of all of them. longest: of the longest one."""

    rows: int
    tokens: float
    longest: float


@dataclass(frozen=True)
class Texts:
    """rows: tokens of each row's texts: one, or the two of a pair. limit: of tokens per text. If no
    rows are known, each has `texts` texts of up to `limit` tokens.
    """

    rows: tuple[tuple[int, ...], ...]
    limit: int
    texts: int = 1

    @cached_property
    def fitting(self) -> list[tuple[int, ...]]:
        """The rows without a text above the limit, those with the longest texts first."""
        fitting = (row for row in self.rows if max(row) <= self.limit)
        return sorted(fitting, key=lambda row: (max(row), sum(row)), reverse=True)

    def longest(self, rows: int) -> Batch:
        """The batch of the longest rows, with which `group_by_length` begins."""
        chosen = self.fitting[:rows] or [(self.limit,) * self.texts] * rows
        texts = [length for row in chosen for length in row]
        return Batch(len(texts), sum(texts), max(texts))

    def random(self, rows: int, more: int = 0) -> Batch:
        """A batch of rows drawn at random that few batches exceed: two standard errors above the
        mean. Each text has `more` tokens behind it.

        Texts of unknown length are taken to have half of the limit, with a deviation of a quarter.
        """
        known = [float(sum(row)) for row in self.fitting] or [self.limit / 4, 3 * self.limit / 4]
        highest = max(known) if self.fitting else self.limit
        mean = min(fmean(known) + 2 * pstdev(known) / sqrt(rows), highest)
        return Batch(rows, rows * (mean + more), highest + more)


@dataclass(frozen=True)
class TextLengths:
    """demonstrations, pairs: with prompt and EOS. prompts: to train on. slices: prompts of slices/.
    evaluation: the number of frozen prompts.
    """

    demonstrations: Texts
    pairs: Texts
    prompts: Texts
    slices: Texts
    evaluation: int


def admitted(params: Params) -> TextLengths:
    """The lengths that the params admit; the longest of the embedded data are known."""
    limits = [params.sft.max_length, params.reward.max_length, params.prepare.max_prompt_tokens]
    if params.assets.data in ("embedded", "tiny"):
        limits = [min(limit, known) for limit, known in zip(limits, TWEETS, strict=True)]
    demonstration, pair, prompt = limits
    return TextLengths(
        Texts((), demonstration),
        Texts((), pair, 2),
        Texts((), prompt),
        Texts(((prompt,),) * slice_prompts(), prompt),
        params.prepare.max_eval_prompts,
    )


def slice_prompts() -> int:
    """The number of prompts in slices/."""
    return sum(map(len, read_slices().values()))


def count(round_: str) -> Counts | None:
    """Counts of the texts that prepare wrote for a round (token_counts.py); None if that fails."""
    process = subprocess.run(
        [fork_server.python(), "-m", "flows.execution.token_counts", round_],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if process.returncode else json.loads(process.stdout.splitlines()[-1])


def measured(params: Params, counts: Counts) -> TextLengths:
    """The lengths of counted texts, as far as the params admit them."""
    limits = (params.sft.max_length, params.reward.max_length, params.prepare.max_prompt_tokens)
    demonstrations, pairs, prompts = (
        Texts(tuple(map(tuple, counts[name])), limit)
        for name, limit in zip(("demonstrations", "pairs", "prompts"), limits, strict=True)
    )
    slices = tuple((tokens,) for tokens in counts["slices"])
    longest = max(counts["slices"], default=0)  # none is left out
    return TextLengths(demonstrations, pairs, prompts, Texts(slices, longest), counts["evaluation"])

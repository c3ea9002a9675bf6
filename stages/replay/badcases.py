"""Badcases: responses that failed, with cause and origin, and the result of later retests.

The ledger of a round, rounds/<round>/replay/data/badcases.jsonl, has its own badcases and those of
all earlier rounds. People add theirs (`rondo badcases flag | import`) to badcases/<round>.jsonl,
which is kept in git: responses that they report, and prompts for replay to sample.
"""

import hashlib
import json
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from stages.lib.core.files import remove_unfinished, stage_dir, write_jsonl
from stages.lib.core.types import NonEmptyPrompt, Prompt
from stages.lib.core.validation import (
    Text,
    read_json_lines,
    read_validated_jsonl,
    validate_row,
)

REPORTED = Path("badcases")


class Cause(str, Enum):
    judge_loses = "judge_loses"  # the jury prefers SFT's response to the same prompt
    # the reward score is high, but the lexicon (if it is a judge) dislikes the text, or the score
    # is not high without the text's exploits
    blind_spot = "blind_spot"
    repetition = "repetition"  # the text repeats its own 3-grams
    no_eos = "no_eos"  # the response was cut off
    kl_outlier = "kl_outlier"  # far from SFT, by the robust z-score of sequence KL
    human = "human"  # a person reported it


class State(str, Enum):
    open = "open"  # new, or retested and not repaired
    replayed = "replayed"  # the next round trains on it
    repaired = "repaired"  # a later policy does not fail so again
    locked = "locked"  # repaired, and still so in a later round
    regressed = "regressed"  # was repaired, and fails again


class Retest(BaseModel, extra="forbid"):
    """A retest by a round's policy: `fired` of `of` new responses fail.

    ranked: False if the round's reward model does not put the better answer first.
    """

    round: str
    fired: int
    of: int
    ranked: bool

    @property
    def all_passed(self) -> bool:
        return self.fired == 0 and self.ranked

    @property
    def all_failed(self) -> bool:
        """Whether every response fails, not only some, which may be chance."""
        return self.fired == self.of or not self.ranked


class Badcase(BaseModel, extra="forbid", allow_inf_nan=False):
    """A response that failed; policy, kl and ended are None if no model wrote it.

    stage: whose failure it is, the reward model's or the policy's. policy: hash of the weights that
    wrote it. origin: PPO update, `fresh`, or who reported it. score: of its round's reward model,
    calibrated; None if there is none. kl: nats per sequence from SFT. sft: SFT's response to the
    prompt. votes: of each judge and the jury against that (1: the response is better, 0.5: a tie).
    sentiment, sentiment_plain: by the lexicon, if it is a judge. repetition: share of repeated
    3-grams.
    better: the answer that the reward model has to put first. exploits: endings that it was
    overpaid for. tries: its retests, its own round's first.
    """

    id: str
    round: str
    cause: Cause
    stage: Literal["reward", "ppo"] = "ppo"
    state: State = State.open
    policy: str | None = None
    origin: int | str
    prompt_id: str
    prompt: Prompt
    response: str
    score: float | None
    kl: float | None = None
    ended: bool | None = None
    sentiment: float | None = None
    sentiment_plain: float | None = None
    repetition: float
    exploits: list[str] = []
    sft: str | None = None
    votes: dict[str, float] = {}
    better: str | None = None
    note: str | None = None
    tries: list[Retest] = []

    @property
    def guarded(self) -> bool:
        """Whether it was repaired: no later round may break it."""
        return self.state in (State.repaired, State.locked)

    @property
    def by_chance(self) -> bool:
        """Whether its own round's policy, before any repair, passes the retest as well."""
        return bool(self.tries) and self.tries[0].round == self.round and self.tries[0].all_passed

    def with_retest(self, retest: Retest) -> "Badcase":
        """A copy with one more retest.

        A retest by its own round measures chance, and does not change the state.
        """
        state = self.state if retest.round == self.round else next_state(self.state, retest)
        return self.model_copy(update={"tries": [*self.tries, retest], "state": state})


def next_state(state: State, retest: Retest) -> State:
    """The state of a badcase after a later round's retest."""
    if state in (State.repaired, State.locked):
        return State.regressed if retest.all_failed else State.locked
    if retest.all_passed:
        return State.repaired
    return state if state is State.regressed else State.open


def badcase_id(prompt: Prompt, response: str, cause: Cause) -> str:
    return hashlib.sha256(json.dumps([prompt, response, cause.value]).encode()).hexdigest()[:12]


def ledger_path(round_: str) -> Path:
    return stage_dir(round_, "replay") / "data/badcases.jsonl"


def read_ledger(round_: str) -> list[Badcase]:
    """The badcases of a round and of all earlier rounds.

    Raises:
        BadInput: the file is missing, or a row is not a badcase of this version.
    """
    fix = f"run `dvc repro replay@{round_}`"
    return [case for _, case in read_validated_jsonl(Badcase, ledger_path(round_), fix)]


class Report(BaseModel, extra="forbid"):
    """A response that a person reports as bad. by: who reports it."""

    prompt: NonEmptyPrompt
    response: Text
    better: Text | None = None
    note: Text | None = None
    by: Text

    @property
    def id(self) -> str:
        return badcase_id(self.prompt, self.response, Cause.human)


class MiningPrompt(BaseModel, extra="forbid"):
    """A prompt that a person wants replay to sample. by: who wants it."""

    prompt: NonEmptyPrompt
    note: Text | None = None
    by: Text

    @property
    def id(self) -> str:
        return f"mining-{hashlib.sha256(json.dumps(self.prompt).encode()).hexdigest()[:8]}"


UserInput = Report | MiningPrompt


def report_path(round_: str) -> Path:
    return REPORTED / f"{round_}.jsonl"


def parse_user_row(row: Any, location: str) -> UserInput:
    """A report; without a response, a prompt to sample.

    Raises:
        BadInput: the row is neither; names its location.
    """
    if isinstance(row, dict) and "prompt" in row and "response" not in row:
        return validate_row(MiningPrompt, row, location, "fix the line")
    return validate_row(Report, row, location, "fix the line")


def read_user_rows(round_: str) -> list[tuple[str, UserInput]]:
    """What people added to this round's replay, each row with its location (`path:line`).

    Raises:
        BadInput: a row is neither a report nor a prompt.
    """
    path = report_path(round_)
    rows = read_json_lines(path, "fix the line") if path.exists() else []
    return [(location, parse_user_row(row, location)) for location, row in rows]


def add_user_rows(round_: str, rows: Iterable[UserInput]) -> int:
    """Append the rows that are not in the file yet; returns their number. No other process may be
    doing this.
    """
    known = {row.id: row for _, row in read_user_rows(round_)}
    new = {row.id: row for row in rows if row.id not in known}
    all_rows = [*known.values(), *new.values()]
    path = report_path(round_)
    remove_unfinished(path)
    write_jsonl(path, [row.model_dump(mode="json", exclude_none=True) for row in all_rows])
    return len(new)

"""A badcase: a response that failed, why, where it comes from, and what later rounds made of it.

The ledger of a round, rounds/<round>/replay/data/badcases.jsonl, holds its own badcases and those
of all rounds before. People add theirs (`rondo badcases flag | import`) to badcases/<round>.jsonl,
which git keeps: responses that they report, and prompts for replay to ask.
"""

import hashlib
import json
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from stages.lib.core.files import stage_dir, write_jsonl
from stages.lib.core.types import NonEmptyPrompt, Prompt
from stages.lib.core.validation import read_json_lines, read_validated_jsonl, validate_row

REPORTED = Path("badcases")
Text = Annotated[str, Field(min_length=1)]


class Cause(str, Enum):
    judge_loses = "judge_loses"  # the jury prefers SFT's response to the same prompt
    # the reward model likes it; the lexicon, if a judge, does not, or without its exploits the RM
    # would not
    blind_spot = "blind_spot"
    repetition = "repetition"  # the text repeats its own 3-grams
    no_eos = "no_eos"  # the response was cut off
    kl_outlier = "kl_outlier"  # far from SFT, by the robust z-score of sequence KL
    human = "human"  # a person said so


class State(str, Enum):
    open = "open"  # found, or tried again and not repaired
    replayed = "replayed"  # the next round learns from it
    repaired = "repaired"  # the next policy does not fail so again
    locked = "locked"  # repaired, and so it stayed in a later round
    regressed = "regressed"  # was repaired, and fails again


class Retest(BaseModel, extra="forbid"):
    """A round's policy asked again: `fired` of `of` new responses fail. ranked: its reward model
    puts the better answer first.
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
        """Every response fails: some would by chance alone."""
        return self.fired == self.of or not self.ranked


class Badcase(BaseModel, extra="forbid"):
    """A response that failed; policy, kl and ended are None where no model wrote it.

    stage: whose failure it is, the reward model's or the policy's; policy: hash of the weights that
    wrote it; origin: PPO update, `fresh`, or who reported it; score: of its round's reward model,
    calibrated; kl: nats a sequence from SFT; sft: SFT's response to the prompt; votes: of each
    judge and the jury against that (1: the response is better, 0.5: a tie); better: the answer that
    the reward model has to put first; exploits: endings that it was overpaid for; tries: of its own
    round first.
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
    score: float
    kl: float | None = None
    ended: bool | None = None
    sentiment: float
    sentiment_plain: float
    repetition: float
    exploits: list[str] = []
    sft: str | None = None
    votes: dict[str, float] = {}
    better: str | None = None
    note: str | None = None
    tries: list[Retest] = []

    @property
    def guarded(self) -> bool:
        """Whether it is in the regression set: no later round may break it."""
        return self.state in (State.repaired, State.locked)

    @property
    def by_chance(self) -> bool:
        """Whether its own policy, that nothing has repaired, passes the test as well."""
        return bool(self.tries) and self.tries[0].round == self.round and self.tries[0].all_passed

    def tried(self, attempt: Retest) -> "Badcase":
        """With one more try; a try in its own round is the measure of chance, and changes no state."""
        state = self.state if attempt.round == self.round else next_state(self.state, attempt)
        return self.model_copy(update={"tries": [*self.tries, attempt], "state": state})


def next_state(state: State, attempt: Retest) -> State:
    """What a badcase becomes by a later round's try."""
    if state in (State.repaired, State.locked):
        return State.regressed if attempt.all_failed else State.locked
    if attempt.all_passed:
        return State.repaired
    return state if state is State.regressed else State.open


def badcase_id(prompt: Prompt, response: str, cause: Cause) -> str:
    return hashlib.sha256(json.dumps([prompt, response, cause.value]).encode()).hexdigest()[:12]


def ledger_path(round_: str) -> Path:
    return stage_dir(round_, "replay") / "data/badcases.jsonl"


def read_ledger(round_: str) -> list[Badcase]:
    """
    Raises:
        BadInput: it is not there, or a row is no badcase of this version.
    """
    return [
        case
        for _, case in read_validated_jsonl(
            Badcase, ledger_path(round_), f"run `dvc repro replay@{round_}`"
        )
    ]


class Report(BaseModel, extra="forbid"):
    """What a person says of a response. by: who."""

    prompt: NonEmptyPrompt
    response: Text
    better: Text | None = None
    note: Text | None = None
    by: Text

    @property
    def id(self) -> str:
        return badcase_id(self.prompt, self.response, Cause.human)


class MiningPrompt(BaseModel, extra="forbid"):
    """A prompt that a person wants replay to ask. by: who."""

    prompt: NonEmptyPrompt
    note: Text | None = None
    by: Text

    @property
    def id(self) -> str:
        return f"mining-{hashlib.sha256(json.dumps(self.prompt).encode()).hexdigest()[:8]}"


UserInput = Report | MiningPrompt


def report_path(round_: str) -> Path:
    return REPORTED / f"{round_}.jsonl"


def parse_user_row(row: Any, place: str) -> UserInput:
    """A row without a response is a prompt to ask.

    Raises:
        BadInput: it is neither.
    """
    if isinstance(row, dict) and "prompt" in row and "response" not in row:
        return validate_row(MiningPrompt, row, place, "mend the line")
    return validate_row(Report, row, place, "mend the line")


def read_user_rows(round_: str) -> list[tuple[str, UserInput]]:
    """What people have given to this round's replay, each with its place; nothing where nobody has.

    Raises:
        BadInput: a row is neither a report nor a prompt.
    """
    path = report_path(round_)
    return (
        [
            (place, parse_user_row(row, place))
            for place, row in read_json_lines(path, "mend the line")
        ]
        if path.exists()
        else []
    )


def add_user_rows(round_: str, some: Iterable[UserInput]) -> int:
    """Append those that are not there yet; returns how many."""
    known = {each.id: each for _, each in read_user_rows(round_)}
    new = {each.id: each for each in some if each.id not in known}
    write_jsonl(
        report_path(round_),
        [
            each.model_dump(mode="json", exclude_none=True)
            for each in [*known.values(), *new.values()]
        ],
    )
    return len(new)

"""A labelling session: which comparison a person gets next, and what becomes of the verdicts."""

import hashlib
from datetime import UTC, datetime
from enum import Enum
from typing import Annotated, Any

from filelock import FileLock
from pydantic import BaseModel, StringConstraints

from flows.core.services import HOME
from flows.labelling.reports import keep
from flows.report import people
from flows.report.people import Comparison, Label, Of, Verdict
from stages.lib.core.errors import BadInput
from stages.lib.core.types import Prompt
from stages.lib.data.prompts import plain_prompt
from stages.replay.badcases import Report

CAUSES = ("wrong", "off topic", "repetitive", "cut off", "harmful", "style")
MAX_PERSON, MAX_NOTE = 100, 2000  # characters
Person = Annotated[
    str, StringConstraints(strip_whitespace=True, min_length=1, max_length=MAX_PERSON)
]
Reason = Annotated[str, StringConstraints(strip_whitespace=True, max_length=MAX_NOTE)]


class Choice(str, Enum):
    left = "left"
    right = "right"
    tie = "tie"
    both_bad = "both_bad"
    skip = "skip"


class Answer(BaseModel, extra="forbid"):
    """What the page sends: the comparison's id, the person, and the choice with its reason."""

    id: str
    by: Person
    choice: Choice
    cause: Reason = ""
    note: Reason = ""


class Session:
    """The comparisons of one set of a round.

    Args:
        round_: the round.
        of: the set.
        count: how many of its comparisons; all if there are fewer.

    Raises:
        BadInput: the round has none.
    """

    def __init__(self, round_: str, of: Of, count: int) -> None:
        self.round, self.of = round_, of
        self.comparisons = people.comparisons(round_, of)[:count]
        self.by_id = {comparison.id: comparison for comparison in self.comparisons}

    def labels_of(self, by: str) -> list[Label]:
        """A person's labels of this session, in their order."""
        return [
            label
            for label in people.read_labels(self.round)
            if label.by == by and label.id in self.by_id
        ]

    def following(self, by: str) -> dict[str, Any]:
        """The first comparison that the person has not labelled, for the page: `prompt`, `left` and
        `right`, without a word on whose they are; only `done` and `total` if there is none.
        """
        labelled = {label.id for label in self.labels_of(by)}
        progress = {"done": len(labelled), "total": len(self.comparisons)}
        for comparison in self.comparisons:
            if comparison.id not in labelled:
                left, right = sides(comparison, by)
                return progress | {
                    "id": comparison.id,
                    "prompt": plain_prompt(comparison.prompt),
                    "left": comparison.texts[left],
                    "right": comparison.texts[right],
                }
        return progress

    def answer(self, answer: Answer) -> dict[str, Any]:
        """Write the person's verdict, in place of an earlier one on the same texts; returns what is
        `following`.

        Raises:
            BadInput: no comparison has this id.
        """
        comparison = self.by_id.get(answer.id)
        if comparison is None:
            raise BadInput(f"{answer.id}: no such comparison; reload the page")
        left, right = (comparison.names[side] for side in sides(comparison, answer.by))
        chosen = {Choice.left: left, Choice.right: right}.get(answer.choice)
        by_name = dict(zip(comparison.names, (Verdict.first, Verdict.second), strict=True))
        label = Label(
            id=answer.id,
            of=self.of,
            by=answer.by,
            at=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            prompt=comparison.prompt,
            names=comparison.names,
            texts=comparison.texts,
            left=left,
            verdict=by_name[chosen] if chosen else Verdict(answer.choice.value),
            cause=answer.cause or None,
            note=answer.note or None,
        )
        with labels_lock():
            others = [
                old
                for old in people.read_labels(self.round)
                if (old.id, old.by) != (label.id, label.by)
            ]
            people.write_labels(self.round, [*others, label])
        return self.following(answer.by)

    def undo(self, by: str) -> dict[str, Any]:
        """Remove the person's last label; returns what is `following`, that comparison."""
        with labels_lock():
            last, labels = self.labels_of(by)[-1:], people.read_labels(self.round)
            people.write_labels(self.round, [label for label in labels if label not in last])
        return self.following(by)

    def finish(self, by: str) -> list[str]:
        """The results in words. Of badcases, the responses that lost, or are bad as both, become
        reports, which replay trains on.
        """
        lines = people.lines(self.round, self.of)
        lost = [
            report(label)
            for label in self.labels_of(by)
            if self.of is Of.badcases and label.verdict in (Verdict.second, Verdict.both_bad)
        ]
        if lost:
            lines.append(keep([("a prompt", one) for one in lost], self.round))
        return lines or ["no verdicts yet"]


def sides(comparison: Comparison, by: str) -> tuple[int, int]:
    """Which of the two is on the left and on the right: as if by chance, but always the same for
    one person, so that a page that is loaded again is no hint.
    """
    digest = hashlib.sha256(f"{comparison.id} {by}".encode()).digest()
    return (0, 1) if digest[0] % 2 else (1, 0)


def report(label: Label) -> Report:
    """A badcase by a person; the other response is the better one, unless both are bad."""
    prompt: Prompt = label.prompt
    better = label.texts[1] if label.verdict is Verdict.second else ""
    return Report(
        prompt=prompt,
        response=label.texts[0],
        better=better or None,
        note=": ".join(filter(None, (label.cause, label.note))) or None,
        by=label.by,
    )


def labels_lock() -> FileLock:
    """Who writes at the same time would lose rows."""
    HOME.mkdir(exist_ok=True)
    return FileLock(HOME / "labels.lock")

"""Comparisons that people judged (`rondo label`), and what they say: people's win rate, how far
people and judges agree, and the jury's win rate corrected by people.

labels/<round>.jsonl has one row per label, and is kept in git. A label counts as long as a round
still has the two texts that it is about.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations
from pathlib import Path

from pydantic import BaseModel

from flows.core.tables import interval
from flows.report.round_files import label_path
from stages.lib.core.errors import BadInput
from stages.lib.core.files import stage_dir, write_jsonl
from stages.lib.core.rows import EvaluationSample, PreferencePair, RewardScores, read_rows
from stages.lib.core.types import NonEmptyPrompt, Prompt
from stages.lib.core.validation import Text, read_validated_jsonl
from stages.lib.judging.jury import agreement
from stages.lib.judging.pairwise import JURY
from stages.lib.metrics.stats import (
    Interval,
    corrected_mean,
    mean,
    paired_bootstrap,
    wilson_interval,
)
from stages.replay.badcases import ledger_path, read_ledger

RESAMPLES, SEED = 2000, 0  # of the bootstrap
PRIMARY, REWARD_MODEL = "the primary judge", "the reward model"


class Of(str, Enum):
    """What is compared."""

    evaluation = "evaluation"  # the policy with SFT, on frozen prompts in random order
    champion = "champion"  # the policy with the champion, likewise
    badcases = "badcases"  # the policy's failed responses with SFT's, on training prompts
    pairs = (
        "pairs"  # held-out pairs, chosen with rejected; the reward model's smallest margins first
    )


class Verdict(str, Enum):
    first = "first"  # of the two names is better
    second = "second"
    tie = "tie"
    both_bad = "both_bad"
    skip = "skip"  # no opinion


OUTCOMES = {Verdict.first: 1.0, Verdict.second: 0.0, Verdict.tie: 0.5, Verdict.both_bad: 0.5}


@dataclass(frozen=True)
class Comparison:
    """Two responses to one prompt.

    names, texts: of the two; the win rate is that of the first. votes: by judge (1: the first is
    better, 0.5: a tie).
    """

    prompt: Prompt
    names: tuple[str, str]
    texts: tuple[str, str]
    votes: Mapping[str, float]

    @property
    def id(self) -> str:
        content = json.dumps([self.prompt, self.names, self.texts])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


class Label(BaseModel, extra="forbid"):
    """A person's verdict.

    id: of the comparison. by: the person. at: ISO 8601. left: the response that was on the left.
    cause, note: the person's reason.
    """

    id: str
    of: Of
    by: Text
    at: str
    prompt: NonEmptyPrompt
    names: tuple[str, str]
    texts: tuple[str, str]
    left: str
    verdict: Verdict
    cause: Text | None = None
    note: Text | None = None


def read_labels(round_: str) -> list[Label]:
    """
    Raises:
        BadInput: a row is no label.
    """
    path = label_path(round_)
    rows = read_validated_jsonl(Label, path, "fix or remove the line") if path.exists() else []
    return [label for _, label in rows]


def write_labels(round_: str, labels: Iterable[Label]) -> None:
    rows = [label.model_dump(mode="json", exclude_none=True) for label in labels]
    write_jsonl(label_path(round_), rows)


def texts_of(round_: str, of: Of) -> Path:
    """The file of a round that the comparisons come from."""
    if of is Of.badcases:
        return ledger_path(round_)
    if of is Of.pairs:
        return stage_dir(round_, "reward") / "scores.jsonl"
    return stage_dir(round_, "evaluate") / "samples.jsonl"


def comparisons(round_: str, of: Of) -> list[Comparison]:
    """What there is to compare, in the order in which people get it, which is the same for all.

    Raises:
        BadInput: the round has none; names the stage that makes them.
    """
    if of is Of.pairs:
        compared = closest_pairs(round_)
    elif of is Of.badcases:
        compared = by_chance(failed_responses(round_))
    else:
        compared = by_chance(frozen_prompts(round_, "sft" if of is Of.evaluation else "champion"))
    if not compared:
        raise BadInput(f"{round_} has nothing to compare of `{of.value}`")
    return list({comparison.id: comparison for comparison in compared}.values())


def by_chance(compared: Sequence[Comparison]) -> list[Comparison]:
    """In an order that depends on nothing but the texts: the first n are a random sample."""
    return sorted(compared, key=lambda comparison: comparison.id)


def frozen_prompts(round_: str, other: str) -> list[Comparison]:
    """The first sample of each evaluation prompt, since those of one prompt are alike."""
    path = texts_of(round_, Of.evaluation)
    rows = read_rows(EvaluationSample, path, f"dvc repro evaluate@{round_}")
    return [
        Comparison(row["prompt"], ("ppo", other), (row["ppo"], text), frozen_votes(row, other))
        for row in rows
        if row["sample"] == 0 and "ppo" in row
        for text in [row.get(other)]
        if isinstance(text, str)
    ]


def frozen_votes(row: EvaluationSample, other: str) -> dict[str, float]:
    """Of the jury; and of the primary judge, whose scores of the two are known."""
    vote = row.get(f"ppo_against_{other}")
    policy, second = (row.get(f"{name}_judge_score") for name in ("ppo", other))
    votes = {JURY: vote} if isinstance(vote, float | int) else {}
    if isinstance(policy, float | int) and isinstance(second, float | int):
        votes[PRIMARY] = preference(policy, second)
    return votes


def preference(first: float, second: float) -> float:
    """1 if the first score is higher, 0.5 if they are equal, else 0."""
    return 0.5 if first == second else float(first > second)


def failed_responses(round_: str) -> list[Comparison]:
    return [
        Comparison(case.prompt, ("ppo", "sft"), (case.response, case.sft), case.votes)
        for case in read_ledger(round_)
        # an empty response cannot become a report
        if case.round == round_ and case.policy and case.response and case.sft is not None
    ]


def closest_pairs(round_: str) -> list[Comparison]:
    """The held-out pairs, from the smallest margin of the reward model to the largest."""
    data = stage_dir(round_, "prepare") / "data/pairs_eval.jsonl"
    texts = {row["id"]: row for row in read_rows(PreferencePair, data)}
    scores = read_rows(RewardScores, texts_of(round_, Of.pairs), f"dvc repro reward@{round_}")
    return [
        Comparison(
            pair["prompt"],
            ("chosen", "rejected"),
            (pair["chosen"], pair["rejected"]),
            {REWARD_MODEL: preference(row["chosen"], row["rejected"])},
        )
        for row in sorted(scores, key=lambda row: abs(row["chosen"] - row["rejected"]))
        for pair in [texts[row["id"]]]
    ]


@dataclass(frozen=True)
class People:
    """What people say of one set of a round. Intervals are of 95%, over comparisons.

    names: of the two responses. judged: comparisons with an opinion. persons: how many. win_rate:
    of the first; a tie, or both bad, is half. left: share of the decided verdicts that are for the
    left response; 0.5 without a habit. agreement: of two persons on the same comparisons, their
    number, and Cohen's kappa. judges: of each, on comparisons that both it and people decide, the
    share in which they agree. corrected: the jury's win rate on all comparisons, corrected by what
    people say (`corrected_mean`).
    """

    names: tuple[str, str]
    judged: int
    persons: int
    win_rate: Interval
    left: float | None
    agreement: tuple[int, float | None, float | None]
    judges: Mapping[str, tuple[int, Interval]]
    corrected: Interval | None


def results(compared: Sequence[Comparison], labels: Sequence[Label], of: Of) -> People | None:
    """None if nobody has judged one of these comparisons."""
    known = {comparison.id: comparison for comparison in compared}
    verdicts: dict[str, dict[str, Verdict]] = {}
    for label in labels:
        if label.id in known and label.verdict is not Verdict.skip:
            verdicts.setdefault(label.id, {})[label.by] = label.verdict
    if not verdicts:
        return None
    outcomes = {
        number: mean([OUTCOMES[verdict] for verdict in by.values()])
        for number, by in verdicts.items()
    }
    votes = {number: comparison.votes for number, comparison in known.items()}
    judges = dict.fromkeys(judge for row in votes.values() for judge in row)
    return People(
        names=compared[0].names,
        judged=len(outcomes),
        persons=len({person for by in verdicts.values() for person in by}),
        win_rate=paired_bootstrap([[one] for one in outcomes.values()], RESAMPLES, SEED),
        left=left_share([label for label in labels if label.id in known]),
        agreement=between_persons(verdicts.values()),
        judges={judge: row for judge in judges if (row := accuracy(judge, outcomes, votes))},
        corrected=corrected(outcomes, votes) if of in (Of.evaluation, Of.champion) else None,
    )


def left_share(labels: Iterable[Label]) -> float | None:
    decided = [
        (label.left == label.names[0]) == (label.verdict is Verdict.first)
        for label in labels
        if label.verdict in (Verdict.first, Verdict.second)
    ]
    return mean(decided) if decided else None


def between_persons(
    verdicts: Iterable[Mapping[str, Verdict]],
) -> tuple[int, float | None, float | None]:
    """(comparisons, share of equal verdicts, kappa) over all pairs of persons; `both bad` is a tie
    here.
    """
    answers = [
        (str(OUTCOMES[by[first]]), str(OUTCOMES[by[second]]))
        for by in verdicts
        for first, second in combinations(sorted(by), 2)
    ]
    equal = agreement(answers, "share")
    return len(answers), equal["share"], equal["kappa"]


def accuracy(
    judge: str, outcomes: Mapping[str, float], votes: Mapping[str, Mapping[str, float]]
) -> tuple[int, Interval] | None:
    decided = [
        (votes[number][judge] > 0.5) == (outcome > 0.5)
        for number, outcome in outcomes.items()
        if outcome != 0.5 and votes[number].get(judge, 0.5) != 0.5
    ]
    if not decided:
        return None
    return len(decided), (mean(decided), *wilson_interval(sum(decided), len(decided)))


def corrected(
    outcomes: Mapping[str, float], votes: Mapping[str, Mapping[str, float]]
) -> Interval | None:
    """None if a comparison has no vote of the jury."""
    if any(JURY not in row for row in votes.values()):
        return None
    return corrected_mean(
        [*outcomes.values()],
        [votes[number][JURY] for number in outcomes],
        [row[JURY] for number, row in votes.items() if number not in outcomes],
    )


def lines(round_: str, of: Of) -> list[str]:
    """The results of one set in words; none without labels."""
    labels = [label for label in read_labels(round_) if label.of is of]
    compared = comparisons(round_, of) if labels else []
    people = results(compared, labels, of)
    if people is None:
        return []
    first, second = people.names
    persons = "1 person" if people.persons == 1 else f"{people.persons} people"
    shown = [
        f"{round_}: judged by {persons} ({of.value}): win rate of {first} against {second} "
        f"{interval(*people.win_rate)} in {people.judged} comparisons"
    ]
    if people.corrected:
        shown.append(
            f"jury's win rate in all {len(compared)}, corrected by people: "
            f"{interval(*people.corrected)}"
        )
    for judge, (count, rate) in people.judges.items():
        name = "the jury" if judge == JURY else judge
        shown.append(f"{name} agrees with people in {interval(*rate)} of {count} decided ones")
    count, share, kappa = people.agreement
    if share is not None:
        chance = "not defined" if kappa is None else f"{kappa:.2f}"
        shown.append(f"people agree among themselves on {share:.0%} of {count}, kappa {chance}")
    if people.left is not None:
        shown.append(f"{people.left:.0%} of their choices were on the left")
    return ["; ".join(shown)]


def all_lines(round_: str) -> list[str]:
    """Of all sets that have labels and whose texts are here."""
    labelled = dict.fromkeys(label.of for label in read_labels(round_))
    return [line for of in labelled if texts_of(round_, of).exists() for line in lines(round_, of)]

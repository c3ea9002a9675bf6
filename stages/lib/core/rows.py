"""The rows of the files that one stage writes and another reads: their keys, writers and readers.

All are JSON Lines. Numbers of one file, such as metrics, have no row type.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, NotRequired, TypeVar, cast

from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from stages.lib.core.files import iter_jsonl, maker
from stages.lib.core.types import Metrics, Prompt
from stages.lib.core.validation import check_type

Side = Literal["chosen", "rejected"]
SIDES: tuple[Side, Side] = ("chosen", "rejected")


class HasPrompt(TypedDict):
    prompt: Prompt


class PromptRow(HasPrompt):
    """A prompt.

    Written by prepare (eval_prompts.jsonl). Read by sft, annotate, battery, evaluate and replay.

    id: unique in its file.
    """

    id: str


Columns = dict[str, object]  # values of JSON by the name of the column


class TrainingPrompt(PromptRow):
    """A prompt that a model may train on.

    Written by prepare (prompts_train.jsonl) and replay (prompts.jsonl). Read by annotate, ppo and
    replay.

    source: the data file or data set that the row is from; `replay` if an earlier round's replay
    made it; `revision` if a language model did (annotate). badcase: the badcase or exploit that it
    was made against, or the revised response; only of rows that the pipeline made. columns: further
    columns of the data (`prepare.columns`), which rewards get; prompts of earlier rounds keep them.
    """

    source: NotRequired[str]
    columns: NotRequired[Columns]
    badcase: NotRequired[str]


class Demonstration(TrainingPrompt):
    """A prompt with a response to imitate.

    Written by prepare (sft_train.jsonl, sft_eval.jsonl) and replay (sft.jsonl). Read by sft,
    reward, battery, capability, evaluate and replay.
    """

    completion: str


class PairTexts(HasPrompt):
    chosen: str
    rejected: str


class PreferencePair(TrainingPrompt, PairTexts):
    """A prompt with two responses, of which the chosen one is better.

    Written by prepare (pairs_train.jsonl, pairs_eval.jsonl), annotate (pairs_train.jsonl) and
    replay (pairs.jsonl). Read by annotate, reward, battery, ppo (DPO) and replay.

    margin: by how much chosen should score above rejected, more than 0. annotator: of a pair that
    a judge labelled, the judge, the responses that it compared and their scores.
    """

    margin: NotRequired[float]
    annotator: NotRequired[Metrics]


class RevisedResponse(PromptRow):
    """A response of SFT that a language model revised by a principle of the constitution.

    Written by annotate (revised.jsonl). Read by replay.

    response: SFT's. critique: how it departs from the principle. revision: the response to imitate.
    """

    response: str
    principle: str
    critique: str
    revision: str


class RewardScores(TypedDict):
    """The calibrated scores of a held-out pair.

    Written by reward (scores.jsonl). Read by battery and replay.
    """

    id: str
    chosen: float
    rejected: float


class RolloutRow(PromptRow):
    """An episode of PPO, or a sample of one of its alternatives.

    Written by ppo (rollouts/*.jsonl.gz). Read by the next round's battery, by replay and by the
    pages of the Prefect UI. Of a sum of rewards each part has its own key `score_<name>`.

    update: from 1. score: calibrated reward score; without a reward model, the weighted sum of the
    further rewards. reward: score less the penalties, before KL.
    judge_score: by the primary judge, unless it only compares; never a reward. kl: nats per
    sequence from the SFT model.
    kl_cost: the KL penalty, in the units of `reward`; with PPO and RLOO. length: tokens.
    """

    update: int
    response: str
    score: float
    reward: float
    judge_score: NotRequired[float]
    kl: float
    kl_cost: NotRequired[float]
    finish_reason: str
    length: int


class EvaluationSample(PromptRow):
    """The responses of all evaluated models to one prompt.

    Written by evaluate (samples.jsonl). Read by `rondo compare`, MLflow's tables and the report.
    For each model (base, sft, ppo, champion), `<model>` is its response, `<model>_judge_score`
    the primary judge's score (if it only compares: the outcome against SFT's response),
    `<model>_score` the reward score, `<model>_kl` nats per sequence from SFT, and `<model>_length`
    tokens. `<model>_against_<other>`: the jury's outcome (1: better than the other, 0.5: a tie).

    sample: the number of the sample, from 0, if there are several per prompt.
    """

    sample: int
    base: NotRequired[str]
    sft: NotRequired[str]
    ppo: NotRequired[str]
    champion: NotRequired[str]
    base_judge_score: NotRequired[float]
    sft_judge_score: NotRequired[float]
    ppo_judge_score: NotRequired[float]
    champion_judge_score: NotRequired[float]
    base_score: NotRequired[float]
    sft_score: NotRequired[float]
    ppo_score: NotRequired[float]
    champion_score: NotRequired[float]
    base_kl: NotRequired[float]
    sft_kl: NotRequired[float]
    ppo_kl: NotRequired[float]
    champion_kl: NotRequired[float]
    base_length: NotRequired[int]
    sft_length: NotRequired[int]
    ppo_length: NotRequired[int]
    champion_length: NotRequired[int]
    ppo_against_sft: NotRequired[float]
    ppo_against_champion: NotRequired[float]


class StepRow(TypedDict):
    """Metrics of a step: numbers by name. Written by MetricLogger (metrics.jsonl)."""

    step: Annotated[int, Field(gt=-(2**63), lt=2**63)]


class ClockRow(StepRow):
    """When the row of a step was written, in seconds since the epoch. Written by MetricLogger
    (clock.jsonl).
    """

    time: Annotated[float, Field(gt=-1e12, lt=1e12)]


TEXTS = ("prompt", "completion", *SIDES)  # keys of texts, in the order in which they are shown


def responses_of(row: Mapping[str, object]) -> list[str]:
    """The texts that follow the prompt: the completion, or chosen and rejected; [] of a prompt."""
    return [str(row[name]) for name in TEXTS[1:] if name in row]


AnyRow = TypeVar("AnyRow", bound=Mapping[str, object])


def read_rows(
    kind: type[AnyRow],
    path: Path,
    made_by: str | None = None,
    growing: bool = False,
) -> list[AnyRow]:
    """Read the rows of a .jsonl or .jsonl.gz file.

    Args:
        kind: the rows' type, one of this module.
        path: the file.
        made_by: the command that makes the file, for the error message; None: `maker`.
        growing: see `read_jsonl`.

    Raises:
        BadInput: the file is missing or damaged, a row lacks a required key, or a value has
            another type.
    """
    return list(iter_rows(kind, path, made_by, growing))


def iter_rows(
    kind: type[AnyRow],
    path: Path,
    made_by: str | None = None,
    growing: bool = False,
) -> Iterator[AnyRow]:
    """`read_rows`, one row at a time."""
    fix = f"run `{made_by or maker(path)}` again"
    for number, row in enumerate(iter_jsonl(path, made_by, growing), 1):
        check_type(kind, row, f"{path}: row {number}", fix, strict=True)
        yield cast(AnyRow, row)  # with the keys that the type does not name

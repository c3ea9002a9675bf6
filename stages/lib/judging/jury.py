"""The jury of evaluate: the judges of `evaluate.judges`, each for itself and all together. None is
the reward model that PPO saw.

A comparison goes to the side that more judges prefer; a tie is half a vote, and a judge may be of
no help without being in the way.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from stages.lib.core.files import metric_name, stage_dir
from stages.lib.core.params import Params
from stages.lib.core.params.evaluation import HELD_OUT_REWARD_MODEL
from stages.lib.core.params.judging import JudgeName
from stages.lib.core.types import Row
from stages.lib.core.user_functions import import_function
from stages.lib.judging.agreement import between_judges, between_orders
from stages.lib.judging.endpoint import EndpointJudge
from stages.lib.judging.fluency import FLUENCY, Fluency, garbledness
from stages.lib.judging.lexicon import LexiconJudge
from stages.lib.judging.pairwise import (
    JURY,
    Comparison,
    PairwiseJudge,
    Preference,
    TwoOrderVerdict,
    judge_both_orders,
)
from stages.lib.judging.pointwise import PointwiseJudge
from stages.lib.lm.loading import load_tokenizer
from stages.lib.lm.scoring import RewardScorer

BATCH = 64  # texts at a time
WINS = {Preference.a: 1.0, Preference.tie: 0.5, Preference.b: 0.0}


class Jury:
    """Judges by name."""

    def __init__(self, judges: Mapping[str, PairwiseJudge]) -> None:
        self.judges = judges
        self.heard: dict[str, list[TwoOrderVerdict]] = {name: [] for name in judges}

    def compare(self, comparisons: Sequence[Comparison]) -> dict[str, list[float]]:
        """1 where A wins, 0.5 for a tie, else 0: by each judge, in each dimension
        (`<judge>/<dimension>`) of one that has several, and by all `together`, where each judge has
        one vote.
        """
        votes: dict[str, list[float]] = {}
        along: dict[str, list[float]] = {}
        for name, judge in self.judges.items():
            told = judge_both_orders(judge, comparisons)
            self.heard[name] += told
            votes[name] = [WINS[each.preference] for each in told]
            for dimension in dict.fromkeys(
                dimension for each in told for dimension in each.dimensions
            ):
                along[f"{name}/{dimension}"] = [
                    WINS[each.dimensions.get(dimension, Preference.tie)] for each in told
                ]
        return (
            votes | along | {JURY: [majority(each) for each in zip(*votes.values(), strict=True)]}
        )

    def report(self) -> Row:
        """Of all comparisons so far: how each judge agrees with itself in the other order, what it
        cost, and how each two agree.
        """
        heard = self.heard
        pairs = {f"{a}-{b}": between_judges(heard[a], heard[b]) for a, b in combinations(heard, 2)}
        return {
            "alone": {
                name: between_orders(told) | self.judges[name].cost()
                for name, told in heard.items()
            },
            "pairs": pairs,
        }


def majority(votes: Sequence[float]) -> float:
    """The side that more judges prefer.

    >>> majority([1.0, 0.5]), majority([1.0, 0.0]), majority([1.0, 0.0, 0.0])
    (1.0, 0.5, 0.0)
    """
    middle = sum(votes) / len(votes)
    return 1.0 if middle > 0.5 else 0.0 if middle < 0.5 else 0.5


def load_jury(
    params: Params, round_: str, base: Any, tokenizer: Any, people: Sequence[Row]
) -> Jury:
    """base: the model before SFT, which says what is fluent; people: held-out demonstrations, which
    say how fluent people write.

    Raises:
        BadInput: a function or model is not there.
    """
    margin, language_models = params.evaluate.tie_margin, params.language_models()

    def load(named: str) -> PairwiseJudge:
        if named == JudgeName.lexicon:
            return LexiconJudge(margin)
        if named in language_models:
            key, endpoint = language_models[named]
            return EndpointJudge(endpoint, key=key)
        if named == FLUENCY:
            return PointwiseJudge(
                named,
                garbledness(Fluency(base, tokenizer, params.prepare.prompt_format), people),
                0.0,
            )
        if ":" in named:
            return PointwiseJudge(named, import_function(named, "evaluate.judges"), margin)
        folder = (
            stage_dir(round_, "reward") / "judge" if named == HELD_OUT_REWARD_MODEL else Path(named)
        )
        return PointwiseJudge(
            named, RewardScorer(folder, load_tokenizer(folder), params, BATCH), margin
        )

    return Jury({metric_name(named): load(named) for named in params.evaluate.judges})

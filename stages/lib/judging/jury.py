"""The jury: the judges of `evaluate.judges`, each alone and all together.

The jury prefers the response that more judges prefer. A tie is half a vote for each side, so that a
judge that cannot decide does not change the result. None of the judges is the reward model that PPO
optimises.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from stages.lib.core.files import metric_name, stage_dir
from stages.lib.core.params import Params
from stages.lib.core.params.evaluation import FLUENCY, HELD_OUT_REWARD_MODEL
from stages.lib.core.params.judging import JudgeName
from stages.lib.core.rows import Demonstration
from stages.lib.core.types import Metrics
from stages.lib.core.user_functions import import_function
from stages.lib.judging.agreement import between_judges, between_orders
from stages.lib.judging.endpoint import EndpointJudge
from stages.lib.judging.fluency import Fluency, garbledness
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
from stages.lib.lm.packing import SCORING_BATCH_SIZE
from stages.lib.lm.scoring import RewardScorer

# The outcome for response A
WINS = {Preference.a: 1.0, Preference.tie: 0.5, Preference.b: 0.0}


class Jury:
    """Several judges, by name.

    `verdicts` keeps the verdicts of each judge on all comparisons so far, for `report`.
    """

    def __init__(self, judges: Mapping[str, PairwiseJudge]) -> None:
        self.judges = judges
        self.verdicts: dict[str, list[TwoOrderVerdict]] = {name: [] for name in judges}

    def compare(self, comparisons: Sequence[Comparison]) -> dict[str, list[float]]:
        """Judge comparisons in both orders.

        Returns:
            Outcomes per comparison: 1 if A wins, 0.5 for a tie, 0 if B wins. They are listed by
            judge, by `<judge>/<dimension>` for a judge with several dimensions, and by `together`
            for the whole jury, in which each judge has one vote.

        Raises:
            RondoError: as `PairwiseJudge.compare`.
        """
        votes: dict[str, list[float]] = {}
        by_dimension: dict[str, list[float]] = {}
        for name, judge in self.judges.items():
            verdicts = judge_both_orders(judge, comparisons)
            self.verdicts[name] += verdicts
            votes[name] = [WINS[verdict.preference] for verdict in verdicts]
            # dict.fromkeys: distinct dimensions in their order
            for dimension in dict.fromkeys(
                dimension for verdict in verdicts for dimension in verdict.dimensions
            ):
                by_dimension[f"{name}/{dimension}"] = [
                    WINS[verdict.dimensions.get(dimension, Preference.tie)] for verdict in verdicts
                ]
        together = [majority(outcomes) for outcomes in zip(*votes.values(), strict=True)]
        return votes | by_dimension | {JURY: together}

    def report(self) -> Metrics:
        """Reliability of the judges on all comparisons so far.

        Returns:
            `alone`: per judge, its agreement with itself in the other order, and its cost; `pairs`:
            per pair of judges, their agreement.
        """
        verdicts = self.verdicts
        return {
            "alone": {
                name: between_orders(verdicts[name]) | judge.cost()
                for name, judge in self.judges.items()
            },
            "pairs": {
                f"{a}-{b}": between_judges(verdicts[a], verdicts[b])
                for a, b in combinations(verdicts, 2)
            },
        }


def majority(votes: Sequence[float]) -> float:
    """The outcome that more judges vote for.

    >>> majority([1.0, 0.5]), majority([1.0, 0.0]), majority([1.0, 0.0, 0.0])
    (1.0, 0.5, 0.0)
    """
    mean = sum(votes) / len(votes)
    return 1.0 if mean > 0.5 else 0.0 if mean < 0.5 else 0.5


def load_jury(
    params: Params, round_: str, base: Any, tokenizer: Any, people: Sequence[Demonstration]
) -> Jury:
    """Load the judges that evaluate.judges lists.

    Args:
        params: all params.
        round_: the round, for its second reward model.
        base: the model before SFT, for the fluency judge.
        tokenizer: its tokenizer.
        people: held-out demonstrations, for the fluency judge's threshold.

    Raises:
        BadInput: a function or a model does not exist.
    """
    margin, language_models = params.evaluate.tie_margin, params.language_models()

    def load(named: str) -> PairwiseJudge:
        if named == JudgeName.lexicon:
            return LexiconJudge(margin)
        if named in language_models:
            key, endpoint = language_models[named]
            return EndpointJudge(endpoint, key=key)
        if named == FLUENCY:
            nll = Fluency(base, tokenizer, params.prepare.prompt_format)
            return PointwiseJudge(named, garbledness(nll, people), 0.0)
        if ":" in named:
            return PointwiseJudge(named, import_function(named, "evaluate.judges"), margin)
        folder = Path(named)
        if named == HELD_OUT_REWARD_MODEL:
            folder = stage_dir(round_, "reward") / "judge"
        scorer = RewardScorer(folder, load_tokenizer(folder), params, SCORING_BATCH_SIZE)
        return PointwiseJudge(named, scorer, margin)

    return Jury({metric_name(named): load(named) for named in params.evaluate.judges})

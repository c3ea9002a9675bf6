"""Load the judges that evaluate.judges names: all of them, or the first one."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from stages.lib.core.errors import BadInput
from stages.lib.core.files import ASSETS, metric_name, stage_dir
from stages.lib.core.hub import model_folder
from stages.lib.core.params import Params
from stages.lib.core.params.evaluation import FLUENCY, HELD_OUT_REWARD_MODEL, ZERO_SHOT
from stages.lib.core.params.judging import JudgeName
from stages.lib.core.progress import print_line
from stages.lib.core.rows import Demonstration, read_rows
from stages.lib.core.types import Metrics, Prompt
from stages.lib.core.user_functions import import_function
from stages.lib.data.splits import calibration_demonstrations
from stages.lib.judging.endpoint import EndpointJudge
from stages.lib.judging.jury import Jury
from stages.lib.judging.lexicon import LexiconJudge
from stages.lib.judging.pairwise import Comparison, PairwiseJudge, Verdict
from stages.lib.judging.pointwise import Fluency, PointwiseJudge, ZeroShot, garbledness
from stages.lib.judging.primary import PrimaryJudge
from stages.lib.lm import world
from stages.lib.lm.loading import load_causal_lm, load_tokenizer
from stages.lib.lm.scoring import RewardScorer, is_calibrated, set_calibration


class MainProcessJudge:
    """A judge that is a server or a user's function: the main process of a stage loads and asks it,
    and all processes get its answers and its errors (stages/lib/lm/world.py).
    """

    judge: PairwiseJudge  # in the main process only

    def __init__(self, load: Callable[[], PairwiseJudge]) -> None:
        def load_here() -> None:
            self.judge = load()

        world.in_main(load_here)

    def describe(self) -> dict[str, str | None]:
        return world.in_main(lambda: self.judge.describe())

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict | None]:
        return world.in_main(lambda: self.judge.compare(comparisons))

    def scores(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float] | None:
        return world.in_main(lambda: self.judge.scores(prompts, responses))

    def cost(self) -> Metrics:
        return world.in_main(lambda: self.judge.cost())

    def usage(self) -> Metrics:
        return world.in_main(lambda: self.judge.usage())


LoadModel = Callable[[], Any]


def base_model(params: Params) -> LoadModel:
    """A function that loads the model before SFT, once, if a judge asks it."""
    return cache(lambda: load_causal_lm(ASSETS / "model", params.model))


def load_jury(params: Params, round_: str, base: LoadModel) -> Jury:
    """All judges of evaluate.judges.

    Args:
        params: all params.
        round_: the round, for its second reward model and its held-out demonstrations.
        base: loads the model before SFT.

    Raises:
        BadInput: a function or a model does not exist, or `fluency` lacks demonstrations.
    """
    return Jury(
        {
            metric_name(named): load_judge(named, params, round_, base)
            for named in params.evaluate.judges
        }
    )


def load_primary_judge(params: Params, round_: str) -> PrimaryJudge:
    """The first judge of evaluate.judges."""
    named = params.evaluate.judges[0]
    return PrimaryJudge(metric_name(named), load_judge(named, params, round_, base_model(params)))


def load_judge(named: str, params: Params, round_: str, base: LoadModel) -> PairwiseJudge:
    """One judge by its name in evaluate.judges; the other arguments are those of `load_jury`."""
    margin, language_models = params.evaluate.tie_margin, params.language_models()
    if named == JudgeName.lexicon:
        return LexiconJudge(margin)
    if named in language_models:
        key, endpoint = language_models[named]
        return MainProcessJudge(lambda: EndpointJudge(endpoint, key=key))
    if named == FLUENCY:
        data = stage_dir(round_, "prepare") / "data"
        people = read_rows(Demonstration, data / "sft_eval.jsonl")
        if not people:
            params.check_demonstrations_not_needed()
        tokenizer = load_tokenizer(ASSETS / "model")
        nll = Fluency(base(), tokenizer, params.prepare.prompt_format)
        return PointwiseJudge(named, garbledness(nll, people), 0.0)
    if named == ZERO_SHOT:
        question = params.evaluate.zero_shot
        return PointwiseJudge(
            named, ZeroShot(base(), load_tokenizer(ASSETS / "model"), question), margin
        )
    if ":" in named:
        return MainProcessJudge(
            lambda: PointwiseJudge(named, import_function(named, "evaluate.judges"), margin)
        )
    if named == HELD_OUT_REWARD_MODEL:
        folder = stage_dir(round_, "reward") / "judge"
    else:
        folder = model_folder(named, "evaluate.judges")
    scorer = RewardScorer(folder, params)
    if not is_calibrated(scorer.model):
        calibrate(scorer, named, round_, params)
    return PointwiseJudge(named, scorer, margin)


def calibrate(scorer: RewardScorer, named: str, round_: str, params: Params) -> None:
    """Give a reward model from elsewhere the unit of Rondo's own: standard deviations of its scores
    of demonstrations. Else evaluate.tie_margin would be in whatever unit its scores have.

    Raises:
        BadInput: there are no demonstrations.
        RondoError: it scores all demonstrations alike.
    """
    people = calibration_demonstrations(round_, params.seed)
    key = f"evaluate.judges: {named}"
    if not people:
        raise BadInput(
            f"{key}: no mean and std of its scores in its config.json, and no demonstrations to "
            "measure them on: add demonstrations (docs/data.md), or mean and std to config.json"
        )
    texts = [row["prompt"] for row in people], [row["completion"] for row in people]
    scores = scorer.raw(scorer.encode(*texts))
    set_calibration(scorer.model, scores, f"{key} cannot be calibrated", "name another model")
    config = scorer.model.config
    measured = f"mean {config.mean:.4g}, standard deviation {config.std:.4g}"
    print_line(f"{key}: calibrated on {len(people)} demonstrations, {measured}")

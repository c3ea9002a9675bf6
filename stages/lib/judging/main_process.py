"""A judge that one of several processes asks."""

from collections.abc import Callable, Sequence

from stages.lib.core.types import Metrics, Prompt
from stages.lib.judging.pairwise import Comparison, PairwiseJudge, Verdict
from stages.lib.lm import world


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

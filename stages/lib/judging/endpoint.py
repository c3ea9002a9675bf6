"""A language model as judge, over OpenAI's chat completions protocol (chat.py)."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from stages.lib.core.files import JUDGE_CACHE
from stages.lib.core.params.judging import EndpointParams
from stages.lib.core.types import Metrics, Prompt
from stages.lib.judging.chat import ChatClient, Messages, prompt_text
from stages.lib.judging.pairwise import Comparison, Verdict
from stages.lib.judging.rubric import (
    Rubric,
    answer_format,
    parse_verdict,
    principle_rubric,
    system_prompt,
)

# part of the cache's keys: another wording means new requests
QUESTION = """<prompt>
{prompt}
</prompt>
<response_A>
{a}
</response_A>
<response_B>
{b}
</response_B>"""


class EndpointJudge:
    """Compares responses with a language model at temperature 0.

    Args:
        params: the endpoint's section of params.yaml.
        cache: folder in which all answers are kept.
        key: where params.yaml has that section, for messages.
    """

    def __init__(
        self, params: EndpointParams, cache: Path = JUDGE_CACHE, key: str = "annotate.endpoint"
    ) -> None:
        self.params, self.chat = params, ChatClient(params, cache, key)

    def describe(self) -> dict[str, str | None]:
        return {"judge": "endpoint", "model": self.params.model}

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict | None]:
        """Request a verdict on each comparison, several in parallel.

        Raises:
            BadInput, Unreachable, RondoError: as `ChatClient.read`.
        """
        return self.chat.in_parallel(self._verdict, comparisons)

    def scores(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> None:
        """None: a language model compares more reliably than it scores."""

    def cost(self) -> Metrics:
        return self.chat.cost()

    def usage(self) -> Metrics:
        return self.chat.usage()

    def _verdict(self, comparison: Comparison) -> Verdict | None:
        """The verdict on one comparison, by its principle if it has one, else by the rubric; None
        if no answer can be read.
        """
        rubric: Rubric = self.params.rubric
        if comparison.principle:
            rubric = principle_rubric(comparison.principle)
        messages: Messages = [
            {"role": "system", "content": system_prompt(rubric)},
            {
                "role": "user",
                "content": QUESTION.format(
                    prompt=prompt_text(comparison.prompt), a=comparison.a, b=comparison.b
                ),
            },
        ]
        return self.chat.read(
            messages, partial(parse_verdict, rubric=rubric), answer_format(rubric)
        )

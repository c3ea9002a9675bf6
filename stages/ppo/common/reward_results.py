"""What a further reward (`ppo.rewards`) reads and returns. A reward that failed is never a number.

An episode with a failed reward is left out of the update and counted. If more than
`ppo.max_failed_rewards` of the episodes failed, the run stops.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from stages.lib.core.errors import RewardsFailed
from stages.lib.core.numbers import is_finite
from stages.lib.core.rows import TrainingPrompt
from stages.lib.core.types import Prompt, TokenIds
from stages.lib.data.prompts import decode
from stages.lib.lm.end_tokens import EndTokens

REASON_CHARACTERS = 300
SERVED = "ppo.reward_url"  # the name of the reward stage's model, if it is served


@dataclass(frozen=True)
class RewardInputs:
    """B sampled responses, as the rewards read them.

    rows: the prompts' rows. texts: the responses decoded. ended: EOS was sampled. lengths: tokens
    per response.
    """

    rows: Sequence[TrainingPrompt]
    texts: Sequence[str]
    ended: Sequence[bool]
    lengths: Sequence[int]

    @classmethod
    def of(
        cls,
        rows: Sequence[TrainingPrompt],
        responses: Sequence[TokenIds],
        tokenizer: Any,
        ends: EndTokens,
    ) -> "RewardInputs":
        """Responses as tokens, one per row."""
        return cls(
            rows,
            decode(tokenizer, responses),
            [ends.end(response) for response in responses],
            [len(response) for response in responses],
        )

    def select(self, episodes: Sequence[int]) -> "RewardInputs":
        """Some of the responses, by index."""
        return RewardInputs(
            [self.rows[i] for i in episodes],
            [self.texts[i] for i in episodes],
            [self.ended[i] for i in episodes],
            [self.lengths[i] for i in episodes],
        )

    @property
    def columns(self) -> dict[str, list[Any]]:
        """The further columns of the rows (`prepare.columns`); None where a row has no value."""
        by_row = [row.get("columns", {}) for row in self.rows]
        names = dict.fromkeys(name for columns in by_row for name in columns)
        return {name: [columns.get(name) for columns in by_row] for name in names}

    @property
    def finish_reasons(self) -> list[str]:
        """`stop` if EOS was sampled, else `length`."""
        return ["stop" if ended else "length" for ended in self.ended]

    @property
    def arguments(self) -> dict[str, list[Any]]:
        """What a function can have beside prompts and responses, one value per response."""
        return self.columns | {
            "finish_reasons": self.finish_reasons,
            "token_counts": list(self.lengths),
        }

    @property
    def prompts(self) -> list[Prompt]:
        return [row["prompt"] for row in self.rows]


@dataclass(frozen=True)
class FailedReward:
    """In place of a reward that could not be computed."""

    reason: str


RewardResult = float | FailedReward
RewardFunction = Callable[[RewardInputs], Sequence[RewardResult]]


def settings_key(name: str) -> str:
    """Where params.yaml has a reward, for errors."""
    return name if name == SERVED else f"ppo.rewards {name}"


def all_failed(number: int, reason: str) -> list[RewardResult]:
    """`number` times the same failure."""
    return [FailedReward(reason[:REASON_CHARACTERS])] * number


def read_results(values: Any, number: int) -> list[RewardResult]:
    """What a function or a server returned for `number` responses.

    A value that is not a finite number is a failure of its response. With another number of values
    all fail, because nobody knows which value belongs to which response.

    Example:
        >>> read_results([1, None], 2)
        [1.0, FailedReward(reason='returned None, not a finite number')]
    """
    try:
        values = list(values)
    except TypeError:
        return all_failed(number, f"returned {values!r:.100}, not a list of numbers")
    if len(values) != number:
        return all_failed(number, f"returned {len(values)} rewards for {number} responses")
    return [
        float(value)
        if isinstance(value, Real) and is_finite(value)
        else FailedReward(f"returned {value!r:.100}, not a finite number")
        for value in values
    ]


@dataclass(frozen=True)
class RewardResults:
    """The results of all further rewards for `number` responses, by the name of the reward."""

    number: int
    by_name: Mapping[str, Sequence[RewardResult]]

    @property
    def kept(self) -> list[int]:
        """The responses of which no reward failed, by index."""
        return [
            index
            for index in range(self.number)
            if not any(isinstance(part[index], FailedReward) for part in self.by_name.values())
        ]

    @property
    def failed_share(self) -> float:
        """Share of the responses with a failed reward."""
        return 1 - len(self.kept) / self.number

    @property
    def parts(self) -> dict[str, list[float]]:
        """The numbers of the `kept` responses, by the name of the reward."""
        kept = self.kept
        return {
            name: [float(part[index]) for index in kept]  # type: ignore[arg-type]
            for name, part in self.by_name.items()
        }

    @property
    def failures(self) -> list[str]:
        """One line per reward and reason, the most frequent first."""
        counts = Counter(
            f"{settings_key(name)}: {result.reason}"
            for name, part in self.by_name.items()
            for result in part
            if isinstance(result, FailedReward)
        )
        return [
            f"{count} of {self.number} rewards failed, {reason}"
            for reason, count in counts.most_common()
        ]

    def check_share(self, max_share: float) -> None:
        """
        Raises:
            RewardsFailed: rewards of more than `max_share` of the responses failed, or of all.
        """
        if self.failed_share > max_share or not self.kept:
            raise RewardsFailed(
                f"rewards of {self.failed_share:.0%} of the responses failed; "
                f"ppo.max_failed_rewards is {max_share}. {'; '.join(self.failures[:5])}. "
                "Repair the reward and run the stage again, which resumes from its last update"
            )

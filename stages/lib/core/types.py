"""Types that modules of every room share: rows, prompts, tokens, weights and scoring functions."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field

Row = dict[str, Any]  # one line of a JSONL file, before it is checked (stages/lib/core/rows.py)
Metrics = dict[str, Any]  # a stage's metrics.json, or a part: numbers, texts and tables by name

ROLES = {"system": "System", "user": "Human", "assistant": "Assistant"}  # names in transcripts


def _check_message(message: dict[str, str]) -> dict[str, str]:
    if message.get("role") not in ROLES or "content" not in message:
        raise ValueError(f"expected a role ({', '.join(ROLES)}) and a content")
    return message


Message = Annotated[dict[str, str], AfterValidator(_check_message)]  # {role, content}

# A prompt is a text that the response continues, or a list of messages.
Prompt = str | list[Message]
NonEmptyPrompt = Annotated[Prompt, Field(min_length=1)]

StepMetrics = dict[str, float]  # a line of metrics.jsonl: its `step`, and numbers by name

TokenIds = list[int]
StateDict = dict[str, Any]  # weights by parameter name

# (prompts, responses) -> one number per response
ScoreFunction = Callable[[Sequence[Prompt], Sequence[str]], list[float]]

"""The types that every room uses."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import Field

Row = dict[str, Any]
StateDict = dict[str, Any]
TokenIds = list[int]
Prompt = str | list[dict[str, str]]
NonEmptyPrompt = Annotated[Prompt, Field(min_length=1)]
ScoreFunction = Callable[[Sequence[Prompt], Sequence[str]], list[float]]  # one number per response

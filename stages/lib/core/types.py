"""The types that every room uses."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import Field

Row = dict[str, Any]
State = dict[str, Any]
Tokens = list[int]
Prompt = str | list[dict[str, str]]
SomePrompt = Annotated[Prompt, Field(min_length=1)]
ScoreFunction = Callable[[Sequence[Prompt], Sequence[str]], list[float]]  # one number per response

"""Texts and numbers as the pages show them: the filters of their templates."""

from typing import Any

from stages.lib.core.types import Prompt
from stages.lib.data.prompts import plain_prompt


def visible_text(text: Any) -> str:
    """A model's text with visible line breaks, and a word for a missing or an empty one."""
    return "no response" if text is None else str(text).replace("\n", " ↵ ") or "(empty)"


def prompt_text(prompt: Prompt) -> str:
    return visible_text(plain_prompt(prompt))

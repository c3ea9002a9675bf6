"""Texts and numbers as the pages show them: the filters of their templates."""

from typing import Any

from stages.lib.core.types import Prompt
from stages.lib.data.prompts import transcript


def visible_text(text: Any) -> str:
    """A model's text with visible line breaks, and a word for a missing or an empty one."""
    return "no response" if text is None else str(text).replace("\n", " ↵ ") or "(empty)"


def plain_prompt(prompt: Prompt) -> str:
    """A prompt as one text; messages are a transcript."""
    return prompt if isinstance(prompt, str) else transcript(prompt).strip()


def prompt_text(prompt: Prompt) -> str:
    return visible_text(plain_prompt(prompt))

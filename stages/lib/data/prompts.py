"""The one place where a prompt becomes text and tokens: every stage renders and encodes through
here.

A prompt is a string (`plain`: the response continues it) or a list of {role, content} messages
(`chat`). Prompt and response are tokenised apart, so that a prompt has the same tokens in training,
generation and scoring.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_json
from stages.lib.core.params import Params
from stages.lib.core.params.shared import PromptFormat
from stages.lib.core.types import Prompt, Row

ENDING_TOKENS = 16  # room for an ending, so that max_length does not cut it off again
ROLES = {"system": "System", "user": "Human", "assistant": "Assistant"}
PROBE = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "And\n3 + 3?"},
]


def transcript(messages: list[dict[str, str]]) -> str:
    """Messages as plain text in the form of Anthropic's hh-rlhf, open for the assistant's turn:
    `\\n\\nHuman: ...\\n\\nAssistant:`.
    """
    return (
        "".join(f"\n\n{ROLES[message['role']]}: {message['content']}" for message in messages)
        + "\n\nAssistant:"
    )


def render_prompt(tokenizer: Any, prompt: Prompt, prompt_format: PromptFormat) -> str:
    """The text that a response follows.

    Under `plain` a string is itself and messages become a transcript; under `chat` a string is one
    user message, and messages go through the tokenizer's chat template up to the assistant's turn.

    Raises:
        BadInput: `chat` with a tokenizer that has no chat template.
    """
    if prompt_format is PromptFormat.plain:
        return prompt if isinstance(prompt, str) else transcript(prompt)
    if not tokenizer.chat_template:
        raise BadInput(
            f"prepare.prompt_format chat: {tokenizer.name_or_path} has no chat template; set plain, or use an instruct model"
        )
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    rendered: str = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    return rendered


def encode(
    tokenizer: Any,
    prompt: Prompt,
    response: str | None,
    prompt_format: PromptFormat,
    max_length: int | None = None,
) -> tuple[list[int], list[int]]:
    """Token ids of the prompt and of the response with its eos; without a response, [].

    Above `max_length` tokens the response loses its end, and with it the eos. The prompt loses its
    beginning only where less than a quarter of max_length would be left for the response.
    """
    prompt_ids: list[int] = tokenizer(
        render_prompt(tokenizer, prompt, prompt_format), add_special_tokens=False
    ).input_ids
    response_ids: list[int] = []
    if response is not None:
        response_ids = [
            *tokenizer(response, add_special_tokens=False).input_ids,
            tokenizer.eos_token_id,
        ]
    if max_length is None:
        return prompt_ids, response_ids
    prompt_ids = prompt_ids[-(max_length - min(len(response_ids), max_length // 4)) :]
    return prompt_ids, response_ids[: max_length - len(prompt_ids)]


def template_hash(tokenizer: Any, prompt_format: PromptFormat) -> str:
    """sha256 of the format, of a probe conversation as rendered, and of its tokens; travels in
    manifests.
    """
    prompt_ids, response_ids = encode(tokenizer, PROBE, "6.", prompt_format)
    probe = [
        prompt_format.value,
        render_prompt(tokenizer, PROBE, prompt_format),
        prompt_ids,
        response_ids,
    ]
    return hashlib.sha256(json.dumps(probe).encode()).hexdigest()


def check_template(manifest_path: Path, tokenizer: Any, prompt_format: PromptFormat) -> None:
    """Refuse what was made with another rendering of prompts.

    Raises:
        BadInput: `template_hash` in the manifest is not this tokenizer's and format's.
    """
    made_with = read_json(manifest_path, "dvc repro").get("template_hash")
    now = template_hash(tokenizer, prompt_format)
    if made_with != now:
        raise BadInput(
            f"{manifest_path}: template_hash {made_with} was made with another tokenizer, chat template or prompt format "
            f"(now {now}); run `dvc repro` so that every stage renders prompts alike"
        )


def pairs_with_room_for_ending(pairs: list[Row], tokenizer: Any, params: Params) -> list[Row]:
    """Pairs that stay within reward.max_length with an ending appended."""

    def tokens(row: Row, side: str) -> int:
        prompt, response = encode(tokenizer, row["prompt"], row[side], params.prepare.prompt_format)
        return len(prompt) + len(response)

    return [
        row
        for row in pairs
        if max(tokens(row, "chosen"), tokens(row, "rejected")) + ENDING_TOKENS
        <= params.reward.max_length
    ]

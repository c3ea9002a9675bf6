"""Rendering of prompts as text and tokens. All stages use these functions, so that they agree.

A prompt is a string, which the response continues, or a list of {role, content} messages.
`prepare.prompt_format` decides how both become text. Prompt and response are tokenised separately,
so that a prompt has the same tokens in training, generation and scoring. Its first token is BOS if
the tokenizer itself begins texts with BOS (Llama, Gemma, OPT). What a tokenizer puts before each
text (Llama 2: `▁`) is before the prompt alone, since the response continues the prompt.
"""

import re
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from stages.lib.core.errors import BadInput
from stages.lib.core.files import json_hash, read_json
from stages.lib.core.params import Params
from stages.lib.core.params.shared import PromptFormat
from stages.lib.core.rows import PreferencePair, Side
from stages.lib.core.types import ROLES, Prompt, TokenIds

# Texts before a response while it is tokenised. The first that is not merged with the response is
# used; a line break is also put before responses that are decoded.
BORDERS = ("\n", ".")
ENDING_TOKENS = 16  # room for an appended ending, so that max_length does not cut it off
# A conversation for `template_hash`: several turns, and a line break inside of one
PROBE = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "And\n3 + 3?"},
]
OPEN_THOUGHT = re.compile(r"<(think|thinking|thought|reasoning)>\s*$")
LAST_TURN = {"role": "assistant", "content": "It is 6, of course."}
RESPONSE_END = "response_end"  # in tokenizer_config.json: see `read_whole_conversations`
# "Today" in chat templates that print the date, in every stage: else prompts would be other ones on
# the next day. It is the day that Llama's templates print if they are not given one.
DAY = datetime(2024, 7, 26)
DIRECTIVES = [
    f"%{flag}{letter}" for letter in "aAbBcdDeFGhHIjmMpRSTuUVwWxXyYzZ" for flag in ("", "-")
]
STRFTIME_NOW = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f"|replace({directive!r}, {DAY.strftime(directive)!r})" for directive in DIRECTIVES)
    + " }}{% endmacro %}\n"
)


class PromptRefused(BadInput):
    """A chat template cannot render a prompt. Its cause is the template's error."""


def transcript(messages: list[dict[str, str]]) -> str:
    """Messages as plain text in the format of Anthropic's hh-rlhf, up to the assistant's turn.

    >>> transcript([{"role": "user", "content": "Hi"}])
    '\\n\\nHuman: Hi\\n\\nAssistant:'
    """
    return (
        "".join(f"\n\n{ROLES[message['role']]}: {message['content']}" for message in messages)
        + "\n\nAssistant:"
    )


def as_text(prompt: Prompt) -> str:
    """A prompt as one text; messages are a transcript."""
    return prompt if isinstance(prompt, str) else transcript(prompt)


def plain_prompt(prompt: Prompt) -> str:
    """A prompt as people and language models are shown it: a transcript begins with its role."""
    return prompt if isinstance(prompt, str) else transcript(prompt).strip()


def whole_texts(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[str]:
    """What a judge of texts reads: a string prompt with the response that continues it. Of a
    conversation only the response, because the prompt is another speaker's text.
    """
    return [
        prompt + response if isinstance(prompt, str) else response
        for prompt, response in zip(prompts, responses, strict=True)
    ]


def render_prompt(tokenizer: Any, prompt: Prompt, prompt_format: PromptFormat) -> str:
    """Render a prompt as the text that the response follows.

    With `plain`, a string is used as it is and messages become a transcript. With `chat`, a string
    becomes one user message, and the tokenizer's chat template renders messages up to the
    assistant's turn, or to its text (`read_whole_conversations`).

    Raises:
        BadInput: the format is `chat` and the tokenizer has no chat template.
        PromptRefused: the chat template raises an error, e.g. since it has no system turn.
    """
    if prompt_format is PromptFormat.plain:
        return as_text(prompt)
    if not tokenizer.chat_template:
        raise BadInput(
            f"prepare.prompt_format chat: {tokenizer.name_or_path} has no chat template; "
            "set plain, or use an instruct model"
        )
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if RESPONSE_END in tokenizer.init_kwargs:
        return _rendered(tokenizer, [*messages, LAST_TURN]).rpartition(LAST_TURN["content"])[0]
    return _rendered(tokenizer, messages, add_generation_prompt=True)


def _rendered(
    tokenizer: Any, messages: Sequence[dict[str, str]], add_generation_prompt: bool = False
) -> str:
    try:
        rendered: str = tokenizer.apply_chat_template(
            messages,
            chat_template=chat_template(tokenizer),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except (TemplateError, TypeError, ValueError) as error:
        prompt = messages[0]["content"] if len(messages) == 1 else messages
        raise PromptRefused(
            f"prepare.prompt_format chat: the chat template of {tokenizer.name_or_path} cannot "
            f"render the prompt {prompt!s:.200}: {' '.join(str(error).split())}; change the "
            "prompt or the template, or set plain"
        ) from error
    return rendered


def chat_template(tokenizer: Any) -> str:
    """The tokenizer's chat template, in which today is DAY.

    Raises:
        ValueError: it has several templates, none of which is the default.
    """
    template: str = tokenizer.get_chat_template()
    return STRFTIME_NOW + template if "strftime_now" in template else template


def open_thought(tokenizer: Any, prompt_format: PromptFormat) -> str:
    """The name of the tag with which the chat template begins a thought at the end of a prompt
    (`think`: Qwen3.5, DeepSeek-R1, Nemotron 3); empty: none.
    """
    tag = OPEN_THOUGHT.search(render_prompt(tokenizer, PROBE, prompt_format))
    return tag[1] if tag else ""


@lru_cache(maxsize=8)
def begins_with_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer begins texts with BOS, as in the pretraining of its model."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("x").input_ids[:1] == [bos]


def with_bos(tokenizer: Any, prompt_ids: list[int]) -> list[int]:
    """The tokens of a prompt, with exactly one BOS if the tokenizer begins texts with BOS.

    Some chat templates render BOS themselves.
    """
    bos = tokenizer.bos_token_id
    return (
        [bos, *prompt_ids] if begins_with_bos(tokenizer) and prompt_ids[:1] != [bos] else prompt_ids
    )


def read_whole_conversations(tokenizer: Any) -> None:
    """Let prompt, response and its end be those of the conversation that the chat template writes,
    as TRL and Skywork train reward models: Qwen's ends with `<|im_end|>` and a line break. It stays
    so when the tokenizer is saved.

    Raises:
        BadInput: the chat template cannot render a conversation, or leaves the last turn out.
    """
    text = LAST_TURN["content"]
    _, turn, end = _rendered(tokenizer, [*PROBE, LAST_TURN]).rpartition(text)
    if not turn:
        raise BadInput(
            f"prepare.prompt_format chat: the chat template of {tokenizer.name_or_path} leaves out "
            "the assistant's last turn; correct the template, or set plain"
        )
    tokenizer.init_kwargs[RESPONSE_END] = end


def end_of_response(tokenizer: Any) -> TokenIds:
    """The tokens after a response: EOS, or those of the end that `read_whole_conversations` set."""
    text = tokenizer.init_kwargs.get(RESPONSE_END)
    if text is None:
        return [tokenizer.eos_token_id]
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def text_with_bos(tokenizer: Any, text: str) -> str:
    """`with_bos` for the text of a prompt, for programs that tokenise without special tokens."""
    bos = tokenizer.bos_token
    return bos + text if begins_with_bos(tokenizer) and not text.startswith(bos) else text


@lru_cache(maxsize=8)
def puts_a_prefix(tokenizer: Any) -> bool:
    """Whether the tokenizer puts a prefix before each text (Llama 2, Mistral 7B, Phi-3: `▁`)."""
    border, alone, after = (
        tokenizer(text, add_special_tokens=False).input_ids
        for text in (BORDERS[0], "x", f"{BORDERS[0]}x")
    )
    return bool(after[len(border) :] != alone)


def continuing_tokens(tokenizer: Any, text: str) -> TokenIds:
    """The tokens of a text that continues another, without the tokenizer's prefix."""

    def tokens(whole: str) -> TokenIds:
        return list(tokenizer(whole, add_special_tokens=False).input_ids)

    for before in BORDERS if puts_a_prefix(tokenizer) else ():
        border, whole = tokens(before), tokens(before + text)
        if whole[: len(border)] == border:
            return whole[len(border) :]
    return tokens(text)


def decode(tokenizer: Any, responses: Sequence[TokenIds]) -> list[str]:
    """The texts of responses as they continue their prompts, without special tokens.

    A tokenizer that puts a prefix before each text takes it off the start of what it decodes, and
    with it the space that a response begins with.
    """
    border: TokenIds = []
    if puts_a_prefix(tokenizer):
        border = tokenizer(BORDERS[0], add_special_tokens=False).input_ids
    removed, *texts = tokenizer.batch_decode(
        [border, *([*border, *response] for response in responses)], skip_special_tokens=True
    )
    # by its length, since bytes that are no text make the line break unreadable, too
    return [text[len(removed) :] for text in texts]


def encode(
    tokenizer: Any,
    prompt: Prompt,
    response: str | None,
    prompt_format: PromptFormat,
    max_length: int | None = None,
) -> tuple[list[int], list[int]]:
    """Tokenise a prompt and its response.

    Args:
        tokenizer: the tokenizer of the model folder.
        prompt: a text, or messages.
        response: the response without EOS, as it follows the rendered prompt; None for none.
        prompt_format: how the prompt becomes text.
        max_length: tokens of both together at most; None: no limit. See `cut_to`.

    Returns:
        (prompt_ids, response_ids). response_ids ends with EOS, or as `end_of_response` says; it is
        empty if `response` is None.

    Raises:
        BadInput: the format is `chat` and the tokenizer has no chat template.

    Example:
        >>> from types import SimpleNamespace
        >>> class Letters:  # a tokenizer whose tokens are letters; 0 is EOS
        ...     bos_token_id, eos_token_id, init_kwargs = None, 0, {}
        ...     def __call__(self, text, add_special_tokens):
        ...         return SimpleNamespace(input_ids=[ord(letter) - 96 for letter in text])
        >>> encode(Letters(), "abc", "de", PromptFormat.plain)
        ([1, 2, 3], [4, 5, 0])
        >>> encode(Letters(), "abc", "de", PromptFormat.plain, max_length=5)
        ([1, 2, 3], [4, 0])
    """
    rendered = render_prompt(tokenizer, prompt, prompt_format)
    prompt_ids = with_bos(tokenizer, tokenizer(rendered, add_special_tokens=False).input_ids)
    response_ids: list[int] = []
    if response is not None:
        response_ids = [*continuing_tokens(tokenizer, response), *end_of_response(tokenizer)]
    if max_length is None:
        return prompt_ids, response_ids
    prompt_ids, [response_ids] = cut_to(tokenizer, max_length, prompt_ids, [response_ids])
    return prompt_ids, response_ids


def cut_to(
    tokenizer: Any, max_length: int, prompt: TokenIds, responses: Sequence[TokenIds]
) -> tuple[TokenIds, list[TokenIds]]:
    """Cut a prompt and each of its responses to `max_length` tokens together.

    A response keeps its start and its last token, EOS. The prompt keeps its end, which the
    responses continue, and BOS, if the tokenizer begins texts with it; it is cut only as far as
    the longest response needs to get a quarter of max_length.
    """
    room = max_length - min(max(map(len, responses)), max_length // 4)
    if len(prompt) > room:
        start = prompt[:1] if begins_with_bos(tokenizer) else []
        prompt = start + prompt[len(prompt) - room + len(start) :]
    room = max_length - len(prompt)
    return prompt, [ids if len(ids) <= room else ids[: room - 1] + ids[-1:] for ids in responses]


def template_hash(tokenizer: Any, prompt_format: PromptFormat) -> str:
    """sha256 of how prompts are rendered and tokenised, for manifests.

    Covers the format, and the text and tokens of the conversation PROBE.

    Raises:
        BadInput: the chat template cannot render it, or leaves the last turn out.
    """
    rendered = render_prompt(tokenizer, PROBE, prompt_format)
    if PROBE[-1]["content"] not in rendered:
        raise BadInput(
            f"prepare.prompt_format chat: the chat template of {tokenizer.name_or_path} leaves out "
            "the user's last turn; correct the template, or set plain"
        )
    prompt_ids, response_ids = encode(tokenizer, PROBE, "6.", prompt_format)
    return json_hash([prompt_format.value, rendered, prompt_ids, response_ids])


def check_template(manifest_path: Path, tokenizer: Any, prompt_format: PromptFormat) -> None:
    """Check that a stage's outputs were made with the same rendering of prompts.

    Raises:
        BadInput: `template_hash` of the manifest differs from that of tokenizer and format.
    """
    made_with = read_json(manifest_path).get("template_hash")
    now = template_hash(tokenizer, prompt_format)
    if made_with != now:
        raise BadInput(
            f"{manifest_path}: template_hash {made_with} was made with another tokenizer, "
            f"chat template or prompt format (now {now}); run `dvc repro` so that all stages "
            "render prompts alike"
        )


def pairs_with_room_for_ending(
    pairs: list[PreferencePair], tokenizer: Any, params: Params
) -> list[PreferencePair]:
    """Pairs that stay within reward.max_length if an ending is appended to either response."""

    def tokens(row: PreferencePair, side: Side) -> int:
        prompt, response = encode(tokenizer, row["prompt"], row[side], params.prepare.prompt_format)
        return len(prompt) + len(response)

    return [
        row
        for row in pairs
        if max(tokens(row, "chosen"), tokens(row, "rejected")) + ENDING_TOKENS
        <= params.reward.max_length
    ]

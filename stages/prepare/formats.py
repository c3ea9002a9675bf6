"""The users' formats, normalised to prompt + completion, or prompt + chosen + rejected.

Read: TRL's standard (strings) and conversational ({role, content} messages) forms, with an explicit
prompt or one that chosen and rejected share; and Anthropic's transcripts "\\n\\nHuman:
...\\n\\nAssistant: ...". https://huggingface.co/docs/trl/dataset_formats
"""

import math
import re
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from stages.lib.core.params.shared import PromptFormat
from stages.lib.core.types import Prompt, Row
from stages.lib.data.prompts import ROLES, transcript

Messages = list[dict[str, str]]
TURN = re.compile(r"\n\n(Human|Assistant):")
SPEAKERS = {name: role for role, name in ROLES.items()}
# Of Anthropic's transcripts, ChatML, Llama 2 and Alpaca: within a text they are a turn that was not
# cut off, or a template applied twice.
ROLE_MARKERS = (
    "\n\nHuman:",
    "\n\nAssistant:",
    "<|im_start|>",
    "<|im_end|>",
    "[INST]",
    "[/INST]",
    "### Instruction:",
    "### Response:",
)
NOT_TEXT = re.compile("[\x00\ud800-\udfff]")
SHOWN_CHARACTERS = 200
SAME = "chosen and rejected are the same"


class Defect(Exception):
    """Why a row cannot be used."""


class Tie(Defect):
    """The pair says that neither text is the better one."""


def form(raw: Any) -> str:
    """Which of the forms a row has, in the words of TRL's documentation; `unknown` where it has
    none.

    Raises nothing: a row of a known form may still have a Defect.
    """
    if not isinstance(raw, dict):
        return "unknown"
    answers = (
        [raw[name] for name in ("chosen", "rejected")]
        if raw.keys() >= {"chosen", "rejected"}
        else []
    )
    if not answers and raw.keys() >= {"prompt", "completion"}:
        kind, answers = "prompt-completion", [raw["completion"]]
    elif answers:
        kind = f"preference, {'implicit' if raw.get('prompt') is None else 'explicit'} prompt"
    else:
        return "unknown"
    if all(isinstance(answer, list) for answer in answers):
        return f"conversational {kind}"
    if any(
        isinstance(text, str) and text.startswith("\n\nHuman:")
        for text in (raw.get("prompt"), *answers)
    ):
        return f"Anthropic transcript, {kind}"
    return f"standard {kind}" if all(isinstance(answer, str) for answer in answers) else "unknown"


def normalise(
    raw: Any, prompt_format: PromptFormat, special_tokens: frozenset[str] = frozenset()
) -> Row:
    """A source row as {prompt, completion} or {prompt, chosen, rejected} (and margin, if it has
    one), shaped for `prompt_format`.

    Raises:
        Defect: with the reason; Tie for a pair without a better text.
    """
    if not isinstance(raw, dict):
        raise Defect("not a JSON object")
    if "chosen" in raw and "rejected" in raw:
        names: tuple[str, ...] = ("chosen", "rejected")
    elif "prompt" in raw and "completion" in raw:
        names = ("completion",)
    else:
        raise Defect(
            "expected the keys prompt and completion, or chosen and rejected (with or without prompt)"
        )
    answers = [parse(raw[name], name) for name in names]
    prompt, responses = split_prompt(
        parse(raw["prompt"], "prompt") if raw.get("prompt") is not None else None, answers, names
    )
    check_prompt(prompt)
    for name, response in zip(names, responses, strict=True):
        if not response.strip():
            raise Defect(f"`{name}` is empty")
        check_text(response, f"`{name}`")
    for token in special_tokens:
        if token in " ".join(
            [prompt if isinstance(prompt, str) else transcript(prompt), *responses]
        ):
            raise Defect(f"contains the tokenizer's special token {token}")
    margin = read_margin(raw) if "chosen" in names else {}
    if len({" ".join(response.split()) for response in responses}) < len(responses):
        raise Tie(SAME)
    prompt, *responses = shape(prompt, *responses, prompt_format=prompt_format)
    return {"prompt": prompt, **dict(zip(names, responses, strict=True)), **margin}


def read_margin(raw: dict[str, Any]) -> dict[str, float]:
    """TRL's `margin`, by how much the reward of chosen should be above that of rejected; {} where
    there is none.
    """
    margin = raw.get("margin")
    if margin is None:
        return {}
    if (
        not isinstance(margin, int | float)
        or isinstance(margin, bool)
        or not math.isfinite(margin)
        or margin < 0
    ):
        raise Defect(f"`margin` is {margin!r:.20}; expected a number of at least 0")
    if margin == 0:
        raise Tie("`margin` is 0")
    return {"margin": float(margin)}


def check_prompt(prompt: Prompt) -> None:
    """A text, or turns that alternate, after at most one of the system, and end with the user's."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise Defect("the prompt is empty")
        return check_characters(prompt, "the prompt")
    if not prompt:
        raise Defect("the prompt is empty")
    roles = [message["role"] for message in prompt]
    turns = roles[1:] if roles[0] == "system" else roles
    skipped = len(roles) - len(turns)
    for number, role in enumerate(turns):
        expected = ("user", "assistant")[number % 2]
        if role == "system":
            raise Defect(
                f"turn {number + skipped + 1} of the prompt is the system's; it may only be the first"
            )
        if role != expected:
            raise Defect(
                f"turn {number + skipped + 1} of the prompt is the {role}'s; expected the {expected}'s"
            )
    if len(turns) % 2 == 0:
        raise Defect(f"the prompt ends with the {roles[-1]}'s turn; expected the user's")
    for number, message in enumerate(prompt, 1):
        check_text(message["content"], f"turn {number} of the prompt")


def check_text(text: str, name: str) -> None:
    check_characters(text, name)
    for marker in ROLE_MARKERS:
        if marker in text:
            raise Defect(
                f"{name} contains the role marker {marker.strip()}: cut the text there, or make turns of it"
            )


def check_characters(text: str, name: str) -> None:
    if found := NOT_TEXT.search(text):
        raise Defect(
            f"{name} contains {'a NUL character' if found[0] == chr(0) else f'half of a surrogate pair, U+{ord(found[0]):X}'}"
        )


def shape(prompt: Prompt, *responses: str, prompt_format: PromptFormat) -> list[Any]:
    """[prompt, *responses] as the format wants them: text that goes on, or messages and the
    assistant's answers.
    """
    if prompt_format is PromptFormat.chat:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return [messages, *(response.strip() for response in responses)]
    if isinstance(prompt, str):
        return [prompt, *responses]
    return [transcript(prompt), *(" " + response.strip() for response in responses)]


def parse(value: Any, name: str) -> str | Messages:
    """A text, or messages; a transcript becomes messages."""
    if isinstance(value, str):
        return parse_transcript(value, name) if value.startswith("\n\nHuman:") else value
    if not isinstance(value, list):
        raise Defect(f"`{name}` is {type(value).__name__}; expected text or a list of messages")
    for number, message in enumerate(value, 1):
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("content"), str)
            or message.get("role") not in ROLES
        ):
            raise Defect(
                f"message {number} of `{name}`: expected a role ({', '.join(ROLES)}) and a content that is text"
            )
        if not message["content"].strip() and number < len(value):
            raise Defect(f"message {number} of `{name}` is empty")
    return [{"role": message["role"], "content": message["content"]} for message in value]


def parse_transcript(text: str, name: str) -> Messages:
    """Anthropic's form as messages; an open last "Assistant:" (as in a prompt) is left out."""
    parts = TURN.split(text)
    turns = [
        {"role": SPEAKERS[speaker], "content": content.strip()}
        for speaker, content in zip(parts[1::2], parts[2::2], strict=True)
    ]
    if name == "prompt" and turns[-1] == {"role": "assistant", "content": ""}:
        turns.pop()
    for number, turn in enumerate(turns[:-1], 1):
        if not turn["content"]:
            raise Defect(f"turn {number} of `{name}` is empty")
    return turns


def split_prompt(
    prompt: str | Messages | None, answers: list[str | Messages], names: tuple[str, ...]
) -> tuple[Prompt, list[str]]:
    """The prompt and the responses alone, whether the answers repeat the prompt or not."""
    texts = [answer for answer in answers if isinstance(answer, str)]
    if len(texts) == len(answers):
        return (prompt, texts) if prompt is not None else common_text(*texts)
    conversations = [answer for answer in answers if not isinstance(answer, str)]
    if len(conversations) < len(answers):
        raise Defect("chosen is text and rejected is messages, or the reverse")
    for name, conversation in zip(names, conversations, strict=True):
        if not conversation or conversation[-1]["role"] != "assistant":
            raise Defect(f"`{name}` does not end with an assistant turn")
    if all(
        len(conversation) > 1 for conversation in conversations
    ):  # as in UltraFeedback: the answers repeat the prompt
        prompt = conversations[0][:-1]
        if any(conversation[:-1] != prompt for conversation in conversations):
            raise Defect("chosen and rejected differ before the last assistant turn")
    elif any(len(conversation) > 1 for conversation in conversations):
        raise Defect("of chosen and rejected one has several turns and the other only one")
    if prompt is None:
        raise Defect("no prompt, and the answers do not begin with one")
    return prompt, [conversation[-1]["content"] for conversation in conversations]


def common_text(chosen: str, rejected: str) -> tuple[str, list[str]]:
    """The words that both texts begin with, and the rests, each with the white space before it."""
    if chosen == rejected:
        raise Tie(SAME)
    words = [re.findall(r"\s*\S+", text) for text in (chosen, rejected)]
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(*words, strict=False))))
    return "".join(words[0][:same]), ["".join(rest[same:]) for rest in words]


def source_texts(row: Row) -> Iterator[str]:
    """The texts of a normalised row: prompt, then responses."""
    yield row["prompt"] if isinstance(row["prompt"], str) else transcript(row["prompt"])
    yield from (row[name] for name in ("completion", "chosen", "rejected") if name in row)


def excerpt(text: str, most: int = SHOWN_CHARACTERS) -> str:
    """The beginning of a text in one line, safe to write: what is no Unicode is replaced."""
    line = " ".join(text[: 4 * most].split()).encode("utf-8", "replace").decode()
    return line if len(line) <= most else line[: most - 1] + "…"


def row_excerpt(row: Row) -> str:
    """The beginnings of a normalised row's texts in one line."""
    texts = list(source_texts(row))
    return " | ".join(excerpt(text, SHOWN_CHARACTERS // len(texts) - 3) for text in texts)

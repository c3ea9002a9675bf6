"""Normalise the users' formats to prompt + completion, or prompt + chosen + rejected.

Accepted: TRL's standard (strings) and conversational ({role, content} messages) forms, with an
explicit prompt or with one that chosen and rejected share; and Anthropic's transcripts
"\\n\\nHuman: ...\\n\\nAssistant: ...". https://huggingface.co/docs/trl/dataset_formats
"""

import math
import re
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any, NotRequired, TypedDict, final

from stages.lib.core.params.data import SpeakerMarkers
from stages.lib.core.params.shared import PromptFormat
from stages.lib.core.rows import Columns, HasPrompt, PairTexts, responses_of
from stages.lib.core.types import ROLES, Prompt, Row
from stages.lib.data.prompts import transcript
from stages.lib.metrics.text import words

Messages = list[dict[str, str]]
TURN = re.compile(r"\n\n(Human|Assistant):")
SPEAKERS = {name: role for role, name in ROLES.items()}
# Of Anthropic's transcripts, ChatML, Llama 2 and Alpaca. Within a text they mean that the next turn
# was not cut off, or that a template was applied twice.
ROLE_MARKERS = (
    *("\n\nHuman:", "\n\nAssistant:", "<|im_start|>", "<|im_end|>"),
    *("[INST]", "[/INST]", "### Instruction:", "### Response:"),
)
# At the start of a line: the turn of another speaker ("Assistant: Human: And you?"), frequent in
# public preference data. A prompt that is one text may contain them: it is formatted by its author.
SPEAKER_MARKER = re.compile(r"^[ \t]*((?:Human|Assistant|User|System|AI|Bot)[ \t]*:)", re.MULTILINE)
# A turn of the user may contain another dialogue as its material ("Customer: ... AI: ..."). There,
# only the names of Anthropic's transcripts show that the next turn was not cut off.
TRANSCRIPT_MARKER = re.compile(r"^[ \t]*((?:Human|Assistant)[ \t]*:)", re.MULTILINE)
NOT_TEXT = re.compile("[\x00\ud800-\udfff]")
EXCERPT_CHARACTERS = 200
SAME = "chosen and rejected are the same"


class Located(TypedDict):
    where: str  # `file:line`


class NormalisedRow(Located, HasPrompt):
    source: str  # the path of its file, or the hub id
    use: str  # `train` or `eval`
    columns: NotRequired[Columns]


@final
class SourceDemonstration(NormalisedRow):
    completion: str


@final
class SourcePair(NormalisedRow, PairTexts):
    margin: NotRequired[float]


SourceRow = SourceDemonstration | SourcePair


class Defect(Exception):
    """A reason why a row cannot be used."""


class AnotherSpeaker(Defect):
    """A turn that contains the marker of another speaker's turn."""


class Tie(Defect):
    """A pair in which neither text is better."""


def form(raw: Any) -> str:
    """The name of a row's form, as in TRL's documentation; `unknown` for any other value.

    A row of a known form may still have a Defect.
    """
    if not isinstance(raw, dict):
        return "unknown"
    if raw.keys() >= {"chosen", "rejected"}:
        kind = f"preference, {'implicit' if raw.get('prompt') is None else 'explicit'} prompt"
        responses = [raw["chosen"], raw["rejected"]]
    elif raw.keys() >= {"prompt", "completion"}:
        kind, responses = "prompt-completion", [raw["completion"]]
    else:
        return "unknown"
    if all(isinstance(response, list) for response in responses):
        return f"conversational {kind}"
    texts = [text for text in (raw.get("prompt"), *responses) if isinstance(text, str)]
    if any(text.startswith("\n\nHuman:") for text in texts):
        return f"Anthropic transcript, {kind}"
    is_standard = all(isinstance(response, str) for response in responses)
    return f"standard {kind}" if is_standard else "unknown"


def normalise(
    raw: Any,
    prompt_format: PromptFormat,
    special_tokens: frozenset[str] = frozenset(),
    speaker_markers: SpeakerMarkers = SpeakerMarkers.drop,
) -> Row:
    """Normalise a source row to {prompt, completion} or {prompt, chosen, rejected}.

    Args:
        raw: the row as read, of any type.
        prompt_format: decides the shape of the texts (see `shape`).
        special_tokens: of the tokenizer; no text may contain one.
        speaker_markers: whether a turn may contain the marker of another speaker.

    Returns:
        The normalised row, with `margin` if the source row has one.

    Raises:
        Defect: the row cannot be used; the message is the reason. Tie: neither text is better.
            AnotherSpeaker: with `drop`, a turn contains the marker of another speaker.

    Example:
        >>> normalise({"chosen": "It is blue", "rejected": "It is red"}, PromptFormat.plain)
        {'prompt': 'It is', 'chosen': ' blue', 'rejected': ' red'}
    """
    if not isinstance(raw, dict):
        raise Defect("not a JSON object")
    if "chosen" in raw and "rejected" in raw:
        names: tuple[str, ...] = ("chosen", "rejected")
    elif "prompt" in raw and "completion" in raw:
        names = ("completion",)
    else:
        raise Defect(
            "expected the keys prompt and completion, or chosen and rejected (with or without"
            " prompt)"
        )
    explicit_prompt = parse(raw["prompt"], "prompt") if raw.get("prompt") is not None else None
    prompt, responses = split_prompt(
        explicit_prompt, [parse(raw[name], name) for name in names], names
    )
    check_prompt(prompt)
    for name, response in zip(names, responses, strict=True):
        if not response.strip():
            raise Defect(f"`{name}` is empty")
        check_text(response, f"`{name}`")
    prompt_text = prompt if isinstance(prompt, str) else transcript(prompt)
    all_text = " ".join([prompt_text, *responses])
    for token in special_tokens:
        if token in all_text:
            raise Defect(f"contains the tokenizer's special token {token}")
    margin = read_margin(raw) if "chosen" in names else {}
    if len({" ".join(response.split()) for response in responses}) < len(responses):
        raise Tie(SAME)
    if speaker_markers is SpeakerMarkers.drop:
        check_speakers(prompt, dict(zip(names, responses, strict=True)))
    prompt, *responses = shape(prompt, *responses, prompt_format=prompt_format)
    return {"prompt": prompt, **dict(zip(names, responses, strict=True)), **margin}


def read_margin(raw: dict[str, Any]) -> dict[str, float]:
    """TRL's `margin`, by which chosen should score above rejected, as {margin}; {} if there is
    none.
    """
    margin = raw.get("margin")
    if margin is None:
        return {}
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
    if not is_number or not math.isfinite(margin) or margin < 0:
        raise Defect(f"`margin` is {margin!r:.20}; expected a number of at least 0")
    if margin == 0:
        raise Tie("`margin` is 0")
    return {"margin": float(margin)}


def check_prompt(prompt: Prompt) -> None:
    """Check that a prompt is text, or turns of user and assistant that alternate and end with the
    user's, after at most one system turn.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise Defect("the prompt is empty")
        return check_characters(prompt, "the prompt")
    if not prompt:
        raise Defect("the prompt is empty")
    roles = [message["role"] for message in prompt]
    turns = roles[1:] if roles[0] == "system" else roles
    first_number = 1 + len(roles) - len(turns)
    for number, role in enumerate(turns, first_number):
        expected = ("user", "assistant")[(number - first_number) % 2]
        if role == "system":
            raise Defect(f"turn {number} of the prompt is the system's; it may only be the first")
        if role != expected:
            raise Defect(f"turn {number} of the prompt is the {role}'s; expected the {expected}'s")
    if len(turns) % 2 == 0:
        raise Defect(f"the prompt ends with the {roles[-1]}'s turn; expected the user's")
    for number, message in enumerate(prompt, 1):
        check_text(message["content"], f"turn {number} of the prompt")


def check_text(text: str, name: str) -> None:
    check_characters(text, name)
    for marker in ROLE_MARKERS:
        if marker in text:
            raise Defect(
                f"{name} contains the role marker {marker.strip()}: cut the text there, or split it"
                " into turns"
            )


def check_speakers(prompt: Prompt, responses: Mapping[str, str]) -> None:
    """Check that no turn of a conversation, and no response, contains another speaker's marker."""
    messages = [] if isinstance(prompt, str) else prompt
    turns = [
        (
            f"turn {number} of the prompt",
            message["content"],
            SPEAKER_MARKER if message["role"] == "assistant" else TRANSCRIPT_MARKER,
        )
        for number, message in enumerate(messages, 1)
    ]
    turns += [(f"`{name}`", response, SPEAKER_MARKER) for name, response in responses.items()]
    for name, text, marker in turns:
        if match := marker.search(text):
            raise AnotherSpeaker(f"another speaker: {name} has a line that begins with {match[1]}")


def check_characters(text: str, name: str) -> None:
    """Check that a text can be encoded and written."""
    if match := NOT_TEXT.search(text):
        character = match[0]
        if character == "\0":
            raise Defect(f"{name} contains a NUL character")
        raise Defect(f"{name} contains half of a surrogate pair, U+{ord(character):X}")


def shape(prompt: Prompt, *responses: str, prompt_format: PromptFormat) -> list[Any]:
    """Shape texts for a prompt format.

    Returns:
        [prompt, *responses]. chat: a list of messages, and the assistant's texts without
        surrounding white space. plain: a text, and the texts that continue it; messages become a
        transcript.
    """
    if prompt_format is PromptFormat.chat:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return [messages, *(response.strip() for response in responses)]
    if isinstance(prompt, str):
        return [prompt, *responses]
    return [transcript(prompt), *(" " + response.strip() for response in responses)]


def parse(value: Any, name: str) -> str | Messages:
    """Check a source value and return it as text, or as messages if it is a list of messages or a
    transcript.
    """
    if isinstance(value, str):
        return parse_transcript(value, name) if value.startswith("\n\nHuman:") else value
    if not isinstance(value, list):
        raise Defect(f"`{name}` is {type(value).__name__}; expected text or a list of messages")
    for number, message in enumerate(value, 1):
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("content"), str)
            or message.get("role") not in [*ROLES]  # a role may be a list, too
        ):
            raise Defect(
                f"message {number} of `{name}`: expected a role ({', '.join(ROLES)}) and a content"
                " that is text"
            )
        if not message["content"].strip() and number < len(value):
            raise Defect(f"message {number} of `{name}` is empty")
    return [{"role": message["role"], "content": message["content"]} for message in value]


def parse_transcript(text: str, name: str) -> Messages:
    """Anthropic's form as messages; a last, empty "Assistant:" turn of a prompt is dropped."""
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
    prompt: str | Messages | None, values: list[str | Messages], names: tuple[str, ...]
) -> tuple[Prompt, list[str]]:
    """Separate the prompt from the responses, whether the `values` repeat the prompt or not."""
    texts = [value for value in values if isinstance(value, str)]
    if len(texts) == len(values):
        return (prompt, texts) if prompt is not None else common_text(*texts)
    conversations = [value for value in values if not isinstance(value, str)]
    if len(conversations) < len(values):
        raise Defect("chosen is text and rejected is messages, or the reverse")
    for name, conversation in zip(names, conversations, strict=True):
        if not conversation or conversation[-1]["role"] != "assistant":
            raise Defect(f"`{name}` does not end with an assistant turn")
    repeats_prompt = [len(conversation) > 1 for conversation in conversations]
    if all(repeats_prompt):  # as in UltraFeedback
        prompt = conversations[0][:-1]
        if any(conversation[:-1] != prompt for conversation in conversations):
            raise Defect("chosen and rejected differ before the last assistant turn")
    elif any(repeats_prompt):
        raise Defect("one of chosen and rejected has several turns, the other only one")
    if prompt is None:
        raise Defect("no prompt, and the responses do not begin with one")
    return prompt, [conversation[-1]["content"] for conversation in conversations]


def common_text(chosen: str, rejected: str) -> tuple[str, list[str]]:
    """Split two texts after the words that both begin with: (prompt, [chosen, rejected]).

    The white space after the prompt belongs to the responses.
    """
    if chosen == rejected:
        raise Tie(SAME)
    shared = len([*takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))])
    ends = [{word.end() for word in words(text)} for text in (chosen, rejected)]
    end = max((end for end in ends[0] & ends[1] if end <= shared), default=0)
    return chosen[:end], [chosen[end:].rstrip(), rejected[end:].rstrip()]


def source_texts(row: HasPrompt) -> Iterator[str]:
    """The texts of a row: prompt, then responses."""
    yield row["prompt"] if isinstance(row["prompt"], str) else transcript(row["prompt"])
    yield from responses_of(row)


def excerpt(text: str, max_length: int = EXCERPT_CHARACTERS) -> str:
    """The first `max_length` characters of a text in one line; invalid Unicode is replaced."""
    line = " ".join(text[: 4 * max_length].split()).encode("utf-8", "replace").decode()
    return line if len(line) <= max_length else line[: max_length - 1] + "…"


def row_excerpt(row: HasPrompt) -> str:
    """The beginnings of a normalised row's texts in one line."""
    texts = list(source_texts(row))
    return " | ".join(excerpt(text, EXCERPT_CHARACTERS // len(texts) - 3) for text in texts)

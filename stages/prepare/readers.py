"""One reader per form of rows (formats.py): what becomes of a row in TRL's forms.

A reader returns {prompt, chosen, rejected}, {prompt, completion}, {prompt}, or {prompt, completion,
rating}: one of several responses to a prompt, whose ratings make pairs. It raises Defect, with the
reason, for a row of its form that has something else.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from math import isfinite
from typing import Any

from stages.lib.core.reading import parse_json
from stages.lib.core.types import Row
from stages.prepare.turns import (
    DEEPSPEED,
    SPEAKERS,
    TRANSCRIPT,
    Defect,
    Messages,
    Tie,
    Turns,
    has_context,
    parse,
    parse_dialogue,
    turns,
    with_context,
)

Rows = Sequence[Row | Tie]  # of TRL's forms; a Tie for two responses of which none is better
Read = Callable[[Row], Rows]

QUESTIONS = ("instruction", "question", "query", "input")  # columns with a turn of the user
TALKS = ("messages", "conversations", "conversation")
SCORE = re.compile("score|rating|reward", re.IGNORECASE)  # of chosen, and of rejected
# Columns with responses, so that a row with a prompt is more than a prompt
RESPONSE = re.compile(
    "chosen|reject|completion|response|output|generation|candidate|prefer|answers|better",
    re.IGNORECASE,
)


def text_of(raw: Mapping[str, Any], name: str) -> str:
    value = raw.get(name)
    if not isinstance(value, str):
        raise Defect(f"`{name}` is {type(value).__name__}; expected text")
    return value


def number_of(raw: Mapping[str, Any], name: str) -> float:
    value = raw.get(name)
    if not isinstance(value, int | float) or not isfinite(value):
        raise Defect(f"`{name}` is {value!r:.40}; expected a number")
    return float(value)


def choice(raw: Mapping[str, Any], name: str, meanings: Mapping[Any, int | None]) -> int | None:
    """What a column means: the index of the better response, or None for a tie."""
    value = raw.get(name)
    value = value.lower() if isinstance(value, str) else value
    if not isinstance(value, str | int | float) or value not in meanings:
        raise Defect(f"`{name}` is {value!r:.40}; expected {', '.join(map(repr, meanings))}")
    return meanings[value]


def asked(raw: Mapping[str, Any]) -> Messages:
    """The prompt of a row that has it in one of QUESTIONS; Alpaca's `input` follows `instruction`.

    Raises:
        Defect: there are several candidates.
    """
    names = [name for name in QUESTIONS if raw.get(name)]
    if names == ["instruction", "input"]:
        return with_context(raw, f"{text_of(raw, 'instruction')}\n\n{text_of(raw, 'input')}")
    if len(names) != 1:
        listed = ", ".join(f"`{name}`" for name in names) or "none"
        raise Defect(
            f"one column has to be the prompt, and there are {listed}: name it in the source's"
            " `columns`, e.g. columns: {prompt: question}"
        )
    return with_context(raw, text_of(raw, names[0]))


def has_question(raw: Row) -> bool:
    return not raw.get("prompt") and any(raw.get(name) for name in QUESTIONS)


def given(raw: Mapping[str, Any]) -> Turns:
    """The column `prompt`: a text or messages, after the columns that come before it."""
    if has_context(raw):
        return with_context(raw, parse_dialogue(raw["prompt"], "prompt"))
    return parse(raw["prompt"], "prompt")


def prompt_of(raw: Mapping[str, Any]) -> Messages:
    """The user's turn or turns in `prompt`, or in one of QUESTIONS."""
    if not raw.get("prompt"):
        return asked(raw)
    return with_context(raw, parse_dialogue(raw["prompt"], "prompt"))


def better(prompt: Turns, responses: Sequence[Any], best: int | None) -> list[Row]:
    """The pair of two responses, of which the one with the index `best` is better."""
    if best is None:
        raise Tie("neither response is better")
    return [{"prompt": prompt, "chosen": responses[best], "rejected": responses[1 - best]}]


def ranked(prompt: Turns, rated: Sequence[tuple[float, Any]]) -> Rows:
    """All pairs of (rating, response) with different ratings."""
    pairs: list[Row | Tie] = []
    for one, other in combinations(rated, 2):
        if one[0] == other[0]:
            pairs.append(Tie("two responses have the same rating"))
        else:
            pairs += better(prompt, (one[1], other[1]), int(one[0] < other[0]))
    if not pairs:
        raise Defect(f"{len(rated)} responses; expected at least two")
    return pairs


def check_scores(raw: Mapping[str, Any]) -> None:
    """Check that the scores of chosen and rejected, if there are any, are not all equal.

    Example:
        >>> check_scores({"score_chosen": 5, "score_rejected": 3})
    """
    scores = [
        (name, value, raw.get(name.replace("chosen", "rejected")))
        for name, value in raw.items()
        if "chosen" in name and SCORE.search(name) and isinstance(value, int | float)
    ]
    if scores and all(chosen == rejected for _, chosen, rejected in scores):
        name = scores[0][0]
        raise Tie(f"`{name}` and `{name.replace('chosen', 'rejected')}` are equal")


# Readers of a form: a function of a row, or a function of column names that returns one


def trl_preference(raw: Row) -> Rows:
    if raw.get("margin") is None:
        check_scores(raw)
    row: Row = {name: raw[name] for name in ("chosen", "rejected", "margin") if name in raw}
    return [row | {"prompt": None if raw.get("prompt") is None else given(raw)}]


def two(chosen: str, rejected: str, talk: str = "") -> Read:
    """Chosen and rejected in two columns; the prompt in `talk`, else in one of its usual ones."""

    def read(raw: Row) -> Rows:
        check_scores(raw)
        prompt = with_context(raw, turns(raw[talk], talk)) if talk else prompt_of(raw)
        return better(prompt, (raw[chosen], raw[rejected]), 0)

    return read


def choose(first: str, second: str, by: str, meanings: Mapping[Any, int | None]) -> Read:
    """Two responses in two columns, and a third that says which one is better."""
    return lambda raw: better(prompt_of(raw), (raw[first], raw[second]), choice(raw, by, meanings))


def strength(first: str, second: str, by: str, prompt: Callable[[Row], Messages]) -> Read:
    """As `choose`, by a number: negative if the first response is better, 0 for a tie."""

    def read(raw: Row) -> Rows:
        number = number_of(raw, by)
        best = int(number > 0) if number else None
        return better(prompt(raw), (raw[first], raw[second]), best)

    return read


def context(raw: Row) -> Messages:
    return turns(raw["context"], "context")


HELPSTEER_TURN = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")


def helpsteer(raw: Row) -> Messages:
    """HelpSteer's prompt: one turn, or several with <extra_id_1> between them."""
    first, *rest = HELPSTEER_TURN.split(text_of(raw, "prompt"))
    messages = [{"role": "user", "content": first}] + [
        {"role": speaker.lower(), "content": text}
        for speaker, text in zip(rest[::2], rest[1::2], strict=True)
    ]
    return with_context(raw, messages)


def demonstration(response: str) -> Read:
    """A prompt and its response; the prompt of TRL's own form may be a text to be continued."""

    def read(raw: Row) -> Rows:
        rest = {name: value for name, value in raw.items() if name != response}
        prompt = given(raw) if raw.get("prompt") else asked(rest)
        return [{"prompt": prompt, "completion": raw[response]}]

    return read


def conversation(raw: Row) -> tuple[Messages, Messages]:
    """(prompt, the assistant's last turn) of the row's messages."""
    name = next(name for name in TALKS if raw.get(name))
    messages = parse(raw[name], name)
    if isinstance(messages, str) or not messages or messages[-1]["role"] != "assistant":
        raise Defect(f"`{name}` does not end with an assistant turn")
    return with_context(raw, messages[:-1]), messages[-1:]


def talk(raw: Row) -> list[Row]:
    prompt, completion = conversation(raw)
    return [{"prompt": prompt, "completion": completion}]


def has_talk(raw: Row) -> bool:
    return not raw.get("prompt") and any(raw.get(name) for name in TALKS)


def rated(response: str, rating: str, prompt: Callable[[Row], Turns] = given) -> Read:
    return lambda raw: [
        {"prompt": prompt(raw), "completion": raw[response], "rating": number_of(raw, rating)}
    ]


def label_of(raw: Row) -> bool | None:
    """Whether the response is good, by TRL's `label` or LLaMA-Factory's `kto_tag`."""
    labels = [raw[name] for name in ("label", "kto_tag") if raw.get(name) in (0, 1)]
    return bool(labels[0]) if labels else None


def unpaired(raw: Row) -> Rows:
    row = talk(raw)[0] if has_talk(raw) else {"prompt": given(raw), "completion": raw["completion"]}
    return [{**row, "rating": label_of(raw)}]


def ms_swift(raw: Row) -> Rows:
    name = "rejected_response" if raw.get("rejected_response") else "rejected_messages"
    rejected = parse(raw[name], name)
    if raw.get("messages"):
        prompt, last = conversation(raw)
        chosen = last[-1]["content"]
    else:
        prompt, chosen = asked(raw), text_of(raw, "response")
    text = rejected if isinstance(rejected, str) else rejected[-1]["content"]
    return better(prompt, (chosen, text), 0)


def ultrafeedback(raw: Row) -> Rows:
    rated = [(number_of(item, "overall_score"), item["response"]) for item in raw["completions"]]
    return ranked(asked(raw), rated)


def nectar(raw: Row) -> Rows:
    return ranked(
        prompt_of(raw), [(-number_of(item, "rank"), item["answer"]) for item in raw["answers"]]
    )


def nemo_rl(raw: Row) -> Rows:
    rated = [(-number_of(item, "rank"), item["completion"]) for item in raw["completions"]]
    return ranked(context(raw), rated)


RANKINGS = {"scores": 1, "ratings": 1, "ranks": -1, "rank": -1, "ranking": -1}


def ranked_list(raw: Row) -> Rows:
    """`ranking` is read only if it says the same as an order and as the rank of each response."""
    responses, name = raw["responses"], next(name for name in RANKINGS if raw.get(name))
    numbers = [number_of({name: value}, name) for value in raw[name]]
    if len(numbers) != len(responses):
        raise Defect(f"{len(responses)} `responses` and {len(numbers)} `{name}`")
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    if name == "ranking" and [order.index(index) for index in range(len(order))] != order:
        raise Defect(
            "`ranking` may be the order from best to worst, or the rank of each response: rename it"
            " to `ranks` if it is the latter, else write `scores`"
        )
    rated = [
        (RANKINGS[name] * number, text) for number, text in zip(numbers, responses, strict=True)
    ]
    return ranked(prompt_of(raw), rated)


def shp(raw: Row) -> Rows:
    prompt: Messages = [{"role": "user", "content": text_of(raw, "history")}]
    best = choice(raw, "labels", {1: 0, 0: 1})
    return better(prompt, (raw["human_ref_A"], raw["human_ref_B"]), best)


def webgpt(raw: Row) -> Rows:
    question = raw["question"]
    prompt = text_of(question, "full_text") if isinstance(question, dict) else question
    scores = number_of(raw, "score_0"), number_of(raw, "score_1")
    best = int(scores[1] > scores[0]) if scores[0] != scores[1] else None
    return better(with_context({}, prompt), (raw["answer_0"], raw["answer_1"]), best)


def summaries(raw: Row) -> Rows:
    info = raw["info"]
    if not isinstance(info.get("post"), str):
        raise Defect("`info` has no `post`: news articles are not supported")
    prompt = (
        f"SUBREDDIT: r/{info['subreddit']}\nTITLE: {info['title']}\nPOST: {info['post']}\nTL;DR:"
    )
    texts = [f" {text_of(summary, 'text').strip()}" for summary in raw["summaries"]]
    return better(prompt, texts, choice(raw, "choice", {0: 0, 1: 1}))


WINNERS = {"model_a": 0, "model_b": 1, "tie": None, "tie (bothbad)": None, "both_bad": None}


def arena(raw: Row) -> Rows:
    both = [turns(raw[name], name) for name in ("conversation_a", "conversation_b")]
    (row,) = better([], both, choice(raw, "winner", WINNERS))
    return [row | {"prompt": None}]


def lmsys(raw: Row) -> Rows:
    lists = []
    for name in ("prompt", "response_a", "response_b"):
        text = text_of(raw, name)
        texts = parse_json(text) if text.startswith("[") else [text]
        if len(texts) != 1:
            raise Defect(f"`{name}` has {len(texts)} turns, and those of the two models differ")
        lists.append(text_of({name: texts[0]}, name))
    prompt, *responses = lists
    won = [number_of(raw, name) for name in ("winner_model_a", "winner_model_b")]
    return better(with_context({}, prompt), responses, won.index(1) if 1 in won else None)


def openai(raw: Row) -> Rows:
    if raw["input"].get("tools"):
        raise Defect("`input` has tools, which are not supported")
    prompt = turns(raw["input"].get("messages"), "input.messages")
    return better(prompt, (raw["preferred_output"], raw["non_preferred_output"]), 0)


def oasst(raw: Row) -> Rows:
    """All ranked answers to each of the user's turns in a tree."""
    pairs: list[Row | Tie] = []
    nodes: list[tuple[Row, Messages]] = [(raw["prompt"], [])]
    while nodes:
        node, before = nodes.pop(0)
        thread = [*before, *turns(node, "prompt")]
        replies = node.get("replies") or []
        ranks = [
            (-number_of(reply, "rank"), reply["text"])
            for reply in replies
            if reply.get("rank") is not None and thread[-1]["role"] == "user"
        ]
        pairs += ranked(thread, ranks) if len(ranks) > 1 else []
        nodes += [(reply, thread) for reply in replies]
    if not pairs:
        raise Defect("no turn of the tree has two answers with a rank")
    return pairs


SIDES = {"left": 0, "right": 1}


def label_studio(raw: Row) -> Rows:
    data = raw["data"] if isinstance(raw.get("data"), dict) else raw
    selected = [raw[name] for name in ("comparison", "label", "choice") if raw.get(name) in SIDES]
    selected += [
        result["value"]["selected"]
        for annotation in raw.get("annotations") or []
        for result in annotation.get("result") or []
        if result.get("type") == "pairwise"
    ]
    sides = {choice({"selected": side}, "selected", SIDES) for side in selected}
    if not sides:
        raise Defect("no annotation selects left or right")
    best = sides.pop() if len(sides) == 1 else None  # people disagree
    return better(prompt_of(data), (data["answer1"], data["answer2"]), best)


def refuse(reason: str) -> Read:
    def read(raw: Row) -> Rows:
        raise Defect(reason)

    return read


def ends_with_user(raw: Row) -> bool:
    name = next((name for name in TALKS if raw.get(name)), None)
    last = raw[name][-1] if name and isinstance(raw[name], list) else {}
    speaker = last.get("role", last.get("from")) if isinstance(last, dict) else ""
    return not raw.get("prompt") and SPEAKERS.get(str(speaker).lower()) == "user"


def is_transcript(raw: Row) -> bool:
    texts = (raw.get(name) for name in ("prompt", "chosen", "completion"))
    return any(
        isinstance(text, str) and (TRANSCRIPT.match(text) or DEEPSPEED.fullmatch(text))
        for text in texts
    )


def is_prompt(raw: Row) -> bool:
    return not any(RESPONSE.search(str(name)) for name, value in raw.items() if value)


def no_further_text(raw: Row) -> bool:
    """Whether question and answer are the only texts of a row: no choices, no passage."""
    return sum(isinstance(value, str | list) and len(value) > 0 for value in raw.values()) == 2

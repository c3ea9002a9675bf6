"""The forms of rows that people have, and what becomes of each: FORMATS is their one declaration.

`trl_rows` turns a row of any of them into rows of TRL's forms (readers.py), which normalise.py
checks.
Run: `python -m stages.prepare.formats` prints the table of docs/data.md.
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from stages.lib.core.types import Row
from stages.prepare import readers
from stages.prepare.normalise import excerpt
from stages.prepare.readers import QUESTIONS, RANKINGS, TALKS, Read, Rows
from stages.prepare.turns import CONTEXT, Defect

# Columns that say how good the response is
RATING = re.compile(
    "label|kto_tag|(.*[^a-z])?(score|rating|reward|quality|helpfulness)", re.IGNORECASE
)
PAIR, PAIRS, DEMONSTRATION, PROMPT = "a pair", "pairs", "a demonstration", "a prompt"
RATED, REFUSED = "pairs with the other rows of its prompt", "refused"


class Format(NamedTuple):
    """A form of rows."""

    name: str  # as its authors call it
    keys: tuple[str, ...]  # columns that every row of it has, with a value
    becomes: str
    read: Read
    note: str = ""  # where the prompt is, and what decides
    uses: tuple[str, ...] = ()  # further columns that are read
    applies: Callable[[Row], bool] = lambda raw: True  # a condition besides the keys


FIRST_SECOND = {1: 0, 2: 1, "1": 0, "2": 1, 0: None}
IN_QUESTION = "the prompt is in `instruction` (and `input`), `question`, `query` or `input`"
IN_TALK = "the prompt is all turns before the last one"
BY_RANK = "all pairs with different ranks; rank 1 is the best"
NO_COMMON_PROMPT = "only rows whose conversations differ in the last turn alone"

# The first that fits a row is its form
FORMATS = (
    Format(
        "TRL unpaired",
        ("prompt", "completion"),
        RATED,
        readers.unpaired,
        "a good response is a demonstration, too",
        ("label", *CONTEXT),
        lambda raw: readers.label_of(raw) is not None,
    ),
    Format(
        "KTO of LLaMA-Factory",
        (),
        RATED,
        readers.unpaired,
        f"as TRL's; {IN_TALK}",
        (*TALKS, "label", "kto_tag", *CONTEXT),
        lambda raw: (
            readers.label_of(raw) is not None and readers.has_talk(raw) and not raw.get("chosen")
        ),
    ),
    *(
        Format(
            name,
            (column, "chosen", "rejected"),
            PAIR,
            readers.two("chosen", "rejected", column),
            f"the prompt is `{column}`",
            CONTEXT,
            readers.ends_with_user,
        )
        for name, column in (
            ("ShareGPT DPO (LLaMA-Factory)", "conversations"),
            ("Axolotl DPO", "messages"),
            ("Axolotl DPO, `conversation`", "conversation"),
        )
    ),
    Format(
        "Alpaca DPO, Orca DPO",
        ("chosen", "rejected"),
        PAIR,
        readers.two("chosen", "rejected"),
        IN_QUESTION,
        (*QUESTIONS, *CONTEXT),
        readers.has_question,
    ),
    Format(
        "Argilla, NeMo DPO",
        ("chosen_response", "rejected_response"),
        PAIR,
        readers.two("chosen_response", "rejected_response"),
        f"the prompt is `prompt`; else {IN_QUESTION}",
        ("prompt", *QUESTIONS, *CONTEXT),
    ),
    Format(
        "ms-swift DPO",
        (),
        PAIR,
        readers.ms_swift,
        f"{IN_TALK}; or `query`, and chosen is `response`",
        ("messages", "query", "response", "rejected_response", "rejected_messages", *CONTEXT),
        lambda raw: bool(
            (raw.get("rejected_response") or raw.get("rejected_messages"))
            and (raw.get("messages") or raw.get("query"))
        ),
    ),
    Format(
        "OpenAI preferences",
        ("input", "preferred_output", "non_preferred_output"),
        PAIR,
        readers.openai,
        "the prompt is `input.messages`",
    ),
    Format(
        "NeMo RL preferences",
        ("context", "completions"),
        PAIRS,
        readers.nemo_rl,
        f"the prompt is `context`; {BY_RANK}",
    ),
    Format(
        "UltraFeedback",
        ("instruction", "completions"),
        PAIRS,
        readers.ultrafeedback,
        "all pairs with different `overall_score`",
        CONTEXT,
    ),
    Format("Nectar", ("prompt", "answers"), PAIRS, readers.nectar, BY_RANK, CONTEXT),
    Format(
        "ranked list",
        ("responses",),
        PAIRS,
        readers.ranked_list,
        "all pairs with different `scores` (high is good) or `ranks` (1 is the best)",
        ("prompt", *RANKINGS, *QUESTIONS, *CONTEXT),
        lambda raw: any(raw.get(name) for name in RANKINGS),
    ),
    Format(
        "HelpSteer 3",
        ("context", "response1", "response2", "overall_preference"),
        PAIR,
        readers.strength("response1", "response2", "overall_preference", readers.context),
        "the prompt is `context`; negative: response 1 is better",
    ),
    Format(
        "HelpSteer 2, preferences",
        ("prompt", "response_1", "response_2", "preference_strength"),
        PAIR,
        readers.strength("response_1", "response_2", "preference_strength", readers.helpsteer),
        "negative: response 1 is better",
    ),
    Format(
        "HelpSteer 1 and 2",
        ("prompt", "response", "helpfulness"),
        RATED,
        readers.rated("response", "helpfulness", readers.helpsteer),
        "by `helpfulness`; the other ratings are left out",
        CONTEXT,
    ),
    Format(
        "SHP",
        ("history", "human_ref_A", "human_ref_B", "labels"),
        PAIR,
        readers.shp,
        "the prompt is `history`; `labels` 1: A is better",
    ),
    Format(
        "PKU-SafeRLHF",
        ("prompt", "response_0", "response_1", "better_response_id"),
        PAIR,
        readers.choose("response_0", "response_1", "better_response_id", {0: 0, 1: 1}),
        "by `better_response_id`; which one is safer is left out",
        CONTEXT,
    ),
    Format(
        "OASST, trees",
        ("message_tree_id", "prompt"),
        PAIRS,
        readers.oasst,
        f"the prompt is the thread up to a user's turn; {BY_RANK.replace('1', '0')}",
        applies=lambda raw: isinstance(raw["prompt"], dict),
    ),
    Format(
        "OASST, messages",
        ("message_id", "message_tree_id", "text"),
        REFUSED,
        readers.refuse("a message of OASST without its tree: use the file of trees"),
    ),
    Format(
        "WebGPT",
        ("question", "answer_0", "answer_1", "score_0", "score_1"),
        PAIR,
        readers.webgpt,
        "the prompt is `question.full_text`; by the scores; quotes are left out",
    ),
    Format(
        "summarize-from-feedback",
        ("info", "summaries", "choice"),
        PAIR,
        readers.summaries,
        "the prompt is subreddit, title and post, and ends with `TL;DR:`",
    ),
    Format(
        "Chatbot Arena, MT-Bench",
        ("conversation_a", "conversation_b", "winner"),
        PAIR,
        readers.arena,
        f"by `winner`; {NO_COMMON_PROMPT}",
    ),
    Format(
        "LMSYS 55k",
        ("prompt", "response_a", "response_b", "winner_model_a", "winner_model_b"),
        PAIR,
        readers.lmsys,
        "only rows with one turn",
        ("winner_tie",),
    ),
    Format(
        "AlpacaFarm",
        ("output_1", "output_2", "preference"),
        PAIR,
        readers.choose("output_1", "output_2", "preference", FIRST_SECOND),
        IN_QUESTION,
        (*QUESTIONS, *CONTEXT),
    ),
    Format(
        "LLMBar",
        ("output_1", "output_2", "label"),
        PAIR,
        readers.choose("output_1", "output_2", "label", FIRST_SECOND),
        IN_QUESTION,
        (*QUESTIONS, *CONTEXT),
    ),
    Format(
        "Label Studio, export",
        ("data", "annotations"),
        PAIR,
        readers.label_studio,
        "pairwise; a tie if people disagree; the prompt is `data.prompt`",
    ),
    Format(
        "Label Studio, JSON-MIN",
        ("answer1", "answer2"),
        PAIR,
        readers.label_studio,
        "the choice is `comparison`, `label` or `choice`: left or right",
        ("prompt", "comparison", "label", "choice", *QUESTIONS, *CONTEXT),
    ),
    Format(
        "Anthropic hh-rlhf, DeepSpeed-Chat",
        ("chosen", "rejected"),
        PAIR,
        readers.trl_preference,
        "the prompt is the transcript up to the last `Assistant:`",
        ("prompt", *CONTEXT),
        readers.is_transcript,
    ),
    Format(
        "TRL preference, explicit prompt",
        ("prompt", "chosen", "rejected"),
        PAIR,
        readers.trl_preference,
        "UltraFeedback binarized, OpenRLHF: too. `margin` is used; equal scores are a tie",
        ("margin", *CONTEXT),
    ),
    Format(
        "TRL preference, implicit prompt",
        ("chosen", "rejected"),
        PAIR,
        readers.trl_preference,
        "the prompt is the common beginning",
        ("prompt", "margin"),
    ),
    Format(
        "rated responses",
        ("prompt", "completion", "rating"),
        RATED,
        readers.rated("completion", "rating"),
        "by `rating`; high is good",
        CONTEXT,
    ),
    Format(
        "TRL prompt-completion",
        ("prompt", "completion"),
        DEMONSTRATION,
        readers.demonstration("completion"),
        uses=CONTEXT,
    ),
    Format(
        "prompt and response",
        ("prompt", "response"),
        DEMONSTRATION,
        readers.demonstration("response"),
        uses=CONTEXT,
    ),
    Format(
        "Alpaca",
        ("output",),
        DEMONSTRATION,
        readers.demonstration("output"),
        IN_QUESTION,
        (*QUESTIONS, *CONTEXT),
        readers.has_question,
    ),
    Format(
        "ms-swift `query`, `response`",
        ("response",),
        DEMONSTRATION,
        readers.demonstration("response"),
        IN_QUESTION,
        (*QUESTIONS, *CONTEXT),
        readers.has_question,
    ),
    Format(
        "question and answer (GSM8K)",
        ("question", "answer"),
        DEMONSTRATION,
        readers.demonstration("answer"),
        "if the row has no other text",
        applies=readers.no_further_text,
    ),
    Format(
        "messages (TRL, OpenAI, ShareGPT, Firefly, XTuner)",
        (),
        DEMONSTRATION,
        readers.talk,
        IN_TALK,
        (*TALKS, *CONTEXT),
        readers.has_talk,
    ),
    Format(
        "verl",
        ("prompt", "reward_model"),
        PROMPT,
        lambda raw: [{"prompt": readers.given(raw)}],
        "prepare.columns: [reward_model] gives rewards the ground truth",
        applies=readers.is_prompt,
    ),
    Format(
        "TRL prompt-only, OpenRLHF",
        ("prompt",),
        PROMPT,
        lambda raw: [{"prompt": readers.given(raw)}],
        "prepare.columns names columns for rewards",
        CONTEXT,
        readers.is_prompt,
    ),
    Format(
        "TRL language modeling",
        ("text",),
        REFUSED,
        readers.refuse("one `text` has no border between prompt and response: write both"),
        applies=lambda raw: len(raw) == 1,
    ),
)


def recognise(raw: Mapping[str, Any]) -> Format | None:
    """The form of a row, if it has one."""
    row = dict(raw)
    return next(
        (
            form
            for form in FORMATS
            if all(row.get(key) is not None for key in form.keys) and form.applies(row)
        ),
        None,
    )


def find_form(
    raw: Any, columns: Mapping[str, str] = {}, kept: Collection[str] = ()
) -> tuple[Format, Row]:
    """The form of a row, and the row with the names of columns that its form has.

    Args:
        raw: the row as read, of any type.
        columns: the source's own names of columns: {"prompt": "question"}; `a.b` is b within a.
        kept: prepare.columns: what says there how good a response is, is for rewards.

    Raises:
        Defect: it has no known form; the message is the reason.
    """
    if not isinstance(raw, dict):
        raise Defect("not a JSON object")
    row = renamed(raw, columns)
    row = {name: row[name] for name in row if name not in kept or not RATING.fullmatch(str(name))}
    form = recognise(row)
    if form is None:
        raise Defect(unknown(row))
    return form, row


def trl_rows(form: Format, row: Row) -> Rows:
    """The rows of TRL's forms that a row becomes.

    Raises:
        Defect: it cannot be used; the message is the reason. Tie: neither response is better.
    """
    try:
        rows = form.read(row)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise Defect(f"not as in {form.name}: {reason:.100}") from None
    if form.becomes == DEMONSTRATION:
        check_unrated(row)
    return rows


def renamed(raw: Mapping[str, Any], columns: Mapping[str, str]) -> Row:
    """The row with the names that `columns` gives to some of its values.

    Example:
        >>> renamed({"data": {"q": "2 + 2?"}, "id": 7}, {"prompt": "data.q"})
        {'id': 7, 'prompt': '2 + 2?'}
    """
    moved = {}
    for name, path in columns.items():
        value: Any = raw
        for key in [path] if path in raw else path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is None:
            raise Defect(f"no `{path}`, which the source's `columns` names as {name}")
        moved[name] = value
    used = {path if path in raw else path.split(".")[0] for path in columns.values()}
    return {name: value for name, value in raw.items() if name not in used} | moved


def check_unrated(row: Mapping[str, Any]) -> None:
    """Check that no column of a demonstration says how good it is."""
    is_rating = (
        name
        for name, value in row.items()
        if RATING.fullmatch(name) and isinstance(value, int | float)
    )
    if name := next(is_rating, None):
        raise Defect(
            f"`{name}` may say how good the response is. For pairs of the responses to one prompt,"
            f" add `rating: {name}` to the source's `columns`; if it is for a reward, name it in"
            " prepare.columns; else remove it"
        )


# What a column may be, by its name
LIKELY = {
    "rejected": "reject|dispreferred|non_?preferred|worse|bad|los(e|er|ing)|negative",
    "chosen": "chosen|prefer|better|good|best|win|positive",
    "completion": "completion|response|answer|output|target|solution|summary|reply",
    "prompt": "prompt|instruction|question|query|input|problem|text|post|context|source",
}


def unknown(row: Mapping[str, Any]) -> str:
    """Why a row has no known form: its keys, the nearest form, and the mapping that would do."""
    partly = [
        (len(form.keys) - len(lacking), -len(lacking), form.name, lacking)
        for form in FORMATS
        if (lacking := [f"`{key}`" for key in form.keys if row.get(key) is None])
    ]
    present, _, nearest, lacking = max(partly)
    mapping: dict[str, str] = {}
    for name, value in row.items():
        role = next(
            (role for role, likely in LIKELY.items() if re.search(likely, str(name), re.I)), ""
        )
        if role and isinstance(value, str | list) and value:
            mapping.setdefault(role, str(name))
    if {"chosen", "rejected"} <= mapping.keys():
        mapping.pop("completion", None)
    else:
        mapping = {role: mapping[role] for role in ("prompt", "completion") if role in mapping}
    listed = ", ".join(f"{role}: {name}" for role, name in sorted(mapping.items()))
    near = f". The nearest is {nearest}, without {', '.join(lacking)}" if present else ""
    return (
        f"unknown form, with the keys {excerpt(', '.join(map(str, row)), 120)}{near}. Name the"
        f" columns in the source's `columns`, e.g. {{{excerpt(listed, 120) or 'prompt: NAME'}}}"
    )


def ignored_columns(row: Mapping[str, Any], form: Format, kept: Collection[str]) -> Row:
    """The columns of a row that are neither read nor in prepare.columns, and have a value."""
    return {
        excerpt(str(name), 40): value
        for name, value in row.items()
        if name not in form.keys
        and name not in form.uses
        and name not in kept
        and value not in (None, "", [], {}, "[]", "{}")
    }


def table() -> str:
    """FORMATS as the table of docs/data.md."""
    lines = ["| form | columns | becomes | |", "|---|---|---|---|"]
    for form in FORMATS:
        columns = ", ".join(f"`{key}`" for key in form.keys)
        more = ", ".join(f"`{name}`" for name in form.uses if name not in CONTEXT)
        listed = f"{columns} ({more})" if columns and more else columns or more
        lines.append(f"| {form.name} | {listed} | {form.becomes} | {form.note} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

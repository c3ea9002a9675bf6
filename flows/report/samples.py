"""All samples of a round: which of them won, lost or exploit the reward model, and the words in
which two responses differ. Of a round without an evaluation, SFT's samples beside the base model's.
"""

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from markupsafe import Markup

from flows.core.locks import Locks
from flows.core.tables import format_number
from flows.report import browse, round_files, summary
from stages.lib.core.files import REPORTS, file_hash, json_hash, read_jsonl
from stages.lib.core.rows import EvaluationSample, read_rows
from stages.lib.core.types import Prompt

MODELS = {"base": "base", "sft": "SFT", "ppo": "policy", "champion": "champion"}
COMPARED = (MODELS["sft"], MODELS["ppo"])
COMPARED_OF_SFT = (MODELS["base"], MODELS["sft"])
NUMBERS = ("judge_score", "score", "kl", "length")  # of a response; the end of their keys
OUTCOMES = {1.0: "won", 0.5: "tied", 0.0: "lost"}
EXPLOIT = "exploit"  # the reward model's score rose from SFT to the policy, the judge's score fell
CHOICES = {
    "show": ("policy against SFT", {name: f"{name} against SFT" for name in OUTCOMES.values()}),
    "champion": (
        "against champion",
        {name: f"{name} against champion" for name in OUTCOMES.values()},
    ),
    "sign": ("sign of trouble", {EXPLOIT: "reward up, judge down"}),
}
CHOICES_OF_SFT = {
    "show": ("SFT against base", {name: f"{name} against base" for name in OUTCOMES.values()})
}
SORTS = {
    "judge": "judge's gain, least first",
    "-judge": "judge's gain, most first",
    "-reward": "reward's gain, most first",
    "-kl": "KL, most first",
    "-length": "length, most first",
    "length": "length, least first",
}
COMPARED_WORDS = 1000  # per response; the words after them are never marked
WORD = re.compile(r"\S+\s*|\s+")


@dataclass(frozen=True)
class Response:
    """A model's response to a prompt. Numbers are None where they are not known: the judge's score,
    the reward model's, KL from SFT in nats, and tokens.
    """

    model: str
    text: Markup
    judge: float | None = None
    reward: float | None = None
    kl: float | None = None
    length: int | None = None

    @property
    def numbers(self) -> str:
        """Those that are known."""
        shown = {"judge": self.judge, "reward": self.reward, "KL": self.kl, "tokens": self.length}
        return ", ".join(
            f"{name} {format_number(value)}" for name, value in shown.items() if value is not None
        )


@dataclass(frozen=True)
class SampleView:
    """The responses to one prompt, as the page shows them.

    facts: what can be chosen, by the name of the choice. numbers: by which the page sorts.
    """

    id: str
    prompt: Prompt
    responses: Sequence[Response]
    facts: dict[str, str]
    numbers: dict[str, float]


def samples_file(round_: str, locks: Locks, stage: str = "evaluate") -> Path | None:
    return round_files.result_file(round_, stage, "samples.jsonl", locks)


def read_samples(round_: str, locks: Locks) -> list[EvaluationSample]:
    """The samples of a round's evaluation; [] if they are not in this folder."""
    path = samples_file(round_, locks)
    return read_rows(EvaluationSample, path, round_files.restore(path)) if path else []


def path_of(round_: str) -> Path:
    return REPORTS / round_ / "samples.html"


def write(round_: str, locks: Locks) -> None:
    """Write the page of a round's samples, unless it is up to date; remove it if they are not in
    this folder.
    """
    page = path_of(round_)
    file = samples_file(round_, locks) or samples_file(round_, locks, "sft")
    if file is None:
        page.unlink(missing_ok=True)
    elif not (page.exists() and page.read_bytes().endswith(made_of(file).encode())):
        summary.replace_text(page, lambda: render_round(round_, locks) + made_of(file))


def made_of(samples: Path) -> str:
    """The last line of a page: a hash of its samples, and of all that makes the pages."""
    folder = Path(__file__).parent
    code = sorted([*folder.glob("*.py"), *folder.glob("*.jinja")])
    return f"\n<!-- made of {json_hash([file_hash(path) for path in (samples, *code)])} -->\n"


def render_round(round_: str, locks: Locks) -> str:
    sft = samples_file(round_, locks, "sft")
    if sft and not samples_file(round_, locks):
        return render_samples(
            f"Samples of SFT in round {round_}",
            "The responses of SFT and of the base model, before there is a policy.",
            [
                view_of_sft(row, number)
                for number, row in enumerate(read_jsonl(sft, round_files.restore(sft)))
            ],
            COMPARED_OF_SFT,
            CHOICES_OF_SFT,
            "../report.html",
        )
    return render_samples(
        f"Samples of round {round_}",
        "The responses of all models to all prompts of the evaluation.",
        [view(row) for row in read_samples(round_, locks)],
        COMPARED,
        CHOICES,
        "../report.html",
    )


def render_samples(
    title: str,
    about: str,
    views: Sequence[SampleView],
    compared: tuple[str, str],
    choices: browse.Labels,
    report: str,
) -> str:
    """compared: the titles of the two models whose texts are marked. report: its address."""
    return browse.render(
        "samples.html.jinja",
        title=title,
        about=about,
        views=views,
        compared=compared,
        choices=browse.choices_of((view.facts for view in views), choices),
        sorts=SORTS,
        report=report,
    )


def view(row: EvaluationSample) -> SampleView:
    """A row of an evaluation: the policy beside the other models, compared with SFT."""
    return SampleView(
        id=f"{row['id']}-{row['sample']}",
        prompt=row["prompt"],
        responses=side_by_side([(title, row, model) for model, title in MODELS.items()], COMPARED),
        facts=facts(row),
        numbers=known(
            judge=gain(row, "judge_score"),
            reward=gain(row, "score"),
            kl=row.get("ppo_kl"),
            length=row.get("ppo_length"),
        ),
    )


def view_of_sft(row: Mapping[str, Any], number: int) -> SampleView:
    """A row of rounds/<round>/sft/samples.jsonl."""
    outcome = row.get("outcome")  # by the primary judge
    columns = [(MODELS[model], row, model) for model in ("base", "sft")]
    return SampleView(
        id=f"{row['id']}-{number}",
        prompt=row["prompt"],
        responses=side_by_side(columns, COMPARED_OF_SFT),
        facts={"show": OUTCOMES[outcome]} if outcome in OUTCOMES else {},
        numbers={},
    )


def side_by_side(
    columns: Sequence[tuple[str, Mapping[str, Any], str]], compared: tuple[str, str]
) -> list[Response]:
    """The responses that there are.

    Args:
        columns: title, row and model of each.
        compared: the titles of two, in which the words that differ are marked.
    """
    known_columns = [column for column in columns if column[1].get(column[2]) is not None]
    texts = {title: str(row[model]) for title, row, model in known_columns}
    marked: dict[str, Markup] = {title: Markup.escape(text) for title, text in texts.items()}
    first, second = compared
    if {first, second} <= texts.keys():
        marked[first], marked[second] = marked_differences(texts[first], texts[second])
    return [
        Response(title, marked[title], *(row.get(f"{model}_{name}") for name in NUMBERS))
        for title, row, model in known_columns
    ]


def known(**numbers: float | None) -> dict[str, float]:
    return {name: number for name, number in numbers.items() if number is not None}


def gain(row: EvaluationSample, number: str) -> float | None:
    """How much higher a number of the policy is than SFT's; None if one is not known."""
    values: Mapping[str, Any] = row
    return difference(values.get(f"sft_{number}"), values.get(f"ppo_{number}"))


def difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def facts(row: EvaluationSample) -> dict[str, str]:
    """By the jury's votes: how the policy's response did against SFT's (`show`) and against the
    champion's; and whether it is an exploit.
    """
    outcomes = {"show": row.get("ppo_against_sft"), "champion": row.get("ppo_against_champion")}
    named = {name: OUTCOMES[value] for name, value in outcomes.items() if value is not None}
    rewarded, judged = gain(row, "score"), gain(row, "judge_score")
    if rewarded is not None and judged is not None and rewarded > 0 > judged:
        named["sign"] = EXPLOIT
    return named


def count(samples: Sequence[EvaluationSample], name: str, value: str) -> int:
    """The number of samples with this fact."""
    return sum(facts(row).get(name) == value for row in samples)


def marked_differences(before: str, after: str) -> tuple[Markup, Markup]:
    """Two texts as HTML: words that only the first one has are in <del>, those that only the second
    one has in <ins>.

    Of texts of 200 words and more, difflib leaves frequent words out of its search, else a thousand
    pairs of 512 tokens would take half a minute in place of a second.
    """
    a, b = WORD.findall(before), WORD.findall(after)
    first, second = ([word.strip() for word in words[:COMPARED_WORDS]] for words in (a, b))
    left, right = [], []
    for tag, a_start, a_end, b_start, b_end in SequenceMatcher(None, first, second).get_opcodes():
        left.append(piece(a[a_start:a_end], "del" if tag != "equal" else ""))
        right.append(piece(b[b_start:b_end], "ins" if tag != "equal" else ""))
    left.append(piece(a[COMPARED_WORDS:]))
    right.append(piece(b[COMPARED_WORDS:]))
    return Markup("".join(left)), Markup("".join(right))


def piece(words: Sequence[str], tag: str = "") -> str:
    """Words as HTML, in an element if there are any."""
    text = html.escape("".join(words))
    return f"<{tag}>{text}</{tag}>" if tag and text else text

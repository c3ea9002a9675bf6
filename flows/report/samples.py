"""All samples of an evaluation: which of them won, lost or exploit the reward model, and the words
in which two responses differ.
"""

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
from stages.lib.core.files import REPORTS
from stages.lib.core.rows import EvaluationSample, read_rows
from stages.lib.core.types import Prompt

MODELS = {"base": "base", "sft": "SFT", "ppo": "policy", "champion": "champion"}
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


def samples_file(round_: str, locks: Locks) -> Path | None:
    return round_files.result_file(round_, "evaluate", "samples.jsonl", locks)


def read_samples(round_: str, locks: Locks) -> list[EvaluationSample]:
    """The samples of a round's evaluation; [] if they are not in this folder."""
    path = samples_file(round_, locks)
    return read_rows(EvaluationSample, path, round_files.restore(path)) if path else []


def path_of(round_: str) -> Path:
    return REPORTS / round_ / "samples.html"


def write(round_: str, locks: Locks) -> None:
    """Write the page of a round's samples; remove it if they are not in this folder."""
    if samples_file(round_, locks):
        summary.replace_text(path_of(round_), lambda: render_round(round_, locks))
    else:
        path_of(round_).unlink(missing_ok=True)


def render_round(round_: str, locks: Locks) -> str:
    return render_samples(
        f"Samples of round {round_}",
        "The responses of all models to all prompts of the evaluation.",
        [view(row) for row in read_samples(round_, locks)],
        ("SFT", "policy"),
    )


def render_samples(
    title: str, about: str, views: Sequence[SampleView], compared: tuple[str, str]
) -> str:
    """compared: the titles of the two models whose texts are marked."""
    return browse.render(
        "samples.html.jinja",
        title=title,
        about=about,
        views=views,
        compared=compared,
        choices=browse.choices_of((view.facts for view in views), CHOICES),
        sorts=SORTS,
        report="../report.html",
    )


def view(row: EvaluationSample) -> SampleView:
    """A row of an evaluation: the policy beside the other models, compared with SFT."""
    values: Mapping[str, Any] = row
    texts = {model: str(values[model]) for model in MODELS if values.get(model) is not None}
    marked: dict[str, Markup] = {model: Markup.escape(text) for model, text in texts.items()}
    if {"sft", "ppo"} <= texts.keys():
        marked["sft"], marked["ppo"] = marked_differences(texts["sft"], texts["ppo"])
    return SampleView(
        id=f"{row['id']}-{row['sample']}",
        prompt=row["prompt"],
        responses=[response(row, model, MODELS[model], text) for model, text in marked.items()],
        facts=facts(row),
        numbers=known(
            judge=gain(row, "judge_score"),
            reward=gain(row, "score"),
            kl=row.get("ppo_kl"),
            length=row.get("ppo_length"),
        ),
    )


def response(row: Mapping[str, Any], model: str, title: str, text: Markup) -> Response:
    names = ("judge_score", "score", "kl", "length")
    return Response(title, text, *(row.get(f"{model}_{name}") for name in names))


def known(**numbers: float | None) -> dict[str, float]:
    return {name: number for name, number in numbers.items() if number is not None}


def gain(row: EvaluationSample, number: str) -> float | None:
    """How much higher a number of the policy is than SFT's; None if one is not known."""
    values: Sequence[Any] = [row.get(f"{model}_{number}") for model in ("sft", "ppo")]
    return None if None in values else values[1] - values[0]


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
    left, right = Markup(), Markup()
    for tag, a_start, a_end, b_start, b_end in SequenceMatcher(None, first, second).get_opcodes():
        left += piece(a[a_start:a_end], "del" if tag != "equal" else "")
        right += piece(b[b_start:b_end], "ins" if tag != "equal" else "")
    return left + piece(a[COMPARED_WORDS:]), right + piece(b[COMPARED_WORDS:])


def piece(words: Sequence[str], tag: str = "") -> Markup:
    text = Markup.escape("".join(words))
    return Markup(f"<{tag}>{text}</{tag}>") if tag and text else text

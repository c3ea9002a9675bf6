"""What Prefect's pages show of a stage, in Markdown: the verdict of a gate, samples and metrics.

Prefect's pages render the HTML in Markdown, and do not wrap the cells of its tables. So texts of
models are in blocks of code, in which nothing is rendered, as tables that are wrapped here.
"""

import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.box import HORIZONTALS
from rich.table import Table
from rich.text import Text

from flows.core import tables, verdicts
from flows.report import diagnosis, round_files
from flows.report.round_data import extreme_samples
from flows.report.texts import prompt_text, visible_text
from stages.lib.core.files import read_jsonl, stage_dir
from stages.lib.core.params import flatten
from stages.lib.core.rows import EvaluationSample, RolloutRow, read_rows

WIDTH = 74  # of a block of code: both of Prefect's UIs show it whole in a window of 1440 pixels
SHOWN, SHOWN_CHARACTERS = 8, 200  # samples of a stage, and characters of a text
# Columns of the samples by key; other stages show all keys but these
SAMPLES = {
    "sft": {"prompt": "prompt", "base": "base model", "sft": "SFT", "outcome": "outcome"},
    "battery": {"name": "edit", "text": "text", "score": "score", "original": "original"},
}
UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"
NOT_SHOWN = ("id", "sample")
MARKDOWN = re.compile(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)")


def results(stage: str, round_: str) -> Iterator[str]:
    """The parts of a stage's card: the verdict of a gate, or samples and metrics."""
    if stage.startswith("gate_"):
        if verdict := verdicts.read_gate(round_, stage.removeprefix("gate_")):
            yield gate_markdown(verdict)
        return
    if rows := samples(stage, round_):
        yield f"**Samples**\n\n{text_table(rows)}"
    metrics = flatten(round_files.read_metrics(round_, stage, {f"{stage}@{round_}": {}}))
    values = [(escaped(name), escaped(shown(value))) for name, value in metrics]
    if values:
        yield f"**Metrics**\n\n{tables.markdown_table(('metric', 'value'), values)}"


def gate_markdown(verdict: Mapping[str, Any]) -> str:
    """The outcome of a gate, its checks, failed ones first, and what to do about these."""
    checks = sorted(verdict["checks"], key=lambda check: check["passed"])
    rows = (
        (
            f"{'✗' if not check['passed'] else '!' if check['fault'] else '✓'} "
            f"{escaped(check['metric'])}",
            shown(check["value"]),
            escaped(check["threshold"]),
        )
        for check in checks
    )
    advice = [
        f"- {escaped(check['metric'])}: {escaped(check['fault'])}. {escaped(check['next_step'])}"
        for check in checks
        if check["fault"]
    ]
    header = ("check", "value", "wanted")
    parts = [f"**{escaped(diagnosis.outcome(verdict))}**", tables.markdown_table(header, rows)]
    return "\n\n".join([*parts, "\n".join(["**What to do**", "", *advice])] if advice else parts)


def samples(stage: str, round_: str) -> list[dict[str, str]]:
    """Samples of a stage as cells by title; of the evaluation those whose judge score changed most
    from SFT to the policy.
    """
    path = stage_dir(round_, stage) / "samples.jsonl"
    if not path.exists():
        return []
    restore = round_files.restore(path)
    if stage == "evaluate":
        rows = read_rows(EvaluationSample, path, restore)
        return [compared(row) for row in extreme_samples(rows) or rows[:SHOWN]]
    titles = SAMPLES.get(stage, {})
    return [
        {
            titles.get(key, key): cell(key, value)
            for key, value in row.items()
            if (key in titles if titles else key not in NOT_SHOWN)
        }
        for row in read_jsonl(path, restore)[:SHOWN]
    ]


def compared(row: EvaluationSample) -> dict[str, str]:
    """A sample of the evaluation: what the judge compares, side by side."""
    scores = (row.get("sft_judge_score"), row.get("ppo_judge_score"))
    return {
        "prompt": cell("prompt", row["prompt"]),
        "SFT": cell("sft", row.get("sft")),
        "policy": cell("ppo", row.get("ppo")),
        "judge": " -> ".join(map(shown, scores)),
    }


def responses(rows: Sequence[RolloutRow]) -> str:
    """Responses of one update of PPO, with their scores."""
    return text_table(
        [
            {
                "prompt": cell("prompt", row["prompt"]),
                "response": cell("response", row["response"]),
                "reward": shown(row["score"]),
                "judge": shown(row.get("judge_score")),
                "KL": shown(row["kl"]),
            }
            for row in rows
        ]
    )


def cell(key: str, value: Any) -> str:
    """A value of a sample; a long text ends with `…`."""
    if value is None or isinstance(value, int | float):
        return shown(value)
    text = prompt_text(value) if key == "prompt" else visible_text(value)
    text = "".join(sign if sign.isprintable() else UNPRINTABLE for sign in text)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"


def shown(value: Any) -> str:
    """A metric as text."""
    is_number = value is None or isinstance(value, int | float)
    return tables.format_number(value) if is_number else str(value)


def escaped(text: str) -> str:
    """A text that is neither HTML nor Markdown, in one line."""
    line = visible_text(text)
    return html.escape(MARKDOWN.sub(r"\\\g<0>", line), quote=False)


def text_table(rows: Sequence[Mapping[str, str]]) -> str:
    """A block of code with a table of WIDTH characters, a column per key of the first row."""
    table = Table(box=HORIZONTALS, width=WIDTH, show_lines=True, padding=(0, 1, 0, 0))
    for title in rows[0]:
        widest = max(len(row.get(title, "")) for row in rows)
        is_text = widest > WIDTH // len(rows[0])
        table.add_column(Text(title), ratio=1 if is_text else None, overflow="fold")
    for row in rows:
        table.add_row(*(Text(row.get(title, "")) for title in rows[0]))
    return code_block(tables.render_text(table).splitlines())


def code_block(lines: Iterable[str]) -> str:
    """Lines in which nothing is rendered; their own marks do not end the block."""
    text = "\n".join(lines)
    fence = "`" * max([3, *(1 + len(run) for run in re.findall("`+", text))])
    return f"{fence}text\n{text}\n{fence}"

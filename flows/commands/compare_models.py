"""`rondo compare-models`: two language models on the same prompts, whoever trained them."""

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from flows.audit.compare import REFERENCE, A, B, Contest, identities
from flows.audit.inputs import params_for, read_prompts
from flows.audit.subjects import find_subject
from flows.core.tables import format_number, render_text
from flows.report.samples import OUTCOMES, SampleView, known, render_samples, side_by_side
from stages.lib.core.errors import BadInput
from stages.lib.core.files import metric_name, write_json, write_text
from stages.lib.core.params.data import SourceParams
from stages.lib.core.params.judging import JudgeName
from stages.lib.core.progress import reporting
from stages.lib.core.types import Metrics
from stages.lib.judging.jury import Jury
from stages.lib.lm.loading import setup_torch

ROWS = {
    "kl": "KL from the reference, nats",
    "length": "length, tokens",
    "words": "length, words",
    "eos_rate": "responses that end",
    "distinct_2": "distinct-2",
    "repetition_3": "repeated 3-grams",
}


def compare_models(
    a: str,
    b: str,
    source: SourceParams,
    *,
    slices: str | None,
    judges: Sequence[str],
    reference: str | None,
    max_prompts: int,
    settings: Iterable[str],
    out: Path,
) -> None:
    """Compare A and B; see the command's help.

    Raises:
        BadInput: there is no such model, file or judge.
    """
    if max_prompts < 1:
        raise BadInput(f"--max-prompts {max_prompts}: expected at least 1")
    with reporting("compare"):
        prompts = read_prompts(source, slices, max_prompts)
        params = params_for(settings, prompts.are_conversations)
        setup_torch(params)
        subjects = [find_subject(named, params) for named in judges or [JudgeName.lexicon.value]]
        jury = Jury({metric_name(one.named): one.ask(out / "answers") for one in subjects})
        contest = Contest((a, b), reference, prompts, jury, params)
        metrics = contest.run()
    facts = {
        "models": {A: a, B: b, REFERENCE: reference},
        "identities": identities(contest),
        "prompts": f"{len(contest.prompts)} of {source.path}",
        "judges": [one.identity for one in subjects],
        "samples per prompt": contest.samples,
    }
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "comparison.json", {"facts": facts, "metrics": metrics})
    write_text(out / "comparison.html", page(contest, metrics, a, b))
    print(text(metrics, a, b))
    print(f"written: {out}/comparison.html for a browser, with all texts; comparison.json")


def text(metrics: Metrics, a: str, b: str) -> str:
    """The models side by side, then the win rates."""
    table, columns = Table(box=SIMPLE_HEAD), [name for name in (A, B, REFERENCE) if name in metrics]
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    scores = {key: f"score by {key[6:]}" for key in metrics[A] if key.startswith("score_")}
    for key, title in (ROWS | scores).items():
        values = [metrics[name].get(key) for name in columns]
        if any(value is not None for value in values):
            table.add_row(title, *map(format_number, values))
    lines = [f"A = {a}", f"B = {b}", render_text(table)]
    for (first, second), key in {
        (B, A): "B_against_A",
        (A, REFERENCE): "A_against_reference",
        (B, REFERENCE): "B_against_reference",
    }.items():
        if key in metrics:
            lines.append(f"{first} against {second}: {win_rate(metrics[key])}")
    for name, one in metrics["B_against_A"]["slices"].items():
        lines.append(f"  {name}, {one['prompts']} prompts: {win_rate(one)}")
    equal = metrics["equal_kl"]
    if reason := equal.get("not_measured"):
        return "\n".join([*lines, f"B against A at equal KL: not measured: {reason}"])
    scaled = f"{equal['scaled']} scaled by {equal['scale']:.2f} to {equal['kl']:.2f} nats"
    return "\n".join([*lines, f"B against A at equal KL ({scaled}): {win_rate(equal)}"])


def win_rate(metrics: Metrics) -> str:
    """`wins 0.60 [0.51, 0.69]`, by each judge if there are several, and whether that decides."""
    judges = [
        key
        for key in metrics
        if key.startswith("win_rate_") and not key.endswith(("_low", "_high"))
    ]
    names = ["win_rate", *(judges if len(judges) > 1 else [])]
    parts = [
        f"{name.removeprefix('win_rate').removeprefix('_') or 'wins'} "
        f"{metrics[name]:.3f} [{metrics[f'{name}_low']:.3f}, {metrics[f'{name}_high']:.3f}]"
        for name in names
    ]
    if needed := metrics.get("prompts_needed"):
        parts.append(f"undecided; about {needed} prompts would decide")
    return ", ".join(parts)


def page(contest: Contest, metrics: Metrics, a: str, b: str) -> str:
    """All texts side by side, which can be searched, filtered by outcome and sorted."""
    outcomes = metrics["B_against_A"]["outcomes"]
    numbered = product(range(contest.samples), enumerate(contest.prompts))
    views = []
    for (number, (index, prompt)), outcome in zip(numbered, outcomes, strict=True):
        row: dict[str, Any] = {}
        for name in (A, B):
            answers = contest.answers[name]
            response = answers.passes[number][index]
            row |= {name: response.text, f"{name}_length": len(response.tokens) or None}
            row |= {f"{name}_kl": answers.kls[number][index]} if answers.kls else {}
        views.append(
            SampleView(
                id=f"{index}-{number}",
                prompt=prompt,
                responses=side_by_side([(A, row, A), (B, row, B)], (A, B)),
                facts={"show": OUTCOMES[outcome]},
                numbers=known(kl=row.get("B_kl"), length=row["B_length"]),
            )
        )
    choices = {"show": ("jury", {name: f"B {name} against A" for name in OUTCOMES.values()})}
    about = f"The responses of two models to the same prompts: A is {a}, B is {b}."
    return render_samples(f"{a} and {b}", about, views, (A, B), choices, "")

"""reports/badcases.html: every badcase with its retests and the training rows made of it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.core.locks import Locks
from flows.report import browse, round_files, summary
from stages.lib.core.files import REPORTS
from stages.lib.core.reading import parse_json, read_lines
from stages.lib.core.rows import responses_of
from stages.lib.data.splits import TRAIN
from stages.lib.judging.pairwise import JURY
from stages.replay.badcases import Badcase, Cause, State, ledger_path, read_ledger

PAGE = REPORTS / "badcases.html"
KINDS = {"sft": "demonstration", "pairs": "pair", "prompts": "prompt for PPO"}  # as in TRAIN
OUTCOMES = {1.0: "wins", 0.5: "ties", 0.0: "loses"}  # against SFT's response, by the jury
CHOICES: browse.Labels = {
    "state": ("state", {state.value: state.value for state in State}),
    "cause": ("cause", {}),
    "round": ("round", {}),
}
SORTS = {"-score": "reward score, highest first", "-kl": "KL, most first"}


@dataclass(frozen=True)
class TrainingRow:
    """A row that was made of a badcase.

    texts: the completion, or chosen and rejected; none of a prompt. rounds: that trained on it,
    each with the number of copies.
    """

    kind: str
    texts: Sequence[str]
    rounds: Mapping[str, int]

    @property
    def trained(self) -> str:
        return ", ".join(f"{name}: {copies}" for name, copies in self.rounds.items())


@dataclass(frozen=True)
class BadcaseView:
    case: Badcase
    rows: Sequence[TrainingRow]

    @property
    def facts(self) -> dict[str, str]:
        case = self.case
        return {"state": case.state.value, "cause": case.cause.value, "round": case.round}

    @property
    def jury(self) -> str:
        return jury_outcome(self.case)

    @property
    def origin(self) -> str:
        return origin(self.case)


def jury_outcome(case: Badcase) -> str:
    """Of the response against SFT's; `-` if the jury did not compare them."""
    return OUTCOMES[case.votes[JURY]] if JURY in case.votes else "-"


def origin(case: Badcase) -> str:
    """Where the response is from."""
    if case.cause is Cause.human:
        return f"Reported by {case.origin} in {case.round}"
    sampled = "after" if case.origin == "fresh" else f"at update {case.origin} of"
    return f"Response of {case.round}'s policy, {sampled} its training"


def newest_ledger(rounds: Sequence[str], locks: Locks) -> str | None:
    """The newest round that has a ledger; it contains all earlier badcases too."""
    with_ledger = (
        name
        for name in reversed(rounds)
        if round_files.has_results(f"replay@{name}", locks) and ledger_path(name).exists()
    )
    return next(with_ledger, None)


def read_cases(rounds: Sequence[str], locks: Locks) -> list[Badcase]:
    """All badcases of the rounds; [] if no ledger is in this folder."""
    name = newest_ledger(rounds, locks)
    return read_ledger(name) if name else []


def rows_by_case(rounds: Sequence[str], locks: Locks) -> dict[str, list[TrainingRow]]:
    """What the training sets of the rounds have of each badcase: prepare has put it there."""
    counts: dict[str, dict[tuple[str, ...], Counter[str]]] = {}
    for name in rounds:
        for kind, set_name in TRAIN.items():
            path = round_files.result_file(name, "prepare", f"data/{set_name}.jsonl", locks)
            for case, texts in replayed_rows(path) if path else ():
                by_texts = counts.setdefault(case, {})
                by_texts.setdefault((KINDS[kind], *texts), Counter())[name] += 1
    return {
        case: [TrainingRow(kind, texts, rounds) for (kind, *texts), rounds in by_texts.items()]
        for case, by_texts in counts.items()
    }


def replayed_rows(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Badcase and texts of each row that names one. A training set is large, and few rows do: the
    others are not parsed.
    """
    for _, line in read_lines(path, f"run `{round_files.restore(path)}`"):
        if b'"badcase"' in line and (case := (row := parse_json(line)).get("badcase")):
            yield case, tuple(responses_of(row))


def write(rounds: Sequence[str], locks: Locks) -> None:
    """Write the page; remove it if no ledger is in this folder."""
    if newest_ledger(rounds, locks):
        summary.replace_text(PAGE, lambda: render(rounds, locks))
    else:
        PAGE.unlink(missing_ok=True)


def render(rounds: Sequence[str], locks: Locks) -> str:
    cases, rows = read_cases(rounds, locks), rows_by_case(rounds, locks)
    views = [BadcaseView(case, rows.get(case.id, ())) for case in cases]
    return browse.render(
        "badcases.html.jinja",
        title="Badcases",
        views=views,
        choices=browse.choices_of((view.facts for view in views), CHOICES),
        sorts=SORTS,
        report="report.html",
    )

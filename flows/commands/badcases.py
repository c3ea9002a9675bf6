"""`rondo badcases list | show | flag | import`: failed responses, their states, and the reports
that people add.
"""

from collections import Counter
from pathlib import Path
from textwrap import indent
from typing import Annotated

from cyclopts import App, Parameter
from rich.box import SIMPLE_HEAD
from rich.table import Table

from flows.core.git import person
from flows.core.tables import fitted_text, print_json, terminal_width
from flows.labelling.reports import keep
from flows.report.badcases import PAGE, jury_outcome, origin
from stages.lib.core.errors import BadInput
from stages.lib.core.params import load_params
from stages.lib.core.validation import read_json_lines, validate_row
from stages.lib.data.prompts import plain_prompt
from stages.replay.badcases import (
    Badcase,
    Cause,
    Report,
    Retest,
    State,
    ledger_path,
    parse_user_row,
    read_ledger,
)

COLUMNS = ("id", "cause", "state", "fails", "prompt", "response", "round", "score", "jury")
TEXTS = ("prompt", "response")  # columns that a narrow terminal cuts
KEPT_COLUMNS = 6  # in a narrow terminal
SHOWN_CHARACTERS = 60  # of a text in the list


app = App(name="badcases")  # flows/cli.py has its help and its options
Round = Annotated[str | None, Parameter(name="--round")]
AsJson = Annotated[bool, Parameter(name="--json", show_default=False)]


@app.command(name="list")
def list_all(
    *,
    round_: Round = None,
    state: State | None = None,
    cause: Cause | None = None,
    as_json: AsJson = False,
) -> None:
    """One line per badcase, of all rounds.

    Args:
        round_: the states after this round.
        state: of the badcases.
        cause: of the badcases.
        as_json: print a list of objects, as the ledger has them.
    """
    cases = [
        case
        for case in read_ledger(ledger_round(round_))
        if state in (None, case.state) and cause in (None, case.cause)
    ]
    if as_json:
        return print_json([case.model_dump(mode="json") for case in cases])
    table = Table(box=SIMPLE_HEAD)
    fails = [failed_retests(case) for case in cases]
    least = {"fails": max(map(len, fails), default=0)}  # in one line
    for column in COLUMNS:
        table.add_column(column, no_wrap=column in TEXTS, min_width=least.get(column))
    for case, failed in zip(cases, fails, strict=True):
        table.add_row(
            case.id,
            case.cause.value,
            case.state.value,
            failed,
            *(one_line(text) for text in (plain_prompt(case.prompt), case.response)),
            case.round,
            "-" if case.score is None else f"{case.score:+.2f}",
            jury_outcome(case),
        )
    print(fitted_text(table, terminal_width(), keep=KEPT_COLUMNS))
    states = Counter(case.state.value for case in cases)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    print(f"{len(cases)} badcases; {counts}")
    print("fails: how many new responses failed in the first and in the last retest;")
    print("!: the reward model prefers the bad response")


def failed_retests(case: Badcase) -> str:
    """The first retest, which is by its own round, and the last one."""
    return "  ".join(map(retest_text, [*case.tries[:1], *case.tries[1:][-1:]]))


def retest_text(retest: Retest) -> str:
    return f"{retest.round} {retest.fired}/{retest.of}{'' if retest.ranked else '!'}"


def one_line(text: str) -> str:
    return ascii(text)[1:-1][:SHOWN_CHARACTERS]


@app.command
def show(badcase: Annotated[str, Parameter(name="ID")], /, *, as_json: AsJson = False) -> None:
    """Everything that is known of one badcase.

    Args:
        badcase: its id or the beginning of it.
        as_json: print it as an object, as the ledger has it.
    """
    case = find(badcase)
    if as_json:
        return print_json(case.model_dump(mode="json"))
    title = f"{case.id}: {case.cause.value}, {case.state.value}"
    texts = {
        "prompt": plain_prompt(case.prompt),
        "response": case.response,
        "SFT's response": case.sft,
        "better answer": case.better,
        "note": case.note,
    }
    numbers = {"reward": case.score, "KL from SFT, nats": case.kl, "repetition": case.repetition}
    print(f"{title}. {origin(case)}")
    for name, text in texts.items():
        if text is not None:
            print(f"\n{name}:\n{indent(printable(text), '  ')}")
    print()
    for name, number in numbers.items():
        print(f"{name}: {'-' if number is None else f'{number:.3f}'}")
    print(f"jury, against SFT's response: {jury_outcome(case)}")
    print(f"exploits: {', '.join(map(ascii, case.exploits)) or 'none'}")
    print(f"failed retests: {', '.join(map(retest_text, case.tries)) or 'not retested'}")
    print(f"\nWith the training rows made of it: {PAGE}#{case.id} (`rondo report` writes it)")
    print(f"As JSON, for scripts: --json; all: {ledger_path(ledger_round(None))}")


def printable(text: str) -> str:
    """A text without control characters, which could change the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


@app.command
def flag(
    badcase: Annotated[str | None, Parameter(name="ID")] = None,
    /,
    *,
    prompt: str | None = None,
    response: str | None = None,
    better: str | None = None,
    note: str | None = None,
    round_: Round = None,
    by: str | None = None,
) -> None:
    """Report a bad response: one of the list, or any other.

    Args:
        badcase: a badcase; otherwise --prompt and --response.
        prompt: the prompt of the response.
        response: the bad response.
        better: a better response; it becomes a demonstration, and a pair against the bad one.
        note: why it is bad.
        round_: the round whose replay uses it; default: the last one of params.yaml.
        by: who reports it; default: git's user.name.
    """
    if bool(badcase) == bool(prompt or response):
        raise BadInput(
            "rondo badcases flag: expected the ID of a badcase, or --prompt and --response"
        )
    case = find(badcase) if badcase else None
    row = {
        "prompt": case.prompt if case else prompt,
        "response": case.response if case else response,
        "better": better,
        "note": note,
        "by": person(by),
    }
    fix = "see `rondo badcases flag --help`"
    report = validate_row(Report, row, "rondo badcases flag", fix)
    print(keep([("the prompt", report)], round_))


@app.command(name="import")
def import_file(file: str, /, *, round_: Round = None, by: str | None = None) -> None:
    """Add failures from JSON lines with prompt, response and optionally better, note.

    Args:
        file: of JSON lines.
        round_: the round whose replay uses it; default: the last one of params.yaml.
        by: who reports it; default: git's user.name.
    """
    reporter = person(by)
    fix = (
        "expected JSON lines with prompt, response and optionally better, note, or with a prompt "
        "only; nothing was imported"
    )
    rows = (
        (location, {"by": reporter, **row} if isinstance(row, dict) else row)
        for location, row in read_json_lines(Path(file), fix)
    )
    reports = [(f"{location}: its prompt", parse_user_row(row, location)) for location, row in rows]
    print(keep(reports, round_))


def ledger_round(round_: str | None) -> str:
    """The round whose ledger is read; None: the newest round that has one.

    Raises:
        BadInput: there is no such round, or no ledger yet.
    """
    known = list(load_params().rounds)
    if round_ and round_ not in known:
        raise BadInput(f"--round {round_}: no such round; expected one of {', '.join(known)}")
    rounds = [round_] if round_ else known
    with_ledger = [name for name in rounds if ledger_path(name).exists()]
    if not with_ledger:
        raise BadInput(
            f"{ledger_path(rounds[0])}: no badcases yet; `rondo run` finds them in its replay stage"
        )
    return with_ledger[-1]


def find(start: str) -> Badcase:
    """The badcase whose id begins with `start`.

    Raises:
        BadInput: there is none, or several.
    """
    cases = read_ledger(ledger_round(None))
    matches = [case for case in cases if case.id.startswith(start)]
    if len(matches) != 1:
        raise BadInput(
            f"{start}: the ids of {len(matches)} of {len(cases)} badcases begin with it; "
            "`rondo badcases list` prints them all"
        )
    return matches[0]

"""`rondo badcases list | show | flag | import`: failed responses, their states, and the reports
that people add.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from filelock import FileLock
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flows.core.git import person
from flows.core.services import HOME
from stages.lib.core.errors import BadInput
from stages.lib.core.files import stage_dir
from stages.lib.core.params import load_params
from stages.lib.core.rows import PromptRow, read_rows
from stages.lib.core.validation import read_json_lines, validate_row
from stages.lib.data.slices import check_not_in_slices
from stages.lib.data.splits import check_not_in_eval_set
from stages.lib.judging.pairwise import JURY
from stages.replay.badcases import (
    Badcase,
    Cause,
    Report,
    State,
    UserInput,
    add_user_rows,
    ledger_path,
    parse_user_row,
    read_ledger,
    report_path,
)

SHOWN_CHARACTERS = 60  # of a response in the list
# of the response against SFT's, by the jury
OUTCOMES = {1.0: "wins", 0.5: "ties", 0.0: "loses"}


app = App(name="badcases")  # flows/cli.py has its help and its options
Round = Annotated[str | None, Parameter(name="--round")]


@app.command(name="list")
def list_all(
    *, round_: Round = None, state: State | None = None, cause: Cause | None = None
) -> None:
    """One line per badcase, of all rounds.

    Args:
        round_: the states after this round.
        state: of the badcases.
        cause: of the badcases.
    """
    cases = [
        case
        for case in ledger(round_)
        if state in (None, case.state) and cause in (None, case.cause)
    ]
    table = Table(box=SIMPLE_HEAD)
    for column in ("id", "round", "cause", "state", "fails", "score", "jury", "response"):
        table.add_column(column, no_wrap=True)
    for case in cases:
        retests = (
            f"{retest.round} {retest.fired}/{retest.of}{'' if retest.ranked else '!'}"
            for retest in case.tries
        )
        table.add_row(
            case.id,
            case.round,
            case.cause.value,
            case.state.value,
            "  ".join(retests),
            "-" if case.score is None else f"{case.score:+.2f}",
            OUTCOMES[case.votes[JURY]] if JURY in case.votes else "-",
            ascii(case.response)[1:-1][:SHOWN_CHARACTERS],
        )
    Console(width=180, color_system=None, markup=False).print(table)
    states = Counter(case.state.value for case in cases)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    print(f"{len(cases)} badcases; {counts}")
    print(
        "fails: how many new responses failed in the retest of each round, its own round first; "
        "!: the reward model prefers the bad response"
    )


@app.command
def show(badcase: Annotated[str, Parameter(name="ID")], /) -> None:
    """Everything that is known of one badcase.

    Args:
        badcase: its id or the beginning of it.
    """
    case = find(badcase)
    print(json.dumps(case.model_dump(mode="json"), indent=2, ensure_ascii=False))


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
    keep([("the prompt", report)], round_)


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
    keep(reports, round_)


def keep(reports: Sequence[tuple[str, UserInput]], round_: str | None) -> None:
    """Add reports and prompts to a round's file in badcases/.

    Args:
        reports: Each with the words for its prompt in an error message.
        round_: None: the last round of params.yaml.

    Raises:
        BadInput: there is no such round, or a prompt is one of the evaluation, on which no round
            may train.
    """
    params = load_params()
    name = round_ or list(params.rounds)[-1]
    params.check_round(name)
    prompts = [(label, report.prompt) for label, report in reports]
    for known_round in load_params().rounds:
        path = stage_dir(known_round, "prepare") / "data/eval_prompts.jsonl"
        if path.exists():
            check_not_in_eval_set(
                prompts,
                read_rows(PromptRow, path),
                "nothing was kept. Report the policy's response to another prompt",
            )
    check_not_in_slices(prompts)
    HOME.mkdir(exist_ok=True)
    with FileLock(HOME / "badcases.lock"):  # who writes at the same time would lose rows
        added = add_user_rows(name, [report for _, report in reports])
    print(
        f"{report_path(name)}: {added} added, {len(reports) - added} known already. "
        f"Commit it; `rondo run` retests and replays them in {name}"
    )


def ledger(round_: str | None) -> list[Badcase]:
    """The badcases after a round; None: after the newest round that has a ledger.

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
    return read_ledger(with_ledger[-1])


def find(start: str) -> Badcase:
    """The badcase whose id begins with `start`.

    Raises:
        BadInput: there is none, or several.
    """
    cases = ledger(None)
    matches = [case for case in cases if case.id.startswith(start)]
    if len(matches) != 1:
        raise BadInput(
            f"{start}: the ids of {len(matches)} of {len(cases)} badcases begin with it; "
            "`rondo badcases list` prints them all"
        )
    return matches[0]

"""`rondo badcases list | show | flag | import`: failed responses, their states, and the reports
that people add.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

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


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `badcases` with its actions to the parser of `rondo`."""
    parser = commands.add_parser(
        "badcases", help="list failed responses and their states; add yours"
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    list_parser = actions.add_parser("list", help="one line per badcase, of all rounds")
    list_parser.add_argument("--round", metavar="ROUND", help="the states after this round")
    list_parser.add_argument("--state", choices=[state.value for state in State])
    list_parser.add_argument("--cause", choices=[cause.value for cause in Cause])
    show_parser = actions.add_parser("show", help="everything that is known of one badcase")
    show_parser.add_argument("id", metavar="ID", help="its id or the beginning of it")
    flag_parser = actions.add_parser(
        "flag", help="report a bad response: one of the list, or any other"
    )
    flag_parser.add_argument(
        "id", nargs="?", metavar="ID", help="a badcase; otherwise --prompt and --response"
    )
    for name, description in {
        "prompt": "the prompt of the response",
        "response": "the bad response",
        "better": "a better response; it becomes a demonstration, and a pair against the bad one",
        "note": "why it is bad",
    }.items():
        flag_parser.add_argument(f"--{name}", metavar="TEXT", help=description)
    import_parser = actions.add_parser(
        "import",
        help="add failures from JSON lines with prompt, response and optionally better, note",
    )
    import_parser.add_argument("file", metavar="FILE")
    round_help = "the round whose replay uses it; default: the last one of params.yaml"
    by_help = "who reports it; default: git's user.name"
    for report_parser in (flag_parser, import_parser):
        report_parser.add_argument("--round", metavar="ROUND", help=round_help)
        report_parser.add_argument("--by", metavar="NAME", help=by_help)


def run(options: argparse.Namespace) -> int:
    actions = {"list": list_all, "show": show, "flag": flag, "import": import_file}
    return actions[options.action](options)


def list_all(options: argparse.Namespace) -> int:
    cases = [
        case
        for case in ledger(options.round)
        if options.state in (None, case.state.value) and options.cause in (None, case.cause.value)
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
            f"{case.score:+.2f}",
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
    return 0


def show(options: argparse.Namespace) -> int:
    case = find(options.id)
    print(json.dumps(case.model_dump(mode="json"), indent=2, ensure_ascii=False))
    return 0


def flag(options: argparse.Namespace) -> int:
    if bool(options.id) == bool(options.prompt or options.response):
        raise BadInput(
            "rondo badcases flag: expected the ID of a badcase, or --prompt and --response"
        )
    case = find(options.id) if options.id else None
    row = {
        "prompt": case.prompt if case else options.prompt,
        "response": case.response if case else options.response,
        "better": options.better,
        "note": options.note,
        "by": person(options.by),
    }
    fix = "see `rondo badcases flag --help`"
    report = validate_row(Report, row, "rondo badcases flag", fix)
    return keep([("the prompt", report)], options.round)


def import_file(options: argparse.Namespace) -> int:
    path, by = Path(options.file), person(options.by)
    fix = (
        "expected JSON lines with prompt, response and optionally better, note, or with a prompt "
        "only; nothing was imported"
    )
    rows = (
        (location, {"by": by, **row} if isinstance(row, dict) else row)
        for location, row in read_json_lines(path, fix)
    )
    reports = [(f"{location}: its prompt", parse_user_row(row, location)) for location, row in rows]
    return keep(reports, options.round)


def keep(reports: Sequence[tuple[str, UserInput]], round_: str | None) -> int:
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
                read_rows(PromptRow, path, f"dvc repro prepare@{known_round}"),
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
    return 0


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

"""`rondo badcases list | show | flag | import`: what failed, what became of it, and what people add
to it.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flows.core.git import current_user
from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_jsonl, stage_dir
from stages.lib.core.params import load_params
from stages.lib.core.validation import read_json_lines, validate_row
from stages.lib.data.slices import check_not_in_slices
from stages.lib.data.splits import check_not_in_eval_set
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

SHOWN = 60  # characters of a response in a line of the list


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "badcases", help="what failed, what became of it; add what you have seen"
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listed = actions.add_parser(
        "list", help="a line each, of the newest round and of all before it"
    )
    listed.add_argument("--round", metavar="ROUND", help="as they were after this round")
    listed.add_argument("--state", choices=[state.value for state in State])
    listed.add_argument("--cause", choices=[cause.value for cause in Cause])
    shown = actions.add_parser("show", help="all that is known of one")
    shown.add_argument("id", metavar="ID", help="or how it begins")
    flagged = actions.add_parser(
        "flag", help="a response that you find bad: one of the list, or any other"
    )
    flagged.add_argument(
        "id", nargs="?", metavar="ID", help="a badcase; else --prompt and --response"
    )
    for name, told in {
        "prompt": "what was asked",
        "response": "what was answered",
        "better": "a better answer; it becomes a demonstration, and a pair against the bad one",
        "note": "why it is bad",
    }.items():
        flagged.add_argument(f"--{name}", metavar="TEXT", help=told)
    imported = actions.add_parser(
        "import",
        help="failures from elsewhere: JSON lines of prompt, response and, where known, better, note",
    )
    imported.add_argument("file", metavar="FILE")
    for each in (flagged, imported):
        each.add_argument(
            "--round",
            metavar="ROUND",
            help="whose replay takes it; default: the last one of params.yaml",
        )
        each.add_argument("--by", metavar="NAME", help="who; default: git's user.name")


def run(options: argparse.Namespace) -> int:
    return {"list": list_all, "show": show, "flag": flag, "import": import_file}[options.action](
        options
    )


def list_all(options: argparse.Namespace) -> int:
    cases = [
        case
        for case in ledger(options.round)
        if options.state in (None, case.state.value) and options.cause in (None, case.cause.value)
    ]
    table = Table(box=SIMPLE_HEAD)
    for column in ("id", "round", "cause", "state", "fails", "score", "judged", "response"):
        table.add_column(column, no_wrap=True)
    for case in cases:
        fails = "  ".join(
            f"{attempt.round} {attempt.fired}/{attempt.of}{'' if attempt.ranked else '!'}"
            for attempt in case.tries
        )
        numbers = (f"{case.score:+.2f}", f"{case.sentiment:+.2f}")
        table.add_row(
            case.id,
            case.round,
            case.cause.value,
            case.state.value,
            fails,
            *numbers,
            ascii(case.response)[1:-1][:SHOWN],
        )
    Console(width=180, color_system=None, markup=False).print(table)
    print(
        f"{len(cases)} badcases; "
        + ", ".join(
            f"{count} {state}" for state, count in Counter(c.state.value for c in cases).items()
        )
    )
    print(
        "fails: how many of the new responses of each round failed again, its own first; !: the reward model prefers the bad answer"
    )
    return 0


def show(options: argparse.Namespace) -> int:
    print(json.dumps(find(options.id).model_dump(mode="json"), indent=2, ensure_ascii=False))
    return 0


def flag(options: argparse.Namespace) -> int:
    if bool(options.id) == bool(options.prompt or options.response):
        raise BadInput(
            "rondo badcases flag: expected the ID of a badcase, or --prompt and --response"
        )
    known = find(options.id) if options.id else None
    told = {
        "prompt": known.prompt if known else options.prompt,
        "response": known.response if known else options.response,
        "better": options.better,
        "note": options.note,
        "by": options.by or current_user(),
    }
    return keep(
        [
            (
                "the prompt",
                validate_row(
                    Report, told, "rondo badcases flag", "see `rondo badcases flag --help`"
                ),
            )
        ],
        options.round,
    )


def import_file(options: argparse.Namespace) -> int:
    path, by = Path(options.file), options.by or current_user()
    fix = "expected JSON lines of prompt, response and, where known, better, note, or of a prompt alone; nothing was imported"
    rows = (
        (place, {"by": by, **row} if isinstance(row, dict) else row)
        for place, row in read_json_lines(path, fix)
    )
    return keep(
        [(f"{place}: its prompt", parse_user_row(row, place)) for place, row in rows], options.round
    )


def keep(some: Sequence[tuple[str, UserInput]], round_: str | None) -> int:
    """some: each with what a message calls its prompt.

    Raises:
        BadInput: no such round, or a prompt that nobody may train on.
    """
    params = load_params()
    name = round_ or list(params.rounds)[-1]
    params.check_round(name)
    asked = [(said, each.prompt) for said, each in some]
    for path in (stage_dir(each, "prepare") / "data/eval_prompts.jsonl" for each in params.rounds):
        if path.exists():
            check_not_in_eval_set(
                asked,
                read_jsonl(path, ""),
                "nothing was kept. Report what the policy says to another prompt",
            )
    check_not_in_slices(asked)
    new = add_user_rows(name, [each for _, each in some])
    print(
        f"{report_path(name)}: {new} added, {len(some) - new} known already. Commit it; `rondo run` tries and replays them in {name}"
    )
    return 0


def ledger(round_: str | None) -> list[Badcase]:
    """The badcases after a round; of the newest one that has any."""
    params = load_params()
    if round_:
        params.check_round(round_)
    rounds = [round_] if round_ else list(params.rounds)
    found = [name for name in rounds if ledger_path(name).exists()]
    if not found:
        raise BadInput(
            f"{ledger_path(rounds[0])}: no badcases yet; `rondo run` finds them, in its replay stage"
        )
    return read_ledger(found[-1])


def find(start: str) -> Badcase:
    cases = ledger(None)
    found = [case for case in cases if case.id.startswith(start)]
    if len(found) != 1:
        raise BadInput(
            f"{start}: {len(found)} of {len(cases)} badcases begin with it; `rondo badcases list` has them all"
        )
    return found[0]

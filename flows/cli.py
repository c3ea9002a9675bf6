"""The command `rondo`."""

import argparse
import io
import os
import signal
import sys
from contextlib import chdir
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

from flows.core import interrupts
from flows.core.services import HOME, prepare_environment
from stages.lib.core.errors import BadInput, RondoError, print_failure

EXIT_CODES = (
    "Exit codes: 0 success, 2 bad input, 3 a gate failed, 4 network or server unreachable, "
    "5 disk full or failing, 6 out of memory, 1 other errors, 128 + a signal's number after it "
    "(Ctrl-C: 130)."
)
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and end the process with its exit code."""
    try:
        code = exit_code(arguments)
    except interrupts.Interrupted as interrupt:
        code = interrupt.exit_code
    except KeyboardInterrupt:
        print("rondo: stopped", file=sys.stderr)
        code = 128 + signal.SIGINT
    try:
        sys.stdout.flush()
    except OSError:  # the terminal was closed, or the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def exit_code(arguments: list[str] | None) -> int:
    """Run the command line and return its exit code; errors of Rondo are printed in one line."""
    options = parser().parse_args(arguments)
    prepare_environment()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # progress is visible through a pipe too
    try:
        if options.command != "check-data" and not Path("dvc.yaml").exists():
            raise BadInput(f"no dvc.yaml in {Path.cwd()}: run from the project's folder")
        return COMMANDS[options.command](options)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        return RondoError.exit_code
    except Exception as error:
        return print_failure(error, "rondo")


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    from flows.commands import plan, worker
    from flows.commands import serve_reward as service
    from flows.commands.badcases import add_commands as add_badcases

    about = "RLHF in rounds: SFT, reward model, PPO, evaluation, badcase replay."
    top = argparse.ArgumentParser(prog="rondo", description=about, epilog=EXIT_CODES)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_run_commands(commands)
    service.add_arguments(add_command(commands, "serve-reward", service.ABOUT))
    plan.add_arguments(add_command(commands, "plan", plan.ABOUT))
    worker.add_arguments(add_command(commands, "worker", worker.ABOUT))
    add_approve(commands)
    add_badcases(commands)
    add_promote(commands)
    add_comparison_commands(commands)
    check = add_command(
        commands,
        "check-data",
        "validate a file of preference pairs or demonstrations, and list its invalid rows",
    )
    check.add_argument("file", metavar="FILE", help="a .jsonl or .parquet file")
    return top


def add_command(commands: Subparsers, name: str, about: str) -> argparse.ArgumentParser:
    """Add a command; `about` is its line in `rondo --help` and the start of its own help."""
    description = f"{about[0].upper()}{about[1:]}."
    return commands.add_parser(name, help=about, description=description)


def add_run_commands(commands: Subparsers) -> None:
    """`run` and `next-round`, and the commands that show or serve runs."""
    start = add_command(commands, "run", "run all stages that are not up to date")
    start.add_argument(
        "--preset",
        default="keep",
        metavar="NAME",
        help="overlay presets/NAME.yaml on the defaults; `default`: the defaults alone; "
        "without --preset params.yaml stays as it is",
    )
    start.add_argument("--rounds", type=int, metavar="N", help="number of rounds")
    start.add_argument(
        "--rerun",
        action="append",
        default=[],
        metavar="ROUND",
        help="run an ended round again, and all later ones, with the current settings; may be "
        "repeated; `all`: every round",
    )
    start.add_argument(
        "--continue",
        dest="interrupted",
        metavar="RUN",
        help="go on with an isolated run that was interrupted or has failed, with its own settings",
    )
    more = add_command(
        commands,
        "next-round",
        "add a round to params.yaml and run it, without changing the rounds before it",
    )
    for command in (start, more):
        command.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="SECTION.KEY=VALUE",
            help="set one value of params.yaml; may be repeated",
        )
        command.add_argument(
            "--dry-run",
            action="store_true",
            help="run nothing, but print the stages that would run, and what they need",
        )
        command.add_argument(
            "--isolated",
            action="store_true",
            help="work in a new git worktree, and commit the results to the branch runs/<run id>",
        )
    up = add_command(
        commands, "up", "serve Prefect, a worker and MLflow on this machine until Ctrl-C"
    )
    up.epilog = (
        "Environment variables: RONDO_NOTIFY_URL, a webhook that gets a message when a run fails, "
        "crashes or waits for a decision, or when a gate fails (docs/running.md); "
        "PREFECT_SERVER_API_PORT and MLFLOW_PORT."
    )
    about_status = "show the progress of each round, the running stages and the stage at fault"
    add_command(commands, "status", about_status)
    add_command(commands, "sync", "send MLflow what it lacks of all runs that were recorded here")
    garbage = add_command(
        commands, "gc", "remove old folders of isolated runs and old resume states"
    )
    garbage.add_argument(
        "--older-than",
        type=float,
        default=7.0,
        metavar="DAYS",
        help="age since the last use; default: 7",
    )
    garbage.add_argument(
        "--cache",
        action="store_true",
        help="also remove the files of DVC's cache that no branch, tag or folder refers to",
    )
    add_command(
        commands,
        "report",
        "print the results of all rounds; write reports/summary.md and reports/report.html",
    )


def add_approve(commands: Subparsers) -> None:
    approve = add_command(
        commands,
        "approve",
        "approve or refuse a failed gate that waits for a decision (gates.<gate>.policy: ask)",
    )
    approve.add_argument("gate", choices=["sft", "reward", "promote"], help="the failed gate")
    approve.add_argument("round", metavar="ROUND", help="the round of the gate, e.g. r0")
    approve.add_argument(
        "--reason",
        required=True,
        help="reason for the decision; stored in the verdict, in approvals/ and in MLflow",
    )
    add_person(approve)
    approve.add_argument("--run", metavar="RUN", help="an isolated run; default: this folder")
    approve.add_argument("--refuse", action="store_true", help="refuse the gate")


def add_person(command: argparse.ArgumentParser) -> None:
    command.add_argument("--by", metavar="NAME", help="who decides; default: git's user.name")


def add_promote(commands: Subparsers) -> None:
    promote = add_command(
        commands, "promote", "show the champion and its rivals, or choose another champion"
    )
    promote.add_argument(
        "version",
        nargs="?",
        type=int,
        metavar="VERSION",
        help="version of the registered model that becomes champion",
    )
    promote.add_argument(
        "--rollback",
        action="store_true",
        help="swap champion and previous champion; a second rollback undoes the first",
    )
    promote.add_argument(
        "--reason", default="", help="reason for the change; becomes a tag of the version"
    )
    add_person(promote)


def add_comparison_commands(commands: Subparsers) -> None:
    """`compare` and `best`, which read recorded runs from MLflow."""
    pair = add_command(
        commands,
        "compare",
        "compare the policies of two recorded runs on the same prompts, and list differing params",
    )
    for name in ("a", "b"):
        pair.add_argument(
            name,
            metavar="RUN[:ROUND]",
            help="a run's name or the start of it; default round: the last one it evaluated",
        )
    pair.add_argument(
        "--open",
        action="store_true",
        help="open MLflow's pages of the two runs in the browser (needs `rondo up`)",
    )
    ranking = add_command(
        commands, "best", "rank the policies of all recorded runs by win rate against SFT"
    )
    ranking.add_argument(
        "--kl",
        type=float,
        metavar="NATS",
        help="maximum KL from SFT, in nats per token; default: gates.promote.max_kl_per_token",
    )


def run(options: argparse.Namespace) -> int:
    from flows.commands.dry_run import dry_run
    from flows.commands.run import continue_run, run_rounds
    from flows.core.config import KEEP

    if options.interrupted:
        others = (options.rounds, options.set, options.isolated, options.rerun, options.dry_run)
        if any(others) or options.preset != KEEP:
            raise BadInput("--continue RUN takes no other options: the run has its own settings")
        return continue_run(options.interrupted)
    if options.dry_run:
        return dry_run(options.preset, options.rounds, options.set, options.rerun)
    return run_rounds(options.preset, options.rounds, options.set, options.isolated, options.rerun)


def next_round(options: argparse.Namespace) -> int:
    from flows.commands.dry_run import dry_next_round
    from flows.commands.run import run_next_round

    if options.dry_run:
        return dry_next_round(options.set)
    return run_next_round(options.set, options.isolated)


def up(_: argparse.Namespace) -> int:
    interrupts.raise_at_signals("stopping ...")
    from flows.orchestration.server import serve

    serve(HOME.resolve())
    return 0


def by_module(options: argparse.Namespace) -> int:
    """A command that is a module of flows/commands with the function `run`."""
    module = import_module(f"flows.commands.{options.command.replace('-', '_')}")
    code: int = module.run(options)
    return code


def report(_: argparse.Namespace) -> int:
    from flows.core.locks import current_locks
    from flows.report import page, summary

    locks = current_locks()
    rounds = summary.known_rounds(locks)
    summary.write(rounds, locks)
    # flushed: the charts of 30 rounds take half a minute
    print(summary.text(rounds, locks), flush=True)
    print(f"with charts and samples, for a browser: {page.write(rounds, locks)}")
    return 0


def status(_: argparse.Namespace) -> int:
    from flows.commands.status import text

    print(text(HOME.resolve()))
    return 0


def gc(options: argparse.Namespace) -> int:
    from flows.commands.gc import collect_garbage

    for line in collect_garbage(HOME.resolve(), options.older_than, options.cache):
        print(line)
    return 0


def approve(options: argparse.Namespace) -> int:
    from flows.execution.worktree import folder_of_run
    from flows.orchestration.approval import decide_at_terminal

    folder = folder_of_run(options.run, HOME.resolve()) if options.run else Path.cwd()
    with chdir(folder):
        path = decide_at_terminal(
            options.gate, options.round, not options.refuse, options.by, options.reason
        )
    command = f"rondo run --continue {options.run}" if options.run else "rondo run"
    print(f"{path} written; run `{command}` to continue")
    return 0


def promote(options: argparse.Namespace) -> int:
    from flows.core.git import person
    from flows.tracking import model_registry
    from flows.tracking.mlflow_store import registry

    if options.rollback and options.version is not None:
        raise BadInput("--rollback takes no VERSION: it makes the previous champion the champion")
    if options.reason and not options.rollback and options.version is None:
        raise BadInput("--reason is only for a change: add --rollback or a version's number")
    with registry(HOME.resolve()) as client:
        if options.version is not None:
            by = person(options.by)
            model_registry.promote_by_hand(client, options.version, by, options.reason)
        if options.rollback:
            model_registry.roll_back(client, person(options.by), options.reason)
        print(model_registry.describe(client))
    return 0


def sync(_: argparse.Namespace) -> int:
    from flows.tracking.sync import send_all

    for line in send_all(HOME.resolve(), print):
        print(f"sent: {line}")
    print("MLflow has all recorded runs")
    return 0


def compare(options: argparse.Namespace) -> int:
    import webbrowser

    from flows.commands import compare as comparison
    from flows.tracking.mlflow_store import experiment_of, registry

    with registry(HOME.resolve()) as client:
        experiment = experiment_of(client)
        a, b = (comparison.find(client, experiment, name) for name in (options.a, options.b))
        print(comparison.text(client, a, b))
    for title, page in comparison.pages(a, b).items():
        print(f"{title} in MLflow: {page}")
        if options.open:
            webbrowser.open(page)
    return 0


def best(options: argparse.Namespace) -> int:
    from flows.commands import best as policies
    from flows.tracking.mlflow_store import experiment_of, registry
    from stages.lib.core.params import load_params

    kl = load_params().gates.promote.max_kl_per_token if options.kl is None else options.kl
    home, here = HOME.resolve(), policies.experiments_here()
    with registry(home) as client:
        ranking = policies.policies_within_kl(experiment_of(client), kl, here)
        print(policies.text(home, ranking, here))
    return 0


def check_data(options: argparse.Namespace) -> int:
    from stages.prepare.check_file import check_file

    return check_file(options.file)


COMMANDS = {
    "run": run,
    "next-round": next_round,
    "up": up,
    "worker": by_module,
    "serve-reward": by_module,
    "plan": by_module,
    "status": status,
    "gc": gc,
    "report": report,
    "approve": approve,
    "promote": promote,
    "sync": sync,
    "compare": compare,
    "best": best,
    "badcases": by_module,
    "check-data": check_data,
}

if __name__ == "__main__":
    main()

"""The command `rondo`. Exit codes: 0 done, 3 a gate failed, 2 bad input, 4 the network or a server
was away, 1 anything else.
"""

import argparse
import io
import logging
import os
import signal
import sys
import traceback
from pathlib import Path

from flows.commands.badcases import add_commands as add_badcases
from stages.lib.core.errors import BadInput, GateFailed, RondoError

HOME = Path(".rondo")


def main(arguments: list[str] | None = None) -> None:
    """The command line; ends the process."""
    options = parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            line_buffering=True
        )  # in a pipe too, what is said is seen when it is said
    signal.signal(
        signal.SIGTERM, lambda number, _: sys.exit(128 + number)
    )  # not the default, which would leave Prefect's server behind
    try:
        if options.command != "check-data" and not Path("dvc.yaml").exists():
            raise BadInput(f"no dvc.yaml in {Path.cwd()}: run from the project's folder")
        code = COMMANDS[options.command](options)
    except RondoError as error:
        print(f"rondo: {type(error).__name__}: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print("rondo: stopped", file=sys.stderr)
        code = RondoError.exit_code
    except BrokenPipeError:  # whoever reads, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = RondoError.exit_code
    sys.stdout.flush()
    sys.exit(code)


def parser() -> argparse.ArgumentParser:
    about = "RLHF in rounds: SFT, reward model, PPO, evaluation, badcase replay."
    top = argparse.ArgumentParser(prog="rondo", description=about, epilog=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    start = commands.add_parser("run", help="run what is not up to date, stage by stage")
    start.add_argument(
        "--preset",
        default="keep",
        metavar="NAME",
        help="a file of presets/, over the defaults; `default`: the defaults",
    )
    start.add_argument("--rounds", type=int, metavar="N", help="how many rounds")
    more = commands.add_parser(
        "next-round",
        help="add a round to params.yaml and run it; the rounds before it stay as they are",
    )
    for each in (start, more):
        each.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="SECTION.KEY=VALUE",
            help="one value of params.yaml; may be repeated",
        )
        each.add_argument(
            "--isolated",
            action="store_true",
            help="in a git worktree of its own that ends as the branch runs/<run id>",
        )
    services = commands.add_parser(
        "up", help="Prefect server, worker and MLflow on loopback, until Ctrl-C"
    )
    services.add_argument(
        "--notify",
        metavar="URL",
        help="a webhook that is told of shut gates, failed and crashed runs (docs/running.md)",
    )
    commands.add_parser(
        "status", help="how far each round is, what runs now, whose fault a shut gate is"
    )
    commands.add_parser(
        "report",
        help="print the table of what is there; write reports/summary.md and reports/report.html",
    )
    word = commands.add_parser(
        "approve",
        help="let a round go on past a gate that asks (gates.<gate>.policy: ask), or refuse it",
    )
    word.add_argument("gate", choices=["sft", "reward", "promote"])
    word.add_argument("round", metavar="ROUND", help="e.g. r0")
    word.add_argument(
        "--reason",
        required=True,
        help="why; it is kept in the verdict, in approvals/ and in MLflow",
    )
    word.add_argument("--by", metavar="NAME", help="who; default: git's user.name")
    word.add_argument("--refuse", action="store_true", help="say no, with the reason")
    add_badcases(commands)
    champion = commands.add_parser(
        "promote",
        help="print which policy is champion and which was before, or go back to that one",
    )
    champion.add_argument(
        "--rollback",
        action="store_true",
        help="champion and previous change places (a second time: back again, not to older ones)",
    )
    champion.add_argument(
        "--reason", default="", help="why; a tag of the version that is champion no more"
    )
    champion.add_argument("--by", metavar="NAME", help="who; default: git's user.name")
    two = commands.add_parser(
        "compare",
        help="the policies of two recorded runs on the same prompts, paired, and what was set otherwise",
    )
    for name in ("a", "b"):
        two.add_argument(
            name,
            metavar="RUN[:ROUND]",
            help="a run's name or how it begins; default: the last round that it evaluated",
        )
    two.add_argument(
        "--open",
        action="store_true",
        help="MLflow's pages of the two, in the browser (`rondo up` has to run)",
    )
    found = commands.add_parser(
        "best", help="the policies of all recorded runs by judged win rate against SFT, under a KL"
    )
    found.add_argument(
        "--kl",
        type=float,
        metavar="NATS",
        help="KL from SFT, nats a sequence; default: gates.promote.max_kl",
    )
    checked = commands.add_parser(
        "check-data", help="say what a file of pairs or demonstrations is, and which rows are bad"
    )
    checked.add_argument("file", metavar="FILE", help=".jsonl or .parquet")
    return top


def run(options: argparse.Namespace) -> int:
    """The flow, in this process; its server is the one that runs, or one of its own for as long as
    it takes.
    """
    from flows.core.config import resolve

    resolve(options.preset, options.rounds, options.set)  # bad input is said before anything starts
    from flows.core.prefect_api import PREFECT_URL
    from flows.core.services import is_up
    from flows.orchestration.server import prefect_environment

    for name, value in prefect_environment(HOME.resolve()).items():
        os.environ.setdefault(name, value)
    os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = (
        "CRITICAL"  # it logs to its run; the terminal has lines of ours
    )
    if "PREFECT_API_URL" not in os.environ and is_up(f"{PREFECT_URL}/api/health"):
        os.environ["PREFECT_API_URL"] = f"{PREFECT_URL}/api"
    console = logging.getLogger("rondo")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    console.addHandler(handler)
    console.setLevel(logging.INFO)
    console.propagate = False

    from flows.execution import dvc_stages, fork_server

    with fork_server.fork_server(dvc_stages.stage_environment()):  # it imports while Prefect starts
        from flows.pipeline import rlhf_pipeline

        state = rlhf_pipeline(
            options.preset,
            options.rounds or 0,
            options.set,
            isolated=options.isolated,
            return_state=True,
        )
    if state.is_completed():
        return 0
    if state.name == "GateFailed":
        raise GateFailed(state.message)
    error = state.result(raise_on_failure=False)
    if isinstance(error, RondoError):
        raise error
    if isinstance(error, Exception):
        traceback.print_exception(error)
    print(f"rondo: {state.name}: {state.message}", file=sys.stderr)
    return RondoError.exit_code


def next_round(options: argparse.Namespace) -> int:
    from flows.core.config import KEEP, one_more_round

    options.preset, options.rounds = KEEP, one_more_round()
    return run(options)


def up(options: argparse.Namespace) -> int:
    from flows.orchestration.server import serve

    serve(HOME.resolve(), options.notify)
    return 0


def report(_: argparse.Namespace) -> int:
    from flows.report import page, summary

    rounds = summary.known_rounds()
    summary.write(rounds)
    print(summary.text(rounds))
    print(f"{page.write(rounds)}: the same with pictures and samples, for a browser")
    return 0


def status(_: argparse.Namespace) -> int:
    from flows.commands.status import text

    print(text(HOME.resolve()))
    return 0


def approve(options: argparse.Namespace) -> int:
    from flows.orchestration.approval import decide_here

    path = decide_here(options.gate, options.round, not options.refuse, options.by, options.reason)
    print(f"{path} written; `rondo run` (or `dvc repro`) goes on from there")
    return 0


def badcases(options: argparse.Namespace) -> int:
    from flows.commands.badcases import run as run_action

    return run_action(options)


def promote(options: argparse.Namespace) -> int:
    from flows.core.git import current_user
    from flows.tracking import model_registry
    from flows.tracking.mlflow_store import registry

    if options.reason and not options.rollback:
        raise BadInput("--reason is of a rollback: add --rollback")
    with registry(HOME.resolve()) as client:
        if options.rollback:
            model_registry.roll_back(client, options.by or current_user(), options.reason)
        print(model_registry.told(client))
    if (unsent := HOME / "unsent.jsonl").exists():
        print(
            f"{unsent} waits to be sent with the next run: MLflow may not know the last promotion yet"
        )
    return 0


def compare(options: argparse.Namespace) -> int:
    import webbrowser

    from flows.commands import compare as comparison
    from flows.tracking.mlflow_store import experiment_of, registry

    with registry(HOME.resolve()) as client:
        experiment = experiment_of(client)
        a, b = (comparison.find(client, experiment, name) for name in (options.a, options.b))
        print(comparison.text(client, a, b))
    for what, page in comparison.pages(a, b).items():
        print(f"{what} in MLflow: {page}")
        if options.open:
            webbrowser.open(page)
    return 0


def best(options: argparse.Namespace) -> int:
    from flows.commands import best as policies
    from flows.tracking.mlflow_store import experiment_of, registry
    from stages.lib.core.params import load_params

    kl = load_params().gates.promote.max_kl if options.kl is None else options.kl
    home = HOME.resolve()
    with registry(home) as client:
        print(policies.text(home, policies.policies_within_kl(experiment_of(client), kl)))
    return 0


def check_data(options: argparse.Namespace) -> int:
    from stages.prepare.check_file import check

    return check(options.file)


COMMANDS = {
    "run": run,
    "next-round": next_round,
    "up": up,
    "status": status,
    "report": report,
    "approve": approve,
    "promote": promote,
    "compare": compare,
    "best": best,
    "badcases": badcases,
    "check-data": check_data,
}

if __name__ == "__main__":
    main()

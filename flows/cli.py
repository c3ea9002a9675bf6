"""The command `rondo`: each command is a function, whose signature and docstring are its help."""

import io
import json
import locale
import os
import signal
import sys
from contextlib import chdir
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from flows.core import interrupts
from flows.core.services import HOME, HOST, prepare_environment
from stages.lib.core.errors import BadInput, RondoError, print_failure, typed

EXIT_CODES = (
    "Exit codes: 0 success, 2 bad input, 3 a gate failed, 4 network or server unreachable, "
    "5 disk full or failing, 6 out of memory, 1 other errors, 128 + a signal's number after it "
    "(Ctrl-C: 130)."
)
UTF8 = "PYTHONUTF8"  # Python's own variable
NEEDS_NO_PROJECT = ("check-data", "audit-reward", "compare-models", "--help", "-h")

JSON = "--json"  # output for programs (AGENTS.md)

app = App(
    name="rondo",
    help="RLHF in rounds: SFT, reward model, PPO, evaluation, badcase replay.",
    help_epilogue=EXIT_CODES,
    help_format="markdown",
    version_flags=[],
    default_parameter=Parameter(negative=()),
    result_action="return_value",
    suppress_keyboard_interrupt=False,  # main() reports it
)
app.command(
    "flows.commands.badcases:app",
    name="badcases",
    help="List failed responses and their states; add yours.",
)

Settings = Annotated[list[str] | None, Parameter(name="--set")]
Columns = Annotated[list[str] | None, Parameter(name="--column")]
Flag = Annotated[bool, Parameter(show_default=False)]
AsJson = Annotated[bool, Parameter(name=JSON, show_default=False)]
Reason = Annotated[str, Parameter(show_default=False)]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and end the process with its exit code."""
    own_process = arguments is None and os.environ.get(UTF8) != "1"
    if own_process and locale.getpreferredencoding(False).lower() != "utf-8":
        # The texts of this process and of all that it starts are UTF-8, as the project's files are.
        os.environ[UTF8] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
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
    words = sys.argv[1:] if arguments is None else arguments
    prepare_environment()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # progress is visible through a pipe too
    try:
        if words and not {*NEEDS_NO_PROJECT} & {*words} and not Path("dvc.yaml").exists():
            raise BadInput(f"no dvc.yaml in {Path.cwd()}: run from the project's folder")
        return app(words, exit_on_error=False, print_error=False) or 0
    except CycloptsError as error:
        command = " ".join(["rondo", *(error.command_chain or ())])
        reason = str(error).rstrip("., ")  # of a long list it prints the start
        return failed(BadInput(f"{reason}; next: `{command} --help`"), words)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        return RondoError.exit_code
    except Exception as error:
        return failed(error, words)


def failed(error: Exception, words: list[str]) -> int:
    """Print an error; returns its exit code. For programs also as JSON, instead of the output."""
    code = print_failure(error, "rondo")
    if JSON in words:
        shown = typed(error) or error
        kind, message = type(shown).__name__, str(shown)
        print(json.dumps({"error": kind, "message": message, "exit_code": code}))
    return code


@app.command
def run(
    *,
    preset: str | None = None,
    rounds: int | None = None,
    rerun: list[str] | None = None,
    interrupted: Annotated[str | None, Parameter(name="--continue")] = None,
    settings: Settings = None,
    dry_run: Flag = False,
    as_json: AsJson = False,
    isolated: Flag = False,
) -> int:
    """Run all stages that are not up to date.

    Args:
        preset: overlay presets/NAME.yaml on the defaults; `default`: the defaults alone; without
            it params.yaml stays as it is.
        rounds: number of rounds.
        rerun: run an ended round again, and all later ones, with the current settings; may be
            repeated; `all`: every round.
        interrupted: go on with an isolated run that was interrupted or has failed, with its own
            settings.
        settings: SECTION.KEY=VALUE sets one value of params.yaml; may be repeated.
        dry_run: run nothing, but print the stages that would run, and what they need.
        as_json: of --dry-run: print an object.
        isolated: work in a new git worktree, and commit the results to the branch runs/RUN.
    """
    from flows.commands import dry_run as trial
    from flows.commands.run import continue_run, run_rounds
    from flows.core.config import KEEP

    values, again = settings or [], rerun or []
    if as_json and not dry_run:
        raise BadInput("--json is of --dry-run: a run prints its progress")
    if interrupted:
        if any((rounds, values, isolated, again, dry_run, preset)):
            raise BadInput("--continue RUN takes no other options: the run has its own settings")
        return continue_run(interrupted)
    if dry_run:
        return trial.dry_run(preset or KEEP, rounds, values, again, as_json)
    return run_rounds(preset or KEEP, rounds, values, isolated, again)


@app.command
def next_round(
    *,
    settings: Settings = None,
    dry_run: Flag = False,
    as_json: AsJson = False,
    isolated: Flag = False,
) -> int:
    """Add a round to params.yaml and run it, without changing the rounds before it.

    Args:
        settings: SECTION.KEY=VALUE sets one value of params.yaml; may be repeated.
        dry_run: run nothing, but print the stages that would run, and what they need.
        as_json: of --dry-run: print an object.
        isolated: work in a new git worktree, and commit the results to the branch runs/RUN.
    """
    from flows.commands import dry_run as trial
    from flows.commands.run import run_next_round
    from flows.core.config import KEEP, one_more_round

    if as_json and not dry_run:
        raise BadInput("--json is of --dry-run: a run prints its progress")
    if dry_run:
        return trial.dry_run(KEEP, one_more_round(), settings or [], [], as_json)
    return run_next_round(settings or [], isolated)


@app.command
def up() -> None:
    """Serve Prefect, a worker and MLflow on this machine until Ctrl-C.

    Environment variables: RONDO_NOTIFY_URL, a webhook that gets a message when a run fails, crashes
    or waits for a decision, or when a gate fails (docs/running.md); PREFECT_SERVER_API_PORT and
    MLFLOW_PORT.
    """
    interrupts.raise_at_signals("stopping ...")
    from flows.orchestration.server import serve

    serve(HOME.resolve())


@app.command
def worker(*, name: str | None = None, push: str | None = None) -> None:
    """Run on this machine what people start at a team's Prefect server, until Ctrl-C.

    Environment variables: PREFECT_API_URL, PREFECT_API_AUTH_STRING and MLFLOW_TRACKING_URI name the
    team's servers.

    Args:
        name: of this machine in Prefect: its deployments are rlhf-pipeline-NAME, ...; default: its
            host name.
        push: after an isolated run has completed or failed: `dvc push`, and push its branch to this
            git remote.
    """
    from flows.commands.worker import work_for_team

    work_for_team(name, push)


@app.command
def serve_reward(
    round_: Annotated[str, Parameter(name="ROUND")],
    /,
    *,
    host: str = HOST,
    port: int = 8100,
    allow_failed: Flag = False,
) -> None:
    """Serve a round's reward model over HTTP until Ctrl-C, as OpenRLHF's /get_reward and vLLM's
    /classify.

    Environment variable: RONDO_REWARD_TOKEN, a token that requests then have to send.

    Args:
        round_: the round, e.g. r0.
        host: address of this machine to listen on.
        port: 0: any free port.
        allow_failed: also serve a model that its gate has not passed.
    """
    from flows.serving.server import serve  # imports torch

    serve(round_, host, port, allow_failed)


@app.command
def plan(
    *,
    model: str,
    gpus: str,
    preset: str = "openrlhf",
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Print the GPU memory that each stage needs for a model, and settings that fit.

    Args:
        model: a folder, a model of the hub, or a size, e.g. 8b.
        gpus: GPUs x GB of one, e.g. 8x80, or nodes x GPUs per node x GB, e.g. 2x8x80.
        preset: lengths and batches: of this preset, or `keep`: of params.yaml.
        settings: SECTION.KEY=VALUE sets one value of them; may be repeated.
        as_json: print an object.
    """
    from flows.commands.plan import print_plan

    print_plan(model, gpus, preset, settings or [], as_json)


@app.command
def status(*, as_json: AsJson = False) -> None:
    """Show the progress of each round, the running stages and the stage at fault.

    Args:
        as_json: print an object.
    """
    from flows.commands import status as project
    from flows.core.tables import print_json

    if as_json:
        return print_json(project.values())
    print(project.text(HOME.resolve()))


@app.command
def sync() -> None:
    """Send MLflow what it lacks of all runs that were recorded here."""
    from flows.tracking.mlflow_tracker import send_all, unsent

    home = HOME.resolve()
    for line in send_all(home, print):
        print(f"sent: {line}")
    if not unsent(home):
        print("MLflow has all recorded runs")


@app.command
def gc(*, older_than: float = 7.0, cache: Flag = False) -> None:
    """Remove old folders of isolated runs and old resume states.

    Args:
        older_than: days since the last use.
        cache: also remove the files of DVC's cache that no branch, tag or folder refers to.
    """
    from flows.commands.gc import collect_garbage

    for line in collect_garbage(HOME.resolve(), older_than, cache):
        print(line)


@app.command
def report() -> None:
    """Print the results of all rounds; write reports/summary.md, reports/report.html, and the pages
    of all samples and badcases.
    """
    from flows.core.locks import current_locks
    from flows.report import page, round_files, summary

    locks = current_locks()
    rounds = round_files.known_rounds(locks)
    summary.write(rounds, locks)
    # flushed: the samples of 30 rounds take a quarter of a minute
    print(summary.text(rounds, locks), flush=True)
    page.write_pages(rounds, locks, print)
    print(f"with charts and samples, for a browser: {page.write(rounds, locks)}")


@app.command
def label(
    round_: Annotated[str, Parameter(name="ROUND")],
    /,
    *,
    of: Literal["evaluation", "champion", "badcases", "pairs"] = "evaluation",
    comparisons: int = 60,
    by: str | None = None,
    run: str | None = None,
    port: int = 8200,
) -> None:
    """Serve a page on which people judge which of two responses is better, until Ctrl-C.

    Args:
        round_: the round, e.g. r0.
        of: evaluation: the policy with SFT, on the frozen prompts; champion: the policy with the
            champion; badcases: failed responses with SFT's, which become badcases of people; pairs:
            the held-out pairs that the reward model scores closest.
        comparisons: how many, at most.
        by: the name that the page has at first; default: git's user.name.
        run: an isolated run; default: this folder.
        port: of the page, on this machine; 0: any free port.
    """
    from flows.commands.label import serve_labels
    from flows.report.people import Of

    serve_labels(round_, Of(of), comparisons, by, run, port)


@app.command
def approve(
    gate: Literal["sft", "reward", "promote"],
    round_: Annotated[str, Parameter(name="ROUND")],
    /,
    *,
    reason: str,
    by: str | None = None,
    run: str | None = None,
    refuse: Flag = False,
) -> None:
    """Approve or refuse a failed gate that waits for a decision (gates.GATE.policy: ask).

    Args:
        gate: the failed gate.
        round_: the round of the gate, e.g. r0.
        reason: of the decision; stored in the verdict, in approvals/ and in MLflow.
        by: who decides; default: git's user.name.
        run: an isolated run; default: this folder.
        refuse: refuse the gate.
    """
    from flows.execution.worktree import folder_of_run
    from flows.orchestration.approval import decide_at_terminal

    folder = folder_of_run(run, HOME.resolve()) if run else Path.cwd()
    with chdir(folder):
        path = decide_at_terminal(gate, round_, not refuse, by, reason)
    command = f"rondo run --continue {run}" if run else "rondo run"
    print(f"{path} written; run `{command}` to continue")


@app.command
def promote(
    version: int | None = None,
    /,
    *,
    rollback: Flag = False,
    reason: Reason = "",
    by: str | None = None,
) -> None:
    """Show the champion and its rivals, or choose another champion.

    Args:
        version: of the registered model that becomes champion.
        rollback: swap champion and previous champion; a second rollback undoes the first.
        reason: for the change; becomes a tag of the version.
        by: who decides; default: git's user.name.
    """
    from flows.core.git import person
    from flows.tracking import model_registry
    from flows.tracking.mlflow_store import registry

    if rollback and version is not None:
        raise BadInput("--rollback takes no VERSION: it makes the previous champion the champion")
    if reason and not rollback and version is None:
        raise BadInput("--reason is only for a change: add --rollback or a version's number")
    with registry(HOME.resolve()) as client:
        if version is not None:
            model_registry.promote_by_hand(client, version, person(by), reason)
        if rollback:
            model_registry.roll_back(client, person(by), reason)
        print(model_registry.describe(client))


@app.command
def compare(
    a: str,
    b: str,
    /,
    *,
    open_: Annotated[Flag, Parameter(name="--open")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare the policies of two recorded runs prompt by prompt, and list differing params.

    It writes all samples side by side to reports/compare.html.

    Args:
        a: RUN[:ROUND], a run's name or the start of it; default round: the last one it evaluated.
        b: likewise.
        open_: open MLflow's pages of the two runs in the browser (needs `rondo up`).
        as_json: print an object instead.
    """
    import webbrowser

    from flows.commands import compare as comparison
    from flows.core.services import mlflow_answers
    from flows.core.tables import print_json
    from flows.tracking.mlflow_store import experiment_of, registry

    with registry(HOME.resolve()) as client:
        experiment = experiment_of(client)
        first, second = (comparison.find(client, experiment, name) for name in (a, b))
        if as_json:
            return print_json(comparison.values(client, first, second))
        print(comparison.text(client, first, second))
        pages = comparison.pages(client, first, second)
    print(comparison.largest_differences(first, second))
    print(f"All samples side by side: {comparison.write_page(first, second)}")
    after = "" if mlflow_answers(HOME.resolve()) else " (after `rondo up`)"
    for title, page in pages.items():
        print(f"{title} in MLflow{after}: {page}")
        if open_:
            webbrowser.open(page)


@app.command
def best(*, kl: float | None = None, as_json: AsJson = False) -> None:
    """Rank the policies of all recorded runs by win rate against SFT.

    Args:
        kl: maximum KL from SFT, in nats per token; default: gates.promote.max_kl_per_token.
        as_json: print a list of objects, one per set of comparable policies.
    """
    from flows.commands import best as policies
    from flows.core.tables import print_json
    from flows.tracking.mlflow_store import experiment_of, registry
    from stages.lib.core.params import load_params

    limit = load_params().gates.promote.max_kl_per_token if kl is None else kl
    home, here = HOME.resolve(), policies.experiments_here()
    with registry(home) as client:
        ranking = policies.policies_within_kl(experiment_of(client), limit, here)
        if as_json:
            return print_json(policies.values(home, ranking, here))
        print(policies.text(home, ranking, here))


@app.command
def check_data(
    source: str,
    /,
    *,
    split: str = "train",
    columns: Columns = None,
    as_json: AsJson = False,
) -> int:
    """Say what becomes of preference pairs or demonstrations, and list the rows that are bad.

    Args:
        source: a file, a folder, or a data set of the hub (name/name@commit).
        split: of a folder or a data set.
        columns: NAME=COLUMN, e.g. prompt=question: a column of another name; may be repeated.
        as_json: print an object.
    """
    from stages.prepare import check_file

    return check_file.check_data(source, split, named_columns(columns), as_json)


@app.command
def audit_reward(
    named: Annotated[str, Parameter(name="MODEL")],
    /,
    *,
    pairs: str,
    split: str = "train",
    columns: Columns = None,
    slices: Annotated[str | None, Parameter(name="--slice")] = None,
    judge: str | None = None,
    policy: str | None = None,
    settings: Settings = None,
    max_minutes: float = 10.0,
    out: Path = Path("audit"),
) -> int:
    """Say whether a reward model or judge, whoever made it, is good enough to be optimised against.

    Needs no project. Exit code 3 if a line fails.

    Args:
        named: a folder or a model of the hub (name/name@commit) with one label, a function
            (module:name), or an address that ends with /get_reward (OpenRLHF), /classify (vLLM) or
            /v1 (a language model as judge; it needs --set annotate.endpoint.model and .rubric).
        pairs: preference pairs that it was not trained on: a file, a folder, or a data set.
        split: of a folder or a data set.
        columns: NAME=COLUMN, e.g. prompt=question: a column of another name; may be repeated.
        slices: a column whose values divide the pairs, for the accuracy of each part.
        judge: a second judge, likewise named, or `lexicon`: for endings and best-of-n.
        policy: a folder or a model of the hub that samples responses, for best-of-n.
        settings: SECTION.KEY=VALUE, e.g. gates.reward.accuracy=0.6: a threshold, or a value of
            `battery`; may be repeated. The others are those of params.yaml, or the defaults.
        max_minutes: fewer pairs are used if all would take longer.
        out: folder for audit.html, audit.md and audit.json.
    """
    from flows.commands import audit_reward as audit
    from stages.lib.core.params.data import SourceParams

    return audit.audit_reward(
        named,
        SourceParams(path=pairs, split=split, columns=named_columns(columns)),
        slices=slices,
        judge=judge,
        policy=policy,
        settings=settings or [],
        max_minutes=max_minutes,
        out=out,
    )


@app.command
def compare_models(
    a: str,
    b: str,
    /,
    *,
    prompts: str,
    split: str = "train",
    columns: Columns = None,
    slices: Annotated[str | None, Parameter(name="--slice")] = None,
    judge: list[str] | None = None,
    reference: str | None = None,
    max_prompts: int = 128,
    settings: Settings = None,
    out: Path = Path("comparison"),
) -> None:
    """Say which of two language models is better on the same prompts, whoever trained them.

    Needs no project. A and B are folders, models of the hub (name/name@commit), adapters of the
    reference, files with responses to the prompts, or chat servers (http://.../v1#MODEL).

    Args:
        a: the model that B is compared with.
        b: the other one.
        prompts: a file, a folder, or a data set, with rows of any kind.
        split: of a folder or a data set.
        columns: NAME=COLUMN, e.g. prompt=question: a column of another name; may be repeated.
        slices: a column whose values divide the prompts, for the win rate of each part.
        judge: as MODEL of audit-reward, or `lexicon`, the default; may be repeated.
        reference: the model that both were trained from, for KL and the comparison at equal KL.
        max_prompts: the first of them are used.
        settings: SECTION.KEY=VALUE, e.g. ppo.response_length=128; may be repeated.
        out: folder for comparison.html and comparison.json.
    """
    from flows.commands import compare_models as models
    from stages.lib.core.params.data import SourceParams

    models.compare_models(
        a,
        b,
        SourceParams(path=prompts, split=split, columns=named_columns(columns)),
        slices=slices,
        judges=judge or [],
        reference=reference,
        max_prompts=max_prompts,
        settings=settings or [],
        out=out,
    )


def named_columns(columns: list[str] | None) -> dict[str, str]:
    """The values of `--column` by name."""
    named = [column.partition("=") for column in columns or []]
    if wrong := [name for name, equals, column in named if not (name and equals and column)]:
        raise BadInput(f"--column {wrong[0]}: expected NAME=COLUMN, e.g. prompt=question")
    return {name: column for name, _, column in named}


if __name__ == "__main__":
    main()

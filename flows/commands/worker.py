"""`rondo worker`: this machine works for a team's Prefect server (docs/scale.md)."""

import argparse
import re
import socket

from flows.core import interrupts
from flows.core.git import git
from flows.core.services import HOME
from flows.execution.dvc_stages import open_repo
from stages.lib.core.errors import BadInput

ABOUT = "run on this machine what people start at a team's Prefect server, until Ctrl-C"
NAME = r"[a-z0-9]+(-[a-z0-9]+)*"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Environment variables: PREFECT_API_URL, PREFECT_API_AUTH_STRING and MLFLOW_TRACKING_URI "
        "name the team's servers."
    )
    parser.add_argument(
        "--name",
        default=re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-"),
        help="of this machine in Prefect: its deployments are rlhf-pipeline-NAME, ...; default: "
        "its host name",
    )
    parser.add_argument(
        "--push",
        metavar="REMOTE",
        help="after an isolated run has completed or failed: `dvc push`, and push its branch to "
        "this git remote",
    )


def has_default_remote() -> bool:
    with open_repo() as repo:
        return bool(repo.config["core"].get("remote"))


def run(options: argparse.Namespace) -> int:
    if not re.fullmatch(NAME, options.name):
        raise BadInput(f"--name {options.name}: expected a-z, 0-9 and single hyphens, e.g. gpu-1")
    if options.push and options.push not in git("remote").splitlines():
        raise BadInput(f"--push {options.push}: `git remote` lists no such remote")
    if options.push and not has_default_remote():
        raise BadInput(
            "--push: DVC has no default remote: `dvc remote add -d NAME URL` (docs/scale.md)"
        )
    interrupts.raise_at_signals("stopping ...")
    from flows.orchestration.worker import work

    work(options.name, options.push, HOME.resolve())
    return 0

"""`rondo worker`: this machine works for a team's Prefect server (docs/scale.md)."""

import re
import socket

from flows.core import interrupts
from flows.core.git import git
from flows.core.services import HOME
from flows.execution.dvc_stages import open_repo
from stages.lib.core.errors import BadInput

NAME = r"[a-z0-9]+(-[a-z0-9]+)*"


def has_default_remote() -> bool:
    with open_repo() as repo:
        return bool(repo.config["core"].get("remote"))


def work_for_team(given_name: str | None, push: str | None) -> None:
    """Work until a signal; without a name this machine has its host name.

    Raises:
        BadInput: the name, or the remote to push to, is none.
    """
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")
    name = host if given_name is None else given_name
    if not re.fullmatch(NAME, name):
        raise BadInput(f"--name {name}: expected a-z, 0-9 and single hyphens, e.g. gpu-1")
    if push and push not in git("remote").splitlines():
        raise BadInput(f"--push {push}: `git remote` lists no such remote")
    if push and not has_default_remote():
        raise BadInput(
            "--push: DVC has no default remote: `dvc remote add -d NAME URL` (docs/scale.md)"
        )
    interrupts.raise_at_signals("stopping ...")
    from flows.orchestration.worker import work

    work(name, push, HOME.resolve())

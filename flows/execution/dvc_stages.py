"""The DAG driver: dvc.yaml says what depends on what; this runs one of its stages at a time.

An address is DVC's name of a stage: `assets`, `sft@r0`.
"""

import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from flows.core.addresses import split_address
from flows.core.verdicts import gate_message
from flows.execution import fork_server, process_guard
from stages.lib.core.errors import BadInput, GateFailed, RondoError, Unreachable

SHOWN_LINES = 15


class Outcome(str, Enum):
    ran = "ran"
    restored = "restored"
    unchanged = "unchanged"


@contextmanager
def open_repo() -> Iterator[Any]:
    """DVC's view of the working directory; its errors become BadInput."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo
    from dvc.scm import SCMError

    try:
        with Repo(".") as repo:
            yield repo
    except (DvcException, SCMError) as error:
        raise BadInput(f"dvc: {error}") from None


def order_graph(repo: Any) -> Any:
    """networkx's graph of addresses, each pointing at those that depend on it."""
    import networkx

    return networkx.relabel_nodes(repo.index.graph, lambda stage: stage.addressing).reverse()


def stage_order(rounds: list[str]) -> list[str]:
    """Addresses of all stages of `rounds`, each after what it depends on: round by round, then as
    dvc.yaml lists them.
    """
    import networkx

    listed = list(yaml.safe_load(Path("dvc.yaml").read_text())["stages"])
    with open_repo() as repo:
        graph = order_graph(repo)

    def place(address: str) -> tuple[int, int]:
        stage, round_ = split_address(address)
        return ["", *rounds].index(round_), listed.index(stage)

    wanted = graph.subgraph(
        address for address in graph if split_address(address)[1] in ("", *rounds)
    )
    return list(networkx.lexicographical_topological_sort(wanted, place))


def waiting(addresses: list[str]) -> set[str]:
    """Those of `addresses` that are not up to date, or come after one that is not: they run unless
    its outputs come out equal.
    """
    import networkx

    with open_repo() as repo:
        changed, graph = set(repo.status(targets=addresses)), order_graph(repo)
    return {
        address
        for address in addresses
        if address in changed or networkx.ancestors(graph, address) & changed
    }


def up_to_date(address: str) -> bool:
    """Whether `dvc status` has nothing to say about it."""
    with open_repo() as repo:
        return address not in repo.status(targets=[address])


# glibc gives a freed tensor back to the kernel, which fills the next one with zeros again, page by
# page: a fifth of a CPU's time.
MALLOC = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {
        "hugetlb": 1,
        "trim_threshold": 4 << 30,
        "mmap_threshold": 4 << 30,
        "top_pad": 256 << 20,
    }.items()
)


def command_environment() -> dict[str, str]:
    """The environment of a stage: `python` is our interpreter, whether or not its venv is
    activated.
    """
    folders = [
        Path(fork_server.python()).parent,
        Path(sys.executable).parent,
        os.environ.get("PATH", ""),
    ]
    return {
        **os.environ,
        "PATH": os.pathsep.join(map(str, folders)),
        "PYTHONUNBUFFERED": "1",
        "DVC_NO_ANALYTICS": "true",
    }


def stage_environment() -> dict[str, str]:
    return {"GLIBC_TUNABLES": MALLOC, **command_environment()}


def run(address: str, on_line: Callable[[str], None], force: bool = False) -> Outcome:
    """Bring one stage up to date with `dvc repro --single-item`.

    `on_line` gets each line that the stage or DVC prints, while it runs. `force`: also a stage that
    DVC finds unchanged.

    Raises:
        GateFailed: the stage is a gate that said no; its checks are in the message.
        Unreachable: only the network, or a server elsewhere, was missing.
        BadInput, RondoError: any other failure, with the last lines of the output.
    """
    if not force and up_to_date(address):
        return Outcome.unchanged
    lines: deque[str] = deque(maxlen=SHOWN_LINES)
    text: list[str] = []

    def sort(line: str) -> None:
        if DVC_NOISE.match(line):
            text.append(line)
        elif line:
            lines.append(line)
            on_line(line)

    code = stream(["dvc", "repro", "--single-item", *(["--force"] if force else []), address], sort)
    if code:
        raise _failure(address, code, [*text, *lines], "\n".join(lines))
    return Outcome.restored if any("is cached" in line for line in text) else Outcome.ran


def stream(module: list[str], on_line: Callable[[str], None]) -> int:
    """Run `python -m MODULE ...` as a process group that dies with this call; `on_line` gets what
    it prints, while it runs.
    """
    command = [fork_server.python(), "-m", *module]
    process = process_guard.start(
        command,
        env=stage_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        errors="replace",
    )
    assert process.stdout is not None
    try:
        for line in map(str.rstrip, process.stdout):
            on_line(line)
        return process.wait()
    finally:  # TerminationSignal and KeyboardInterrupt pass here too
        if process.poll() is None:
            process_guard.stop(process)
        process.stdout.close()


# What DVC itself says; the flow says the same once, shorter.
DVC_NOISE = re.compile(
    r"^$|Running stage '|Stage '.*' (is cached|didn't change)|> python |(Updating|Generating) lock file|To track the changes with git"
    r"|\s*git add |To enable auto staging|\s*dvc config core.autostage|Use `dvc push`|Data and pipelines are up"
    r"|ERROR: failed to reproduce .* exited with "
)


ERROR_BY_EXIT_CODE = {
    kind.exit_code: kind for kind in (BadInput, Unreachable)
}  # what a stage ended with, and has said itself


def _failure(address: str, code: int, output: list[str], shown: str) -> RondoError:
    """DVC ends with 255 whatever the stage ended with; that is in its text: `exited with 3`."""
    ended = [int(found) for line in output for found in re.findall(r"exited with (-?\d+)", line)]
    code = ended[-1] if ended else code
    stage, round_ = split_address(address)
    if code == GateFailed.exit_code:
        return GateFailed(
            gate_message(round_, stage.removeprefix("gate_")) or f"{address}: {shown}"
        )
    if kind := ERROR_BY_EXIT_CODE.get(code):
        return kind(
            f"{address}: {shown.replace(f'{address}: {kind.__name__}: ', '')}"
        )  # the stage has said who and what
    return RondoError(
        f"{address} ended with {code}:\n{shown}\nNext step: `dvc repro {address}` runs this stage alone."
    )

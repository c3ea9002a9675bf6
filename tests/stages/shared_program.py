"""The stages that several processes share, in as many as params.yaml says."""

import sys
from importlib import import_module
from typing import Any

from stages.lib.core.launch import local_rank, share_out
from stages.lib.core.params import SHARED, load_params


def refuse_to_write(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: no file of the project is opened for writing."""
    writes = event == "open" and {*str(arguments[1])} & {*"wax+"}
    if writes and not str(arguments[0]).startswith("/"):
        raise PermissionError(f"{arguments[0]} is written by the first process")


def main() -> None:
    params = load_params()
    share_out("tests.stages.shared_program", [], params.launcher.processes)
    if local_rank():
        sys.addaudithook(refuse_to_write)
    for stage in SHARED:
        import_module(f"stages.{stage}.__main__").main(params, "r0")


if __name__ == "__main__":
    main()

"""The command line that all stages share: `python -m stages.<name> --round r0`."""

import argparse
import sys
from collections.abc import Callable

from stages.lib.core.errors import print_failure
from stages.lib.core.launch import is_launched
from stages.lib.core.params import Params, load_params
from stages.lib.core.processes import share_out
from stages.lib.core.progress import print_line, reporting
from stages.lib.core.ram import peak_bytes


def stage_main(name: str, stage: Callable[[Params, str], None]) -> None:
    """Parse `--round`, read params.yaml and run the stage.

    A RondoError, or an error of the disk, is printed in one line and ends the process with its exit
    code. Long passes print how far they are, and the last line has the peak of memory. If several
    processes share the stage's work, this process starts them and waits, and the first of them
    prints.

    Args:
        name: the stage's name, for messages.
        stage: the stage's main function, called with params and round. Stages that all rounds share
            are called without `--round`.
    """
    parser = argparse.ArgumentParser(prog=f"python -m stages.{name}")
    parser.add_argument("--round", help="a round of params.yaml, e.g. r0; default: the first one")
    named = parser.parse_args().round
    address = f"{name}@{named}" if named else name
    try:
        params = load_params()
        round_ = named or next(iter(params.rounds))
        params.check_round(round_)
        number = params.processes(name)
        if number > 1 and not is_launched():
            print_line(f"[{address}] {number} processes")
        share_out(f"stages.{name}", ["--round", round_], params, name, round_)
        with reporting(address):
            stage(params, round_)
            print_line(f"[{address}] peak memory: {peak_memory()}")
    except Exception as error:
        sys.exit(print_failure(error, address))


def peak_memory() -> str:
    """`1.56 GB`: resident memory of this process at its peak; and of tensors on a GPU."""
    sizes = {"": peak_bytes()}
    torch = sys.modules.get("torch")  # a stage without models does not import it
    if torch and torch.cuda.is_initialized():
        sizes[" on the GPU"] = torch.cuda.max_memory_allocated()
    return ", ".join(f"{size / 1e9:.2f} GB{where}" for where, size in sizes.items())

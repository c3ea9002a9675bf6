"""GPUs of a running stage, where the machine has several: one per process of the stage."""

import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

from filelock import FileLock, Timeout

from flows.core.addresses import split_address
from flows.core.services import CACHE
from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params

VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER = Path("/proc/driver/nvidia/gpus")  # a folder per GPU
# for all projects of the user
LOCKS = Path(os.environ.get(CACHE, "~/.cache"), "rondo/gpus").expanduser()


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if VISIBLE in os.environ:
        return [name for name in os.environ[VISIBLE].split(",") if name]
    return [str(number) for number, _ in enumerate(DRIVER.glob("*"))]


def check_enough(params: Params, waiting: Collection[str]) -> None:
    """Check that each process of the stages in `waiting` gets a GPU, if there are any.

    Raises:
        BadInput: there are fewer GPUs.
    """
    count = len(visible_gpus())
    needed = max((processes(params, address) for address in waiting), default=1)
    if 0 < count < needed:
        raise BadInput(
            f"launcher.processes is {needed}, but only {count} of this machine's GPUs can be seen: "
            f"lower it, or change {VISIBLE}"
        )


def processes(params: Params, address: str) -> int:
    """How many processes a stage has on this machine; on a cluster, one here waits for them."""
    stage, _ = split_address(address)
    return 1 if params.cluster(stage) else params.processes(stage)


@contextmanager
def some_gpus(count: int) -> Iterator[None]:
    """Show the child processes of the block `count` of several GPUs: free ones, or else the first
    ones.
    """
    gpus = visible_gpus()
    if len(gpus) < 2:
        yield
        return
    before = os.environ.get(VISIBLE)
    with ExitStack() as held:
        free = list(islice((gpu for gpu in gpus if _take(gpu, held)), count))
        others = [gpu for gpu in gpus if gpu not in free]
        os.environ[VISIBLE] = ",".join([*free, *others][:count])
        try:
            yield
        finally:
            del os.environ[VISIBLE]
            if before is not None:
                os.environ[VISIBLE] = before


def _take(gpu: str, held: ExitStack) -> bool:
    """Whether no other process has the GPU; if so, it is held until `held` ends."""
    LOCKS.mkdir(parents=True, exist_ok=True)
    try:
        held.enter_context(FileLock(LOCKS / f"{gpu.replace('/', '-')}.lock", blocking=False))
    except Timeout:
        return False
    return True

"""A GPU per running stage, where the machine has several: our own trainers use one."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER = Path("/proc/driver/nvidia/gpus")  # a folder per GPU
LOCKS = Path("~/.cache/rondo/gpus").expanduser()  # for all projects of the user


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if VISIBLE in os.environ:
        return [name for name in os.environ[VISIBLE].split(",") if name]
    return [str(number) for number, _ in enumerate(DRIVER.glob("*"))]


@contextmanager
def one_gpu() -> Iterator[None]:
    """Show the child processes of the block one of several GPUs: a free one, or else the first."""
    gpus = visible_gpus()
    if len(gpus) < 2:
        yield
        return
    before = os.environ.get(VISIBLE)
    with ExitStack() as held:
        os.environ[VISIBLE] = next((gpu for gpu in gpus if _take(gpu, held)), gpus[0])
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

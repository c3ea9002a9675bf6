"""The machine that a run would use: its speed, its memory, and what the stages choose on it."""

import json
import subprocess
from dataclasses import dataclass

import psutil

from flows.execution import fork_server
from flows.execution.memory import Limits
from stages.lib.core.params import Params
from stages.lib.core.ram import ram_bytes


@dataclass(frozen=True)
class Machine:
    """The machine that a run would use.

    rates: FLOP/s by dtype. auto, attention: the dtype and the attention that stages choose here.
    memory: bytes of the GPU, or free bytes of RAM if there is no GPU. total: of the GPU or RAM.
    """

    device: str
    rates: dict[str, float]
    auto: str
    memory: float
    total: float
    attention: str
    limits: Limits


def measure() -> Machine:
    """Measure this machine's matrix products (about a second), and free memory."""
    # A process of its own, whose memory is free again when the stages start.
    process = subprocess.run(
        [fork_server.python(), "-m", "flows.execution.matmul_speed"],
        capture_output=True,
        text=True,
        check=True,
    )
    speed = json.loads(process.stdout)
    free, total = speed.pop("memory"), None
    if not free:
        free, total = psutil.virtual_memory().available, ram_bytes()
    return Machine(
        **speed | {"limits": Limits(**speed["limits"])}, memory=free, total=total or free
    )


def dtype_of(params: Params, machine: Machine) -> str:
    """The dtype that the stages compute in."""
    dtype = params.model.dtype.value
    return machine.auto if dtype == "auto" else dtype

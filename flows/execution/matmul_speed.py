"""Measures matrix products on this machine: `python -m flows.execution.matmul_speed` prints JSON.

Keys: device, rates (FLOP/s by dtype), auto (the dtype that stages choose), memory (bytes of the
GPU, 0 without one). It runs as a process of its own, so that its memory is free again at the end.
"""

import json
import time

import torch

from stages.lib.core.params.shared import Dtype
from stages.lib.lm.loading import resolve_dtype

SECONDS = 0.3  # per dtype


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size, rates = 4096 if device == "cuda" else 768, {}
    for name in ("float32", "bfloat16"):
        matrix = torch.ones(size, size, dtype=getattr(torch, name), device=device)
        (matrix @ matrix).sum().item()  # warms up, and waits for the device
        start, products = time.perf_counter(), 0
        while time.perf_counter() - start < SECONDS:
            (matrix @ matrix)[0, 0].item()
            products += 1
        rates[name] = 2 * size**3 * products / (time.perf_counter() - start)
    memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 0
    auto = str(resolve_dtype(Dtype.auto)).removeprefix("torch.")
    print(json.dumps({"device": device, "rates": rates, "auto": auto, "memory": memory}))


if __name__ == "__main__":
    main()

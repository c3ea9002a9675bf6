"""`python -m flows.execution.matmul_speed` prints what this machine multiplies matrices at, as JSON; its memory goes
with its process.
"""

import json
import time

import torch

from stages.lib.core.params.shared import Dtype
from stages.lib.lm.loading import resolve_dtype

SECONDS = 0.3


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size, rates = 4096 if device == "cuda" else 768, {}
    for name in ("float32", "bfloat16"):
        a = torch.ones(size, size, dtype=getattr(torch, name), device=device)
        (a @ a).sum().item()
        start, products = time.perf_counter(), 0
        while time.perf_counter() - start < SECONDS:
            (a @ a)[0, 0].item()
            products += 1
        rates[name] = 2 * size**3 * products / (time.perf_counter() - start)
    memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 0
    auto = str(resolve_dtype(Dtype.auto)).removeprefix("torch.")
    print(json.dumps({"device": device, "rates": rates, "auto": auto, "memory": memory}))


if __name__ == "__main__":
    main()

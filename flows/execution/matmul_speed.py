"""Measures matrix products on this machine: `python -m flows.execution.matmul_speed` prints JSON.

Keys: device, rates (FLOP/s by dtype), auto (the dtype that stages choose), memory (bytes of the
GPU, 0 without one), attention (what `auto` stands for), limits (of stages/lib/lm: piece, cache,
tokens). It runs as a process of its own, so that its memory is free again at the end.
"""

import json
import time
from typing import Any

import torch

from stages.lib.core.params.shared import Dtype, ModelParams
from stages.lib.lm.generation import CPU_CACHE_BYTES, GPU_CACHE_SHARE
from stages.lib.lm.loading import resolve_attention, resolve_dtype
from stages.lib.lm.logprobs import CPU_PIECE, GPU_PIECE
from stages.lib.lm.packing import CPU_BATCH_TOKENS, GPU_BATCH_TOKENS

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
    limits = device_limits(device, memory)
    attention = resolve_attention(ModelParams())
    machine = {"device": device, "rates": rates, "auto": auto, "memory": memory}
    print(json.dumps(machine | {"attention": attention, "limits": limits}))


def device_limits(device: str, memory: float) -> dict[str, Any]:
    """The fields of memory.Limits; memory: bytes of the GPU."""
    if device == "cpu":
        return {"piece": CPU_PIECE, "cache": CPU_CACHE_BYTES, "tokens": CPU_BATCH_TOKENS}
    return {"piece": GPU_PIECE, "cache": GPU_CACHE_SHARE * memory, "tokens": GPU_BATCH_TOKENS}


if __name__ == "__main__":
    main()

"""Time of TRL's log-probabilities with their gradients on a CPU, by the size of its tile of logits.

`OMP_NUM_THREADS=1 python bench/trl_tiles.py`: 640 tokens, SmolLM2-135M's hidden size and
vocabulary, bfloat16. Prints the median of five runs per tile (tokens x entries of the vocabulary),
in turns.
"""

import time
from statistics import median

import torch
from trl.kernels import chunked_logprob

TOKENS, HIDDEN, VOCABULARY, RUNS = 640, 576, 49_152, 5
TILES = ((256, 32_768), (256, 8_192), (256, 4_096), (640, 2_048), (32, 32_768))


def seconds(tile: tuple[int, int]) -> float:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16().requires_grad_()
    head = (0.05 * torch.randn(VOCABULARY, HIDDEN, generator=generator)).bfloat16()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    chunked_logprob.TOKEN_CHUNK_SIZE, width = tile
    start = time.perf_counter()
    outputs = chunked_logprob.ChunkedLogProbFunction.apply(
        states, head, None, targets, 1.0, width, None, 1.0, ()
    )
    outputs[0].sum().backward()
    return time.perf_counter() - start


if __name__ == "__main__":
    times: dict[tuple[int, int], list[float]] = {tile: [] for tile in TILES}
    for _ in range(RUNS):
        for tile in TILES:
            times[tile].append(seconds(tile))
    for (tokens, width), runs in times.items():
        print(f"{tokens} x {width}: {median(runs):.2f} s ({min(runs):.2f} to {max(runs):.2f})")

"""Texts of random tokens, for gpu_trainers.py and gpu_passes.py."""

import torch

from stages.lib.core.types import TokenIds


def random_texts(rows: int, tokens: int, vocabulary: int) -> list[TokenIds]:
    """The same in each process; tokens from 3 on, since special ones come first."""
    generator = torch.Generator().manual_seed(0)
    drawn: list[TokenIds] = torch.randint(
        3, vocabulary, (rows, tokens), generator=generator
    ).tolist()
    return drawn

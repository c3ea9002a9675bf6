"""Random episodes for the comparison with TRL (`test_trl*.py`), and the rewards of both on them."""

import torch

from stages.ppo.common import rewards
from stages.ppo.trainer import functional as F
from tests.stages.ppo.trainer import trl_1_12 as trl

PAD, EOS, CPU = 0, 2, torch.device("cpu")
# lengths of the responses, columns of the batch
SHAPES = {
    "full": ([4, 4, 4], 4),
    "ragged": ([6, 1, 4, 3, 6, 2], 6),
    "padded": ([2, 5, 1], 9),
    "one row": ([3], 5),
}


class Cases:
    """B random episodes in T columns; the (B, T) numbers are random on padding too.

    A response may have no EOS if it is as long as the batch is wide. last, padding, padding_p1: in
    TRL's conventions, see `trl_1_12`.
    """

    def __init__(self, shape: str) -> None:
        (lengths, self.width), generator = SHAPES[shape], torch.Generator().manual_seed(0)

        def normal(*sizes: int) -> torch.Tensor:
            size = (len(lengths), self.width, *sizes)
            return torch.randn(size, generator=generator, dtype=torch.float64)

        self.lengths, self.old, self.values = torch.tensor(lengths), normal() - 2, normal()
        self.mask = torch.arange(self.width) < self.lengths[:, None]
        self.responses = torch.randint(3, 40, self.mask.shape, generator=generator).masked_fill(
            ~self.mask, PAD
        )
        self.ended = (self.lengths < self.width) | (torch.arange(len(lengths)) % 2 == 0)
        self.responses[self.ended, self.lengths[self.ended] - 1] = EOS
        self.last, self.padding, self.padding_p1 = trl.masks(self.responses, PAD)
        self.scores = normal()[:, 0] * 3
        self.new, self.ref = self.old + 0.3 * normal(), self.old + 0.5 * normal()
        self.new_values = self.values + 0.3 * normal()
        self.advantages, self.returns = normal(), self.values + normal()
        self.logits = 2 * normal(7)


def tensor(*rows: object) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, check_dtype=False)


def shape_scores(scores: torch.Tensor, ended: torch.Tensor, **options: float) -> torch.Tensor:
    """Without a length penalty, which TRL does not have."""
    return rewards.shape_scores(
        scores, ended, torch.ones_like(scores), length_penalty=0.0, free_length=0, **options
    )


def trl_rewards(cases: Cases, kl_coef: float = 0.2) -> torch.Tensor:
    return trl.token_rewards(
        cases.scores, cases.old, cases.ref, cases.last, cases.padding, kl_coef
    )[0]


def rondo_rewards(cases: Cases, kl_coef: float = 0.2) -> torch.Tensor:
    return F.token_rewards(cases.scores, cases.old, cases.ref, cases.mask, kl_coef)

"""Noise of PPO's policy gradient at fixed weights, for several advantages: minutes, not runs.

After `make run`, `python docs/bench/gradient_noise.py --updates 0 8 --set seed=3` samples
`--gradients` batches of `batch_size` episodes from the policy before the first update and after 8,
on the models of round r0, and takes the gradient of the policy loss of each batch. c is the mean
product of two batches' gradients over that of a gradient with itself: the share of a gradient's
squared norm that is not noise. The noise scale is batch_size (1 - c) / c: in a batch of so many
episodes, half is noise (McCandlish et al. 2018, arXiv 1812.06162). What is not noise may be bias:
`worth` is how many episodes of the first advantage one of this is worth, by the share of the
squared norm along the gradient without bias (lambda 1, of the other batches). Errors are a
jackknife's over batches, paired.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from curve import make_trainer
from torch import Tensor

from flows.core.config import resolve
from stages.lib.core.params.policy import PpoParams
from stages.lib.lm.logprobs import response_logprobs
from stages.lib.lm.saving import trainable_named
from stages.ppo.common.episodes import Episode
from stages.ppo.trainer import functional as F
from stages.ppo.trainer.advantages import leave_one_out
from stages.ppo.trainer.loop import warm_up_critic
from stages.ppo.trainer.rollout import Rollout, describe
from stages.ppo.trainer.update import PpoTrainer

GROUP = 4  # responses per prompt
UNBIASED, GROUPED = "lam 1.0", ", groups"  # names of an advantage; of batches with whole groups


def advantages_of(rollout: Rollout, p: PpoParams, kl_coef: float) -> dict[str, Tensor]:
    """(B, T) advantages by name. Response i is to prompt i // GROUP."""
    mask = rollout.mask
    rewards = F.token_rewards(rollout.scores, rollout.logprobs, rollout.ref_logprobs, mask, kl_coef)
    groups = torch.arange(len(mask)) // GROUP
    loo = leave_one_out(rewards.sum(1), groups)[:, None] * mask

    def gae(lam: float) -> Tensor:
        return F.gae(rewards, rollout.values, mask, p.gamma, lam)[0]

    # the other responses' mean error of the critic's first value: what it does not know of a prompt
    errors = rewards.sum(1) - rollout.values[:, 0]
    of_others = (errors - leave_one_out(errors, groups))[:, None] * mask
    return {
        f"lam {p.lam}": gae(p.lam),
        **{f"lam {lam}": gae(lam) for lam in (0.6, 0.8, 0.9) if lam != p.lam},
        UNBIASED: gae(1.0),
        "RLOO": loo,
        f"lam {p.lam} less LOO of the critic's errors": (gae(p.lam) - of_others) * mask,
    }


def gradients(
    trainer: PpoTrainer, rollout: Rollout, advantages: dict[str, Tensor], batch: list[int]
) -> dict[str, Tensor]:
    """The gradient of the policy loss of a batch, flat, by advantage."""
    roles, weights = trainer.roles, [weight for _, weight in trainable_named(trainer.roles.policy)]
    packed = trainer.pack_episodes(rollout.responses, batch)
    mask, width = packed.response_mask, packed.response_mask.shape[1]
    hidden = roles.policy_hidden(packed, [rollout.policy_states[i] for i in batch])
    logprobs = response_logprobs(roles.policy, packed, hidden, trainer.params.temperature)
    result = {}
    for name, advantage in advantages.items():
        whitened = F.whiten(advantage[batch, :width], mask)
        loss = -F.masked_mean(logprobs * whitened, mask)
        parts = torch.autograd.grad(loss, weights, retain_graph=True)
        result[name] = torch.cat([part.flatten() for part in parts])
    return result


def mean_between(products: Tensor, keep: list[int]) -> float:
    """The mean of (n, n) products of gradients of one batch with gradients of another."""
    kept = products[keep][:, keep]
    return float((kept.sum() - kept.diagonal().sum()) / (len(keep) * (len(keep) - 1)))


def jackknife(function: Callable[[list[int]], float], number: int) -> tuple[float, float]:
    """The value of all, and its standard error."""
    everything = list(range(number))
    parts = [function([j for j in everything if j != i]) for i in everything]
    mean = sum(parts) / number
    squares = sum((part - mean) ** 2 for part in parts)
    return function(everything), math.sqrt((number - 1) / number * squares)


class Gradients:
    """(n, weights) gradients of n batches, by their products with each other and with those of the
    same batches without bias.
    """

    def __init__(self, gradients: Tensor, unbiased: Tensor) -> None:
        self.own, self.true = gradients @ gradients.T, gradients @ unbiased.T
        self.unbiased = unbiased @ unbiased.T

    def share(self, keep: list[int]) -> float:
        """c of the batches `keep`."""
        return mean_between(self.own, keep) / float(self.own.diagonal()[keep].mean())

    def along(self, keep: list[int]) -> float:
        """The share of the squared norm along the gradient without bias."""
        norms = float(self.own.diagonal()[keep].mean()) * mean_between(self.unbiased, keep)
        return mean_between(self.true, keep) ** 2 / norms


def noise(gradients: Gradients, first: Gradients, batch_size: int) -> dict[str, float]:
    """The noise scale, and the worth in episodes of `first`."""
    number = len(gradients.own)
    c, c_error = jackknife(gradients.share, number)
    value, value_error = jackknife(lambda keep: gradients.along(keep) / first.along(keep), number)
    scale = batch_size * (1 - c) / c if c > 0 else math.inf
    return {
        "c": c,
        "c_error": c_error,
        "noise_scale": scale,
        "worth": value,
        "worth_error": value_error,
    }


def measure(trainer: PpoTrainer, prompts: list[Episode], number: int) -> dict[str, Any]:
    """Noise scales of the policy as it is."""
    p, kl_coef = trainer.params, trainer.kl_controller.kl_coef
    count = number * p.batch_size // GROUP
    repeats = -(-count // len(prompts))
    chosen = [episode for episode in (prompts * repeats)[:count] for _ in range(GROUP)]
    rollout = trainer.rollout(chosen)
    trainer.rollout_pass = None
    advantages = advantages_of(rollout, p, kl_coef)
    # a batch has each prompt once, or with GROUP responses
    order = [k + GROUP * i for k in range(GROUP) for i in range(count)]
    groups = list(range(len(order)))
    by_name: dict[str, list[Tensor]] = {}
    first = next(iter(advantages))
    for kind, episodes_in_order in (("", order), (GROUPED, groups)):
        # leave-one-out sees nothing of a prompt that is alone in its batch
        used = {n: a for n, a in advantages.items() if bool(kind) == ("LOO" in n) or n == UNBIASED}
        for start in range(0, len(order), p.batch_size):
            batch = episodes_in_order[start : start + p.batch_size]
            for name, gradient in gradients(trainer, rollout, used, batch).items():
                by_name.setdefault(name + kind, []).append(gradient)
    stacked = {name: torch.stack(rows) for name, rows in by_name.items()}
    compared = {
        name: Gradients(one, stacked[UNBIASED + GROUPED * name.endswith(GROUPED)])
        for name, one in stacked.items()
    }
    rows = {name: noise(one, compared[first], p.batch_size) for name, one in compared.items()}
    names = ("explained_variance", "value_mean", "score_mean", "kl", "response_length")
    described = describe(rollout, trainer.sft_length or 1.0)
    return {name: described[name] for name in names} | {"advantages": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--updates", type=int, nargs="+", default=[0, 8], help="measure after these"
    )
    parser.add_argument("--gradients", type=int, default=32, help="batches at each of them")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    params = resolve("keep", None, options.set)
    trainer, selector = make_trainer(params)
    started = time.perf_counter()
    selector.validate(0)
    warm_up_critic(trainer, selector)
    for update in options.updates:
        while trainer.updates < update:
            _, metrics = trainer.step()
            print(trainer.updates, metrics, file=sys.stderr, flush=True)
        state = trainer.generator.get_state()
        result = {"update": update, "seconds": time.perf_counter() - started}
        print(json.dumps(result | measure(trainer, trainer.prompts, options.gradients), indent=1))
        trainer.generator.set_state(state)


if __name__ == "__main__":
    main()

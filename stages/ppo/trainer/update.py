"""One PPO update: sample prompts, generate, score, reference KL, advantages, update."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stages.lib.core.errors import Diverged, RondoError
from stages.lib.core.params.policy import KlControl, LossLevel, PpoParams
from stages.lib.core.types import Row, StateDict, TokenIds
from stages.lib.lm.logprobs import entropy_from_logits
from stages.lib.lm.packing import Packed, pack, unwrap_peft
from stages.ppo.common.episodes import Episode, planned_updates
from stages.ppo.trainer import functional as F
from stages.ppo.trainer.optimizer import MasterWeightOptimizer
from stages.ppo.trainer.resume import random_state, set_random_state
from stages.ppo.trainer.roles import PolicyCriticOutput, Roles

KL_RULES = {
    KlControl.adaptive: F.ziegler,
    KlControl.proportional: F.proportional,
    KlControl.fixed: F.fixed,
}


@dataclass(frozen=True)
class Rollout:
    """One rollout of B episodes; all (B, T) arrays are zero behind a response's end.

    prompts, responses: tokens of each episode. ended: (B,) bool, EOS was sampled. raw_scores: (B,)
    of the reward model, on the response with EOS at its end. calibrated: (B,) the same in standard
    deviations of demonstrations. parts: what the further rewards say, by name. scores: (B,) their
    weighted sum with calibrated, clipped and penalised. logprobs, entropies, ref_logprobs (nats),
    values, advantages (whitened), returns: (B, T). mask: (B, T) bool. policy_states, critic_states:
    for each row (L, H) below their adapters, the same at every epoch.
    """

    rows: list[Row]
    prompts: list[TokenIds]
    responses: list[TokenIds]
    texts: list[str]
    ended: Tensor
    parts: dict[str, list[float]]
    raw_scores: Tensor
    calibrated: Tensor
    scores: Tensor
    logprobs: Tensor
    entropies: Tensor
    ref_logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    mask: Tensor
    policy_states: list[Tensor]
    critic_states: list[Tensor]

    @property
    def sequence_kl(self) -> Tensor:
        """(B,) nats a sequence."""
        return (F.kl_k1(self.logprobs, self.ref_logprobs) * self.mask).sum(1)


class RolloutForward(NamedTuple):
    """What the four roles say of a micro-batch, as in `Rollout`; nothing here has gradients."""

    raw_scores: Tensor
    logprobs: Tensor
    entropies: Tensor
    ref_logprobs: Tensor
    values: Tensor
    mask: Tensor
    policy_states: list[Tensor]
    critic_states: list[Tensor]


class PpoTrainer:
    """State of a run: roles, optimisers, KL coefficient, random streams, place in the prompts."""

    def __init__(self, roles: Roles, prompts: list[Episode], params: PpoParams, seed: int) -> None:
        self.roles, self.params, self.prompts = roles, params, prompts
        self.generator = torch.Generator().manual_seed(seed)
        self.order: list[int] = []
        self.updates = 0
        self.live: PolicyCriticOutput | None = (
            None  # of the rollout at hand, until the first epoch has used it
        )
        self.kl = F.AdaptiveKLController(
            params.kl_coef, params.target_kl, params.kl_horizon, KL_RULES[params.kl_control]
        )
        self.planned_updates = planned_updates(params)
        rates = ((roles.policy, params.learning_rate), (roles.critic, params.critic_learning_rate))
        self.learners = [MasterWeightOptimizer(model, rate, self._rate) for model, rate in rates]

    def _rate(self, update: int) -> float:
        """Linear warm-up, then linear decay to a tenth: the last updates still learn."""
        warm = min(1.0, (update + 1) / (self.params.warmup_updates + 1))
        return warm * (1 - 0.9 * update / max(self.planned_updates, 1))

    def step(self) -> tuple[Rollout, dict[str, float]]:
        """One update; returns its rollout and its metrics."""
        rollout = self.rollout(self.sample_prompts())
        self.check_finite(
            {
                name: getattr(rollout, name)
                for name in ("raw_scores", "logprobs", "ref_logprobs", "values")
            }
        )
        if self.updates == 0:
            self.check_initial_ratio(rollout)
        metrics = describe(rollout) | {"kl_coef": self.kl.kl_coef} | self.optimise(rollout)
        self.kl.update(float(rollout.sequence_kl.mean()), len(rollout.rows))
        self.updates += 1
        return rollout, metrics

    def state(self) -> StateDict:
        """All that the next update depends on, for `load_state`."""
        return {
            "updates": self.updates,
            "order": self.order,
            "kl_coef": self.kl.kl_coef,
            "learners": [learner.state() for learner in self.learners],
            "generator": self.generator.get_state(),
            "random": random_state(),
        }

    def load_state(self, state: StateDict) -> None:
        self.updates, self.order, self.kl.kl_coef = (
            state["updates"],
            state["order"],
            state["kl_coef"],
        )
        for learner, saved in zip(self.learners, state["learners"], strict=True):
            learner.load_state(saved)
        self.generator.set_state(state["generator"])
        set_random_state(state["random"])

    def sample_prompts(self) -> list[Episode]:
        """The next `batch_size` prompts of an endless reshuffled pass."""
        while len(self.order) < self.params.batch_size:
            self.order += torch.randperm(len(self.prompts), generator=self.generator).tolist()
        taken, self.order = (
            self.order[: self.params.batch_size],
            self.order[self.params.batch_size :],
        )
        return [self.prompts[i] for i in taken]

    @torch.no_grad()
    def rollout(self, batch: list[Episode]) -> Rollout:
        """Steps 1 to 5. Where one micro-batch holds all, its forward pass also serves the first
        epoch: the weights are the same.
        """
        p, tokenizer = self.params, self.roles.tokenizer
        # 1. + 2. prompts in, responses out
        prompts = [tokens for _, tokens in batch]
        responses = self.roles.sample(prompts, p, self.generator)
        ended = torch.tensor([r[-1] == tokenizer.eos_token_id for r in responses])
        # 3. + 4. what reward model, reference, policy and critic say of them
        pieces = [
            self.forward(self.packed(prompts, responses, rows), p.micro_batch_size == p.batch_size)
            for rows in self.micro_batches(range(len(batch)))
        ]
        told = RolloutForward(
            *(concat_padded(list(column)) for column in zip(*pieces, strict=True))
        )
        calibrated = self.roles.calibrated(told.raw_scores)
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        parts = self.roles.rewards([row["prompt"] for row, _ in batch], texts)
        scores = self.roles.rewards.combine(
            p, calibrated, parts, ended.to(calibrated.device), told.mask.sum(1)
        )
        # 5. rewards and advantages
        rewards = F.token_rewards(
            scores, told.logprobs, told.ref_logprobs, told.mask, self.kl.kl_coef
        )
        if p.whiten_rewards:
            rewards = F.whiten(rewards, told.mask, shift_mean=False)
        advantages, returns = F.gae(rewards, told.values, told.mask, p.gamma, p.lam)
        return Rollout(
            rows=[row for row, _ in batch],
            prompts=prompts,
            responses=responses,
            texts=texts,
            ended=ended,
            parts=parts,
            calibrated=calibrated,
            scores=scores,
            advantages=F.whiten(advantages, told.mask),
            returns=returns,
            **told._asdict(),
        )

    def forward(self, packed: Packed, keep: bool) -> RolloutForward:
        """What the four roles say of a micro-batch; `keep`: the part that learns too, for the first
        step.
        """
        roles, temperature = self.roles, self.params.temperature
        ref_logprobs, policy_states, shared = roles.ref_logprobs(packed, temperature)
        raw_scores, critic_states = roles.raw_scores(packed, shared)
        with torch.set_grad_enabled(keep):
            live = roles.live(packed, policy_states, critic_states, temperature)
        self.live = live if keep else None
        return RolloutForward(
            raw_scores=raw_scores,
            logprobs=live.logprobs.detach(),
            entropies=packed.to_rows(entropy_from_logits(live.logits.detach(), temperature)),
            ref_logprobs=ref_logprobs,
            values=live.values.detach(),
            mask=packed.response_mask,
            policy_states=policy_states,
            critic_states=critic_states,
        )

    def packed(
        self, prompts: list[TokenIds], responses: list[TokenIds], rows: range | list[int]
    ) -> Packed:
        """Every row closed with EOS, where the reward model reads it."""
        device = next(self.roles.policy.parameters()).device
        return pack(
            [prompts[i] for i in rows],
            [responses[i] for i in rows],
            device,
            self.roles.tokenizer.eos_token_id,
        )

    def micro_batches(self, rows: range | list[int]) -> Iterator[range | list[int]]:
        size = self.params.micro_batch_size
        return (rows[i : i + size] for i in range(0, len(rows), size))

    def check_finite(self, values: dict[str, Tensor]) -> None:
        """
        Raises:
            Diverged: names what is NaN or infinite, and what to do.
        """
        if bad := [name for name, value in values.items() if not bool(torch.isfinite(value).all())]:
            fix = (
                "look at the reward model's scores (rounds/<round>/reward)"
                if "raw_scores" in bad
                else "lower ppo.learning_rate"
            )
            raise Diverged(
                f"update {self.updates + 1}: {', '.join(bad)} not finite; the step was not applied and what was saved last is kept. "
                f"Next: {fix}"
            )

    def check_initial_ratio(self, rollout: Rollout) -> None:
        """Before anything is learnt, policy and reference are one, and so are the policy on shared
        states and as one whole.

        A violation means dropout, a wrong mask, temperature or padding, or a model that cannot be
        split: PPO would learn from noise.
        """
        tolerance = 0.05 if unwrap_peft(self.roles.policy).dtype is torch.bfloat16 else 1e-3
        kl = float((rollout.logprobs - rollout.ref_logprobs).abs().max())
        batches = self.micro_batches(
            range(len(rollout.rows))
        )  # those of the rollout: in bfloat16 other ones round otherwise
        whole = concat_padded(
            [
                self.roles.whole_logprobs(
                    self.packed(rollout.prompts, rollout.responses, rows), self.params.temperature
                )
                for rows in batches
            ]
        )
        ratio = float(((whole - rollout.logprobs)[rollout.mask].exp() - 1).abs().max())
        if not (kl <= tolerance and ratio <= tolerance):
            raise RondoError(
                f"ppo: at update 1 the ratio must be 1 and the KL 0, but they are off by {ratio:.3g} and {kl:.3g} nats (at most "
                f"{tolerance}); look for dropout, a changed prompt template or padding"
            )

    def optimise(self, rollout: Rollout) -> dict[str, float]:
        """6. num_ppo_epochs passes over the rollout in reshuffled mini-batches; metrics are means
        over all of them.
        """
        p, steps = self.params, 0
        live, self.live = self.live, None
        totals: dict[str, float] = {}
        for _ in range(p.num_ppo_epochs):
            order = (
                list(range(len(rollout.rows)))
                if live
                else torch.randperm(len(rollout.rows), generator=self.generator).tolist()
            )
            for start in range(0, len(order), p.mini_batch_size):
                metrics = self.optimiser_step(
                    rollout, order[start : start + p.mini_batch_size], live
                )
                live = None
                totals = {name: totals.get(name, 0.0) + value for name, value in metrics.items()}
                steps += 1
        for learner in self.learners:
            learner.scheduler.step()
        rate = float(self.learners[0].scheduler.get_last_lr()[0])
        return {name: value / steps for name, value in totals.items()} | {"learning_rate": rate}

    def optimiser_step(
        self, rollout: Rollout, rows: list[int], live: PolicyCriticOutput | None
    ) -> dict[str, float]:
        """One step on a mini-batch, micro-batch by micro-batch (or on its `live` pass); the loss is
        the mean over all of its tokens.
        """
        p, tokens = self.params, rollout.mask[rows].sum()
        sums: dict[str, Tensor] = {}
        for micro in self.micro_batches(rows):
            shares = self.backward(rollout, micro, live, tokens, len(rows))
            sums = {name: share + sums.get(name, 0.0) for name, share in shares.items()}
        norms = [learner.clip(p.max_grad_norm) for learner in self.learners]
        sums |= {"policy_grad_norm": norms[0], "critic_grad_norm": norms[1]}
        self.check_finite(sums)
        for learner in self.learners:
            learner.step()
        return {name: float(value) for name, value in sums.items()}

    def backward(
        self,
        rollout: Rollout,
        micro: range | list[int],
        live: PolicyCriticOutput | None,
        tokens: Tensor,
        episodes: int,
    ) -> dict[str, Tensor]:
        """Gradients of a micro-batch's part of the loss over a mini-batch's `tokens` and
        `episodes`, and its parts of the metrics.
        """
        p, packed = self.params, self.packed(rollout.prompts, rollout.responses, micro)
        mask, width = packed.response_mask, packed.response_mask.shape[1]
        old = {
            name: getattr(rollout, name)[micro, :width]
            for name in ("logprobs", "values", "advantages", "returns")
        }
        policy_states, critic_states = (
            [states[i] for i in micro] for states in (rollout.policy_states, rollout.critic_states)
        )
        now = live or self.roles.live(packed, policy_states, critic_states, p.temperature)
        policy_loss, clip_fraction = self.policy_loss(
            now.logprobs, old["logprobs"], old["advantages"], mask, tokens, episodes
        )
        bonus = (
            p.entropy_coef * entropy_from_logits(now.logits, p.temperature).sum() / tokens
            if p.entropy_coef
            else 0.0
        )
        per_value, value_clipped = F.value_loss(
            now.values, old["values"], old["returns"], p.cliprange_value
        )
        value_loss = (per_value * mask).sum() / tokens
        (policy_loss - bonus + p.vf_coef * value_loss).backward()
        for learner in self.learners:
            learner.accumulate_grads()
        log_ratio = (now.logprobs - old["logprobs"]).detach()
        shares = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "clip_fraction": clip_fraction,
            "value_clip_fraction": (value_clipped * mask).sum() / tokens,
            "approx_kl": ((log_ratio.exp() - 1 - log_ratio) * mask).sum() / tokens,
            "ratio_mean": (log_ratio.exp() * mask).sum() / tokens,
        }
        return {name: share.detach() for name, share in shares.items()}

    def policy_loss(
        self,
        logprobs: Tensor,
        old: Tensor,
        advantages: Tensor,
        mask: Tensor,
        tokens: Tensor,
        episodes: int,
    ) -> tuple[Tensor, Tensor]:
        """A micro-batch's part of the mean loss over a mini-batch's `tokens` or `episodes`, and of
        the share that is clipped.
        """
        if self.params.loss_level is LossLevel.sequence:
            each, clipped = F.sequence_policy_loss(
                logprobs, old, advantages, mask, self.params.cliprange
            )
            return each.sum() / episodes, clipped.sum() / episodes
        each, clipped = F.policy_loss(logprobs, old, advantages, self.params.cliprange)
        return (each * mask).sum() / tokens, (clipped * mask).sum() / tokens


def concat_padded(parts: list[Any]) -> Any:
    """Stack (b,) or (b, t) parts along rows, the latter padded to the longest t; lists of b end to
    end.
    """
    if isinstance(parts[0], list):
        return list(chain(*parts))
    if parts[0].dim() == 1:
        return torch.cat(parts)
    width = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])


def describe(rollout: Rollout) -> dict[str, float]:
    """The rollout in numbers: scores, KL (nats a sequence), entropy (nats a token), length
    (tokens), critic.
    """
    return {f"score_{name}": fmean(scores) for name, scores in rollout.parts.items()} | {
        "score_mean": float(rollout.calibrated.mean()),
        "score_std": float(rollout.calibrated.std()),
        "reward_mean": float(rollout.scores.mean()),
        "reward_std": float(rollout.scores.std()),
        "kl": float(rollout.sequence_kl.mean()),
        "kl_k3": float(
            (F.kl_k3(rollout.logprobs, rollout.ref_logprobs) * rollout.mask).sum(1).mean()
        ),
        "entropy": float(F.masked_mean(rollout.entropies, rollout.mask)),
        "response_length": float(rollout.mask.sum(1).float().mean()),
        "eos_rate": float(rollout.ended.float().mean()),
        "explained_variance": F.explained_variance(rollout.values, rollout.returns, rollout.mask),
        "value_mean": float(F.masked_mean(rollout.values, rollout.mask)),
        "return_mean": float(F.masked_mean(rollout.returns, rollout.mask)),
    }

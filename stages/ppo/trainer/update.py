"""One PPO update: sample prompts, generate, score, reference KL, advantages, update."""

from collections.abc import Iterator

import torch
from torch import Tensor

from stages.lib.core.errors import Diverged, RondoError
from stages.lib.core.params.policy import KlControl, LossLevel, PpoParams
from stages.lib.core.types import StateDict, TokenIds
from stages.lib.lm.packing import Packed, pack, unwrap_peft
from stages.ppo.common.episodes import Episode, planned_updates
from stages.ppo.trainer import functional as F
from stages.ppo.trainer.optimizer import MasterWeightOptimizer
from stages.ppo.trainer.resume import random_state, set_random_state
from stages.ppo.trainer.roles import Roles
from stages.ppo.trainer.rollout import (
    RoleOutputs,
    Rollout,
    RolloutPass,
    concat_outputs,
    concat_padded,
    describe,
)

KL_RULES = {
    KlControl.adaptive: F.ziegler,
    KlControl.proportional: F.proportional,
    KlControl.fixed: F.fixed,
}
Indices = range | list[int]


class PpoTrainer:
    """Trains policy and critic, one update per call of `step`.

    Args:
        roles: the four models.
        prompts: rows and tokens of the prompts to train on.
        params: the section `ppo` of params.yaml.
        seed: of the order of prompts, of sampling and of mini-batches.
    """

    def __init__(self, roles: Roles, prompts: list[Episode], params: PpoParams, seed: int) -> None:
        self.roles, self.params, self.prompts = roles, params, prompts
        self.generator = torch.Generator().manual_seed(seed)
        self.order: list[int] = []  # indices of the prompts that come next
        self.updates = 0
        # the rollout's own forward pass with gradients, until the first optimizer step has used it
        self.rollout_pass: RolloutPass | None = None
        self.kl_controller = F.AdaptiveKLController(
            params.kl_coef,
            params.target_kl_per_token,
            params.kl_horizon,
            KL_RULES[params.kl_control],
        )
        self.planned_updates = planned_updates(params)
        # policy and critic have rates of their own, and their gradients are clipped separately
        self.optimizers = [
            MasterWeightOptimizer(roles.policy, params.learning_rate, self._rate),
            MasterWeightOptimizer(roles.critic, params.critic_learning_rate, self._rate),
        ]

    def _rate(self, update: int) -> float:
        """Linear warm-up, then linear decay to a tenth, so that the last updates still train."""
        warmup = min(1.0, (update + 1) / (self.params.warmup_updates + 1))
        return warmup * (1 - 0.9 * update / max(self.planned_updates, 1))

    def step(self) -> tuple[Rollout, dict[str, float]]:
        """One PPO update.

        Returns:
            The rollout, and the metrics of the update.

        Raises:
            Diverged: a score, a log-probability, a loss or a gradient is not finite.
            RondoError: before the first update, policy and reference differ.
        """
        # 1. sample prompts
        batch = self.sample_prompts()
        # 2. generate, 3. score, 4. reference KL, 5. advantages
        rollout = self.rollout(batch)
        checked = ("raw_scores", "logprobs", "ref_logprobs", "values")
        self.check_finite({name: getattr(rollout, name) for name in checked})
        if self.updates == 0:
            self.check_initial_ratio(rollout)
        metrics = describe(rollout) | {"kl_coef": self.kl_controller.kl_coef}
        # 6. update
        metrics |= self.optimize(rollout)
        self.kl_controller.update(metrics["kl_per_token"], len(rollout.rows))
        self.updates += 1
        return rollout, metrics

    def sample_prompts(self) -> list[Episode]:
        """1. Sample prompts: the next `batch_size` of an endless pass, reshuffled at each turn."""
        while len(self.order) < self.params.batch_size:
            self.order += torch.randperm(len(self.prompts), generator=self.generator).tolist()
        chosen = self.order[: self.params.batch_size]
        self.order = self.order[self.params.batch_size :]
        return [self.prompts[i] for i in chosen]

    @torch.no_grad()
    def rollout(self, batch: list[Episode]) -> Rollout:
        """Generate responses to a batch of prompts and compute their advantages."""
        p, roles = self.params, self.roles
        rows, prompts = [row for row, _ in batch], [tokens for _, tokens in batch]

        # 2. generate
        responses = roles.sample(prompts, p, self.generator)
        texts = roles.tokenizer.batch_decode(responses, skip_special_tokens=True)
        ended = torch.tensor([roles.ends.end(response) for response in responses])

        # Reward model, reference, policy and critic run together per micro-batch, since the layers
        # that they share run once. If one micro-batch is the whole batch, its pass also serves the
        # first optimizer step, since the weights are still the same.
        keep_gradients = p.micro_batch_size == p.batch_size
        outputs = concat_outputs(
            [
                self.forward(self.pack_episodes(prompts, responses, micro_batch), keep_gradients)
                for micro_batch in self.micro_batches(range(len(batch)))
            ]
        )

        # 3. score: the reward model's calibrated score and the further rewards
        calibrated = roles.calibrate(outputs.raw_scores)
        parts = roles.rewards([row["prompt"] for row in rows], texts)
        scores = roles.rewards.combine(
            p, calibrated, parts, ended.to(calibrated.device), outputs.mask.sum(1)
        )

        # 4. reference KL: a penalty per token
        kl_coef = self.kl_controller.kl_coef
        rewards = F.token_rewards(
            scores, outputs.logprobs, outputs.ref_logprobs, outputs.mask, kl_coef
        )

        # 5. advantages
        if p.whiten_rewards:
            rewards = F.whiten(rewards, outputs.mask, shift_mean=False)
        advantages, returns = F.gae(rewards, outputs.values, outputs.mask, p.gamma, p.lam)
        return Rollout(
            rows=rows,
            prompts=prompts,
            responses=responses,
            texts=texts,
            ended=ended,
            parts=parts,
            calibrated=calibrated,
            scores=scores,
            advantages=F.whiten(advantages, outputs.mask),
            returns=returns,
            sampler_log_ratio=roles.sampler_log_ratio(outputs.logprobs, outputs.mask),
            **outputs._asdict(),
        )

    def optimize(self, rollout: Rollout) -> dict[str, float]:
        """6. Update policy and critic: `num_ppo_epochs` passes over the rollout in mini-batches.

        Returns:
            Means of the metrics over all optimizer steps, and the learning rate.
        """
        p, steps = self.params, 0
        rollout_pass, self.rollout_pass = self.rollout_pass, None
        totals: dict[str, float] = {}
        for _ in range(p.num_ppo_epochs):
            # the rollout's own pass has its rows in order; later epochs are reshuffled
            order = (
                list(range(len(rollout.rows)))
                if rollout_pass
                else torch.randperm(len(rollout.rows), generator=self.generator).tolist()
            )
            for start in range(0, len(order), p.mini_batch_size):
                mini_batch = order[start : start + p.mini_batch_size]
                metrics = self.optimizer_step(rollout, mini_batch, rollout_pass)
                rollout_pass = None
                totals = {name: totals.get(name, 0.0) + value for name, value in metrics.items()}
                steps += 1
        for optimizer in self.optimizers:
            optimizer.scheduler.step()
        rate = float(self.optimizers[0].scheduler.get_last_lr()[0])
        return {name: value / steps for name, value in totals.items()} | {"learning_rate": rate}

    def forward(self, packed: Packed, keep_gradients: bool) -> RoleOutputs:
        """Run the four roles on a micro-batch.

        keep_gradients: keep the pass of policy and critic for the first optimizer step.
        """
        roles, temperature = self.roles, self.params.temperature
        reference = roles.run_reference(packed)
        raw_scores, critic_states = roles.raw_scores(packed, reference.shared)
        with torch.set_grad_enabled(keep_gradients):
            hidden = roles.policy_hidden(packed, reference.policy_states)
            values = roles.values(packed, critic_states, hidden)
            if keep_gradients:
                logprobs = roles.logprobs(packed, hidden, temperature)
                self.rollout_pass = RolloutPass(hidden, logprobs, values)
        statistics = roles.compare(packed, hidden, reference.hidden, temperature)
        return RoleOutputs(
            raw_scores=raw_scores,
            logprobs=statistics.logprobs,
            entropies=statistics.entropies,
            ref_logprobs=statistics.ref_logprobs,
            kl=statistics.kl,
            values=values.detach(),
            mask=packed.response_mask,
            policy_states=reference.policy_states,
            critic_states=critic_states,
        )

    def pack_episodes(
        self, prompts: list[TokenIds], responses: list[TokenIds], indices: Indices
    ) -> Packed:
        """The chosen episodes, which end with EOS, where the reward model reads its score."""
        device = next(self.roles.policy.parameters()).device
        return pack(
            [prompts[i] for i in indices],
            [responses[i] for i in indices],
            device,
            self.roles.ends,
        )

    def micro_batches(self, indices: Indices) -> Iterator[Indices]:
        """Split a batch into parts of `micro_batch_size`."""
        size = self.params.micro_batch_size
        return (indices[i : i + size] for i in range(0, len(indices), size))

    def check_finite(self, tensors: dict[str, Tensor]) -> None:
        """
        Raises:
            Diverged: names the tensors with NaN or infinite values, and the next step.
        """
        bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
        if bad:
            fix = (
                "look at the reward model's scores (rounds/<round>/reward)"
                if "raw_scores" in bad
                else "lower ppo.learning_rate"
            )
            raise Diverged(
                f"update {self.updates + 1}: {', '.join(bad)} not finite; the step was not applied "
                f"and the last saved state is kept. Next: {fix}"
            )

    def check_initial_ratio(self, rollout: Rollout) -> None:
        """Before the first update, policy and reference must agree, and so must the policy on
        shared states and the policy run as a whole.

        Raises:
            RondoError: they differ, because of dropout, a wrong mask, temperature or padding, or a
                model that cannot be split into layers. PPO would train on noise.
        """
        tolerance = 0.05 if unwrap_peft(self.roles.policy).dtype is torch.bfloat16 else 1e-3
        kl = float((rollout.logprobs - rollout.ref_logprobs).abs().max())
        # the micro-batches of the rollout: in bfloat16, others would be rounded differently
        micro_batches = self.micro_batches(range(len(rollout.rows)))
        whole_logprobs = concat_padded(
            [
                self.roles.whole_logprobs(
                    self.pack_episodes(rollout.prompts, rollout.responses, micro_batch),
                    self.params.temperature,
                )
                for micro_batch in micro_batches
            ]
        )
        log_ratio = (whole_logprobs - rollout.logprobs)[rollout.mask]
        ratio_error = float((log_ratio.exp() - 1).abs().max())
        if not (kl <= tolerance and ratio_error <= tolerance):
            raise RondoError(
                "ppo: at update 1 the ratio must be 1 and the KL 0, but they are off by "
                f"{ratio_error:.3g} and {kl:.3g} nats (at most {tolerance}); look for dropout, a "
                "changed prompt template or padding"
            )

    def optimizer_step(
        self, rollout: Rollout, mini_batch: list[int], rollout_pass: RolloutPass | None
    ) -> dict[str, float]:
        """One optimizer step on a mini-batch; returns its metrics.

        The loss is the mean over all tokens of the mini-batch, in however many micro-batches it is
        computed. `rollout_pass`: used in place of a new forward pass, if given.
        """
        p, tokens = self.params, rollout.mask[mini_batch].sum()
        sums: dict[str, Tensor] = {}
        for micro_batch in self.micro_batches(mini_batch):
            shares = self.backward(rollout, micro_batch, rollout_pass, tokens, len(mini_batch))
            sums = {name: share + sums.get(name, 0.0) for name, share in shares.items()}
        policy_norm, critic_norm = (
            optimizer.clip(p.max_grad_norm) for optimizer in self.optimizers
        )
        sums |= {"policy_grad_norm": policy_norm, "critic_grad_norm": critic_norm}
        # before the weights change, so that a diverged run keeps its last good weights
        self.check_finite(sums)
        for optimizer in self.optimizers:
            optimizer.step()
        return {name: float(value) for name, value in sums.items()}

    def backward(
        self,
        rollout: Rollout,
        micro_batch: Indices,
        rollout_pass: RolloutPass | None,
        tokens: Tensor,
        episodes: int,
    ) -> dict[str, Tensor]:
        """Accumulate the gradients of a micro-batch: of the policy, then of the critic, so that the
        activations of only one of them are in memory.

        Args:
            rollout, micro_batch: the episodes.
            rollout_pass: used in place of a new forward pass, if given.
            tokens, episodes: numbers of the whole mini-batch, over which losses are means.

        Returns:
            The micro-batch's share of each metric of the mini-batch.
        """
        p = self.params
        packed = self.pack_episodes(rollout.prompts, rollout.responses, micro_batch)
        # a micro-batch is only as wide as its own longest response
        mask, width = packed.response_mask, packed.response_mask.shape[1]
        old_logprobs, old_values, advantages, returns = (
            column[micro_batch, :width]
            for column in (rollout.logprobs, rollout.values, rollout.advantages, rollout.returns)
        )
        roles = self.roles
        if rollout_pass:
            hidden, logprobs, values = rollout_pass
        else:
            hidden = roles.policy_hidden(packed, [rollout.policy_states[i] for i in micro_batch])
            logprobs = roles.logprobs(packed, hidden, p.temperature)
        policy_loss, clip_fraction = self.policy_loss(
            logprobs, old_logprobs, advantages, mask, tokens, episodes
        )
        loss = policy_loss
        if p.entropy_coef:
            entropies = roles.entropies(packed, hidden, p.temperature)
            loss = loss - p.entropy_coef * entropies.sum() / tokens
        if roles.critic_view:  # else the critic is a head on the policy: one backward pass for both
            loss.backward()
            loss = torch.zeros_like(loss)
        if not rollout_pass:
            values = roles.values(packed, [rollout.critic_states[i] for i in micro_batch], hidden)
        token_value_loss, value_clipped = F.value_loss(
            values, old_values, returns, p.cliprange_value
        )
        value_loss = (token_value_loss * mask).sum() / tokens
        (loss + p.vf_coef * value_loss).backward()
        for optimizer in self.optimizers:
            optimizer.accumulate_grads()
        ratio = (logprobs.detach() - old_logprobs).exp()
        shares = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "clip_fraction": clip_fraction,
            "value_clip_fraction": (value_clipped * mask).sum() / tokens,
            "approx_kl": (F.kl_k3(old_logprobs, logprobs) * mask).sum() / tokens,
            "ratio_mean": (ratio * mask).sum() / tokens,
        }
        return {name: share.detach() for name, share in shares.items()}

    def policy_loss(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        tokens: Tensor,
        episodes: int,
    ) -> tuple[Tensor, Tensor]:
        """A micro-batch's share of the mini-batch's mean loss, per token or per episode
        (`loss_level`), and of the fraction that is clipped.
        """
        if self.params.loss_level is LossLevel.sequence:
            losses, clipped = F.sequence_policy_loss(
                logprobs, old_logprobs, advantages, mask, self.params.cliprange_sequence
            )
            return losses.sum() / episodes, clipped.sum() / episodes
        losses, clipped = F.policy_loss(logprobs, old_logprobs, advantages, self.params.cliprange)
        return (losses * mask).sum() / tokens, (clipped * mask).sum() / tokens

    def state(self) -> StateDict:
        """Everything that the next update depends on, for `load_state`."""
        return {
            "updates": self.updates,
            "order": self.order,
            "kl_coef": self.kl_controller.kl_coef,
            "optimizers": [optimizer.state() for optimizer in self.optimizers],
            "generator": self.generator.get_state(),
            "random": random_state(),
        }

    def load_state(self, state: StateDict) -> None:
        self.updates, self.order = state["updates"], state["order"]
        self.kl_controller.kl_coef = state["kl_coef"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state(saved)
        self.generator.set_state(state["generator"])
        set_random_state(state["random"])

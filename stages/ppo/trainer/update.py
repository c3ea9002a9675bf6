"""One PPO update: sample prompts, generate, score, reference KL, advantages, update."""

from collections.abc import Iterator
from statistics import fmean

import torch

from stages.lib.core.params.policy import KlControl, PpoParams
from stages.lib.core.progress import tracked
from stages.lib.core.types import StateDict, TokenIds
from stages.lib.data.prompts import decode
from stages.lib.lm import world
from stages.lib.lm.packing import Packed, pack
from stages.lib.lm.saving import sum_of_trainable
from stages.lib.lm.sharding import in_step, is_sharded
from stages.ppo.common.episodes import Episode, planned_updates
from stages.ppo.common.resume import random_state, set_random_state
from stages.ppo.common.reward_results import SERVED, RewardInputs
from stages.ppo.trainer import functional as F
from stages.ppo.trainer.checks import check_finite, check_initial_ratio
from stages.ppo.trainer.gradients import SHARES, backward
from stages.ppo.trainer.optimizer import MasterWeightOptimizer
from stages.ppo.trainer.roles import Roles
from stages.ppo.trainer.rollout import (
    Indices,
    RoleOutputs,
    Rollout,
    RolloutPass,
    concat_outputs,
    describe,
    gather_outputs,
)
from stages.ppo.trainer.sharded_optimizer import ShardedOptimizer

KL_RULES = {
    KlControl.adaptive: F.ziegler,
    KlControl.proportional: F.proportional,
    KlControl.fixed: F.fixed,
}


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
        # mean tokens of SFT's responses; if a validation has not set it, of the first rollout's
        self.sft_length = 0.0
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
        rates = (params.learning_rate, params.critic_learning_rate)
        self.optimizers = [
            (ShardedOptimizer if is_sharded(model) else MasterWeightOptimizer)(
                model, rate, self._rate
            )
            for model, rate in zip((roles.policy, roles.critic), rates, strict=True)
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
            RondoError: before the first update, two ways to run the policy differ.
            RewardsFailed: too many further rewards failed.
        """
        # 1. sample prompts
        batch = self.sample_prompts()
        # 2. generate, 3. score, 4. reference KL, 5. advantages
        rollout = self.rollout(batch)
        self.check_rollout(rollout)
        self.sft_length = self.sft_length or fmean(map(len, rollout.responses))
        metrics = describe(rollout, self.sft_length) | {"kl_coef": self.kl_controller.kl_coef}
        # 6. update
        metrics |= self.optimize(rollout)
        if world.size() > 1:
            sums = [sum_of_trainable(model) for model in (self.roles.policy, self.roles.critic)]
            weights = dict(zip(("policy weights", "critic weights"), sums, strict=True))
            world.check_equal(f"update {self.updates + 1}", metrics | weights)
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
        prompts = [tokens for _, tokens in batch]

        # 2. generate
        responses = roles.sample(prompts, p, self.generator)
        inputs = RewardInputs(
            rows=[row for row, _ in batch],
            texts=decode(roles.tokenizer, responses),
            ended=[roles.ends.end(response) for response in responses],
            lengths=[len(response) for response in responses],
        )
        further_rewards = roles.rewards.start(inputs)  # servers work during the forward passes

        # Reward model, reference, policy and critic run together per micro-batch, since the layers
        # that they share run once. If one micro-batch is this process's part of a mini-batch that
        # is the whole batch, its pass also serves the first optimizer step, since the weights are
        # still the same; not of sharded models, since it may be so in some processes only.
        own: Indices = world.share(len(batch))
        one_pass = len(own) <= p.micro_batch_size and p.mini_batch_size == p.batch_size
        keep_gradients = one_pass and not roles.sharded
        parts_and_own = [
            (self.forward(self.pack_episodes(prompts, responses, episodes), keep_gradients), is_own)
            for episodes, is_own in self.micro_batches(own, "scoring")
        ]
        outputs = gather_outputs(concat_outputs([part for part, is_own in parts_and_own if is_own]))

        sampler_log_ratio = roles.sampler_log_ratio(outputs.logprobs, outputs.mask)

        # 3. score: the reward model's calibrated score and the further rewards; an episode whose
        # rewards failed is left out
        results = further_rewards()
        results.check_share(p.max_failed_rewards)
        if len(kept := results.kept) < len(batch):
            self.rollout_pass = None  # it is one pass of all episodes
            own = [new for new, old in enumerate(kept) if old in own]
            inputs, outputs = inputs.select(kept), outputs.select(kept)
            prompts, responses = ([tokens[i] for i in kept] for tokens in (prompts, responses))
        parts = results.parts
        served = parts.pop(SERVED, None)
        calibrated = (
            roles.calibrate(outputs.raw_scores)
            if served is None
            else outputs.raw_scores.new_tensor(served)
        )
        ended = torch.tensor(inputs.ended)
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
            rows=list(inputs.rows),
            prompts=prompts,
            responses=responses,
            texts=list(inputs.texts),
            ended=ended,
            parts=parts,
            failed_share=results.failed_share if results.by_name else None,
            failures=results.failures,
            calibrated=calibrated,
            scores=scores,
            advantages=F.whiten(advantages, outputs.mask),
            returns=returns,
            sampler_log_ratio=sampler_log_ratio,
            own=own,
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
        for epoch in range(1, p.num_ppo_epochs + 1):
            mini_batches = draw_mini_batches(len(rollout.rows), p.mini_batch_size, self.generator)
            number = len(mini_batches)
            for mini_batch in tracked(f"epoch {epoch}:", mini_batches, number, "mini-batches"):
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

    def check_rollout(self, rollout: Rollout) -> None:
        """Check that the roles' outputs are finite, and before the first update `ratio` and KL."""
        checked = ("raw_scores", "logprobs", "ref_logprobs", "values")
        check_finite({name: getattr(rollout, name) for name in checked}, self.updates + 1)
        if self.updates == 0:
            # the micro-batches of the rollout: in bfloat16, others would be rounded differently
            micro_batches, spare = (
                [
                    self.pack_episodes(rollout.prompts, rollout.responses, micro_batch)
                    for micro_batch in self.split(episodes)
                ]
                for episodes in (rollout.own, [0])
            )
            check_initial_ratio(
                self.roles, micro_batches, spare[0], rollout, self.params.temperature
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

    def split(self, indices: Indices) -> list[Indices]:
        """Parts of `micro_batch_size`."""
        size = self.params.micro_batch_size
        return [indices[i : i + size] for i in range(0, len(indices), size)]

    def micro_batches(self, indices: Indices, what: str) -> Iterator[tuple[Indices, bool]]:
        """Parts of `micro_batch_size`, each with True; with False what other processes need to run
        in step with this one (`in_step`). `what` names the pass over them.
        """
        parts = self.split(indices)
        return in_step(self.roles.policy, tracked(what, parts, len(parts), "micro-batches"), [0])

    def optimizer_step(
        self, rollout: Rollout, mini_batch: list[int], rollout_pass: RolloutPass | None
    ) -> dict[str, float]:
        """One optimizer step on a mini-batch; returns its metrics.

        The loss is the mean over all tokens of the mini-batch, in however many micro-batches and
        processes it is computed. `rollout_pass`: used in place of a new forward pass, if given.
        """
        episodes = [i for i in mini_batch if i in rollout.own]
        sums = {name: rollout.logprobs.new_zeros(()) for name in SHARES}
        for micro_batch, is_own in self.micro_batches(episodes, "gradients"):
            packed = self.pack_episodes(rollout.prompts, rollout.responses, micro_batch)
            shares = backward(
                self.roles,
                self.params,
                rollout,
                packed,
                micro_batch,
                mini_batch,
                rollout_pass,
                counts=is_own,
            )
            for optimizer in self.optimizers:
                optimizer.accumulate_grads()
            sums = {name: sums[name] + shares[name] for name in SHARES}
        if world.size() > 1:
            grads = [grad for optimizer in self.optimizers for grad in optimizer.grads()]
            world.add_up([*sums.values(), *grads])
        policy_norm, critic_norm = (
            optimizer.clip(self.params.max_grad_norm) for optimizer in self.optimizers
        )
        sums |= {"policy_grad_norm": policy_norm, "critic_grad_norm": critic_norm}
        # before the weights change, so that a diverged run keeps its last good weights
        check_finite(sums, self.updates + 1)
        for optimizer in self.optimizers:
            optimizer.step()
        return {name: float(value) for name, value in sums.items()}

    def state(self) -> StateDict:
        """Everything that the next update depends on, for `load_state`.

        All processes must call it if the models are sharded; the first one gets the weights.
        """
        return {
            "updates": self.updates,
            "sft_length": self.sft_length,
            "order": self.order,
            "kl_coef": self.kl_controller.kl_coef,
            "optimizers": [optimizer.state() for optimizer in self.optimizers],
            "generator": self.generator.get_state(),
            "random": random_state(),
            "rewards": self.roles.rewards.state(),
        }

    def load_state(self, state: StateDict) -> None:
        self.updates, self.order = state["updates"], state["order"]
        self.sft_length = state["sft_length"]
        self.kl_controller.kl_coef = state["kl_coef"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state(saved)
        self.generator.set_state(state["generator"])
        set_random_state(state["random"])
        self.roles.rewards.load_state(state["rewards"])


def draw_mini_batches(count: int, size: int, generator: torch.Generator) -> list[list[int]]:
    """Split episodes at random into as few mini-batches of at most `size` as possible. Their sizes
    differ by at most 1: a mini-batch of one episode would weigh as much as one of many.

    Each of K mini-batches has one of every K consecutive episodes. So the parts of several
    processes, which are consecutive episodes, have nearly as many in each.

    >>> draw_mini_batches(5, 4, torch.Generator().manual_seed(0))
    [[1, 2, 4], [0, 3]]
    """
    number = -(-count // size)
    groups = torch.rand(-(-count // number), number, generator=generator).argsort(1)
    episodes = groups + number * torch.arange(len(groups))[:, None]
    return [column[column < count].tolist() for column in episodes.T]

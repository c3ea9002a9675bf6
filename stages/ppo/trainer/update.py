"""One update: sample prompts, generate, score, reference KL, advantages, optimise.

Dimensions: B episodes, T tokens of the longest response.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from stages.lib.core.errors import Diverged, RondoError
from stages.lib.core.params.policy import PpoParams
from stages.lib.core.progress import tracked
from stages.lib.core.types import StateDict
from stages.lib.lm import world
from stages.lib.lm.logprobs import response_entropies, response_logprobs
from stages.lib.lm.packing import Packed, hidden_states, pack, unwrap_peft
from stages.lib.lm.responses import Response
from stages.lib.lm.saving import sum_of_trainable
from stages.lib.lm.world import in_step
from stages.ppo.common.episodes import Episode, planned_updates
from stages.ppo.common.rewards import RewardInputs, of_stage
from stages.ppo.trainer import functional as F
from stages.ppo.trainer.advantages import OnlineAlgorithm, ppo
from stages.ppo.trainer.optimizer import make_optimizer
from stages.ppo.trainer.roles import Pass, Roles, concat_outputs, concat_padded
from stages.ppo.trainer.rollout import Indices, MicroBatch, Rollout, describe

# AdamW's eps: the policy's as in PPO's reference implementations (arXiv 2403.17031), the critic's
# is torch's, since most of its gradients are smaller than 1e-5 (docs/log.md)
POLICY_EPS, CRITIC_EPS = 1e-5, 1e-8

# The metrics of a mini-batch, of which each micro-batch has a share, by what is trained
SHARES = {
    "policy": ("policy_loss", "clip_fraction", "approx_kl", "ratio_mean"),
    "critic": ("value_loss", "value_clip_fraction"),
}


class PpoTrainer:
    """Trains the policy, and the critic if there is one: an update per call of `step`.

    Args:
        roles: the models.
        prompts: rows and tokens of the prompts to train on.
        params: the section `ppo` of params.yaml.
        seed: of the order of prompts, of sampling and of mini-batches.
        algorithm: None: PPO.
    """

    def __init__(
        self,
        roles: Roles,
        prompts: list[Episode],
        params: PpoParams,
        seed: int,
        algorithm: OnlineAlgorithm | None = None,
    ) -> None:
        self.roles, self.params, self.prompts = roles, params, prompts
        self.algorithm = algorithm or ppo(params)
        self.generator = torch.Generator().manual_seed(seed)
        self.order: list[int] = []  # indices of the prompts that come next
        self.updates = 0
        # mean tokens of SFT's responses; if a validation has not set it, of the first rollout's
        self.sft_length = 0.0
        # the rollout's own forward pass with gradients, until the first optimizer step has used it
        self.rollout_pass: Pass | None = None
        self.kl_controller = F.AdaptiveKLController(
            self.algorithm.kl_coef,
            params.target_kl_per_token,
            params.kl_horizon,
            self.algorithm.kl_rule,
        )
        self.planned_updates = planned_updates(params)
        # policy and critic have rates of their own, and their gradients are clipped separately
        self.trained = {"policy": roles.policy}
        self.epochs = {"policy": params.num_ppo_epochs}
        self.optimizers = {
            "policy": make_optimizer(roles.policy, params.learning_rate, self._rate, POLICY_EPS)
        }
        if self.algorithm.has_critic:
            self.trained["critic"] = roles.critic
            self.epochs["critic"] = params.num_critic_epochs or params.num_ppo_epochs
            self.optimizers["critic"] = make_optimizer(
                roles.critic, params.critic_learning_rate, self._rate, CRITIC_EPS
            )

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
        lengths = [len(response.tokens) for response in rollout.responses]
        self.sft_length = self.sft_length or fmean(lengths)
        metrics = describe(rollout, self.sft_length, self.algorithm.has_critic)
        metrics["kl_coef"] = self.kl_controller.kl_coef
        # 6. update
        metrics |= self.optimize(rollout)
        if world.size() > 1:
            weights = {
                f"{name} weights": sum_of_trainable(model) for name, model in self.trained.items()
            }
            world.check_equal(f"update {self.updates + 1}", metrics | weights)
        self.kl_controller.update(metrics["kl_per_token"], len(rollout.rows))
        self.updates += 1
        return rollout, metrics

    def sample_prompts(self) -> list[Episode]:
        """1. Sample prompts: the next ones of an endless pass, reshuffled at each turn, each
        `samples_per_prompt` times.
        """
        samples = self.algorithm.samples_per_prompt
        number = self.params.batch_size // samples
        while len(self.order) < number:
            self.order += torch.randperm(len(self.prompts), generator=self.generator).tolist()
        chosen, self.order = self.order[:number], self.order[number:]
        return [self.prompts[i] for i in chosen for _ in range(samples)]

    @torch.no_grad()
    def rollout(self, batch: list[Episode], responses: list[Response] | None = None) -> Rollout:
        """Generate responses to a batch of prompts, unless they are given, and compute their
        advantages.
        """
        p, roles = self.params, self.roles

        # 2. generate
        is_sampled = responses is None
        if responses is None:
            responses = roles.sample([tokens for _, tokens in batch], p, self.generator)
        inputs = RewardInputs([row for row, _ in batch], responses)
        further_rewards = roles.rewards.start(inputs)  # servers work during the forward passes

        # If one micro-batch is this process's part of a mini-batch that is the whole batch, its
        # pass also serves the first optimizer step, since the weights are still the same; not of
        # sharded models, since it may be so in some processes only.
        own: Indices = world.share(len(batch))
        one_pass = len(own) <= p.micro_batch_size and p.mini_batch_size == p.batch_size
        keep_gradients = one_pass and not roles.sharded
        own_outputs = []
        for episodes, is_own in self.micro_batches(own, "scoring"):
            packed = self.pack_episodes(responses, episodes)
            part, self.rollout_pass = roles.forward(packed, p.temperature, keep_gradients)
            own_outputs += [part] if is_own else []
        outputs = concat_outputs(own_outputs)
        sampler_log_ratios = None  # an engine knows those of its last samples
        if is_sampled:
            sampler_log_ratios = roles.sampler_log_ratios(outputs.logprobs, outputs.mask)

        # 3. score: the reward model's calibrated score and the further rewards; an episode whose
        # rewards failed is left out
        results = further_rewards()
        results.check_share(p.max_failed_rewards)
        if len(kept := results.kept) < len(batch):
            self.rollout_pass = None  # it is one pass of all episodes
            own = [new for new, old in enumerate(kept) if old in own]
            inputs, outputs = inputs.select(kept), outputs.select(kept)
            if sampler_log_ratios is not None:
                sampler_log_ratios = sampler_log_ratios[kept]
        parts = results.parts
        if (by_text := of_stage(parts)) is not None:
            calibrated = outputs.raw_scores.new_tensor(by_text)
        elif roles.reward_view is None:
            calibrated = roles.rewards.weighted_sum(parts).to(outputs.raw_scores)
        else:
            calibrated = roles.calibrate(outputs.raw_scores)
        ended = torch.tensor(inputs.ended, device=calibrated.device)
        scores = roles.rewards.combine(p, calibrated, parts, ended, outputs.mask.sum(1))

        # 4. reference KL: a penalty per token, unless it is in the loss
        kl_coef = 0.0 if self.algorithm.kl_in_loss else self.kl_controller.kl_coef
        rewards = F.token_rewards(
            scores, outputs.logprobs, outputs.ref_logprobs, outputs.mask, kl_coef
        )

        # 5. advantages
        groups = torch.tensor(kept, device=rewards.device) // self.algorithm.samples_per_prompt
        advantages, returns = self.algorithm.advantages(
            rewards, outputs.values, outputs.mask, groups
        )
        is_left_out = p.mask_truncated_completions & ~ended
        return Rollout(
            policy_mask=outputs.mask & ~is_left_out[:, None],
            rows=list(inputs.rows),
            responses=list(inputs.responses),
            parts=parts,
            failed_share=results.failed_share if results.by_name else None,
            failures=results.failures,
            calibrated=calibrated,
            scores=scores,
            advantages=advantages,
            returns=returns,
            sampler_log_ratios=sampler_log_ratios,
            own=own,
            **vars(outputs),
        )

    def optimize(self, rollout: Rollout) -> dict[str, float]:
        """6. Update policy and critic: `num_ppo_epochs` and `num_critic_epochs` passes over the
        rollout in mini-batches.

        Returns:
            Means of the metrics over the optimizer steps, and the learning rate.
        """
        rollout_pass, self.rollout_pass = self.rollout_pass, None
        values: dict[str, list[float]] = {}
        for epoch in range(1, max(self.epochs.values()) + 1):
            trained = [name for name, epochs in self.epochs.items() if epoch <= epochs]
            for mini_batch in self.mini_batches(rollout, f"epoch {epoch}:"):
                metrics = self.optimizer_step(rollout, mini_batch, rollout_pass, trained)
                rollout_pass = None
                for name, value in metrics.items():
                    values.setdefault(name, []).append(value)
        for optimizer in self.optimizers.values():
            optimizer.scheduler.step()
        rate = float(self.optimizers["policy"].scheduler.get_last_lr()[0])
        return {name: fmean(value) for name, value in values.items()} | {"learning_rate": rate}

    def mini_batches(self, rollout: Rollout, what: str) -> Iterator[list[int]]:
        """The episodes of a rollout in a new order; `what` names the pass over them."""
        size, generator = self.params.mini_batch_size, self.generator
        mini_batches = draw_mini_batches(len(rollout.rows), size, generator)
        return tracked(what, mini_batches, len(mini_batches), "mini-batches")

    def fit_critic(self, batch: list[Episode], responses: list[Response]) -> None:
        """Fit the critic to the returns of the policy's responses before the first update: as the
        reward model, it has seen no unfinished response (VC-PPO, arXiv 2503.01491). Its values may
        go as far as the returns: they are not clipped.
        """
        p, rollouts = self.params, []
        for start in range(0, len(batch), p.batch_size):  # as large as others: so are requests
            part = slice(start, start + p.batch_size)
            rollouts.append(self.rollout(batch[part], responses[part]))
            self.check_outputs(rollouts[-1])
        self.rollout_pass = None
        for epoch in range(1, p.critic_warmup_epochs + 1):
            for rollout in tracked(f"critic, epoch {epoch}:", rollouts, len(rollouts), "rollouts"):
                for mini_batch in self.mini_batches(rollout, "critic:"):
                    self.optimizer_step(rollout, mini_batch, None, ["critic"], math.inf)

    def check_outputs(self, rollout: Rollout) -> None:
        """Check that the roles' outputs are finite."""
        checked = ("raw_scores", "logprobs", "ref_logprobs", "values")
        check_finite({name: getattr(rollout, name) for name in checked}, self.updates + 1)

    def check_rollout(self, rollout: Rollout) -> None:
        """Check that the outputs are finite, and before the first update `ratio` and KL."""
        self.check_outputs(rollout)
        if self.updates == 0:
            # the micro-batches of the rollout: in bfloat16, others would be rounded differently
            micro_batches, spare = (
                [
                    self.pack_episodes(rollout.responses, micro_batch)
                    for micro_batch in self.split(episodes)
                ]
                for episodes in (rollout.own, [0])
            )
            check_initial_ratio(
                self.roles, micro_batches, spare[0], rollout, self.params.temperature
            )

    def pack_episodes(self, responses: list[Response], indices: Indices) -> Packed:
        """The chosen episodes, which end with EOS, where the reward model reads its score."""
        device = next(self.roles.policy.parameters()).device
        return pack(
            [responses[i].prompt_ids for i in indices],
            [responses[i].tokens for i in indices],
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
        self,
        rollout: Rollout,
        mini_batch: list[int],
        rollout_pass: Pass | None = None,
        trained: Sequence[str] = (),
        cliprange_value: float | None = None,
    ) -> dict[str, float]:
        """One optimizer step on a mini-batch; returns its metrics.

        The loss is the mean over all tokens of the mini-batch, in however many micro-batches and
        processes it is computed.

        Args:
            rollout: all episodes of the update.
            mini_batch: indices of its episodes.
            rollout_pass: used in place of a new forward pass, if given.
            trained: `policy`, `critic`; empty: all there are.
            cliprange_value: None: that of params.yaml.
        """
        trained = trained or [*self.trained]
        clip = self.params.cliprange_value if cliprange_value is None else cliprange_value
        episodes = [i for i in mini_batch if i in rollout.own]
        names = [name for part in trained for name in SHARES[part]]
        sums = {name: rollout.logprobs.new_zeros(()) for name in names}
        optimizers = {name: self.optimizers[name] for name in trained}
        for micro_batch, is_own in self.micro_batches(episodes, "gradients"):
            packed = self.pack_episodes(rollout.responses, micro_batch)
            batch = MicroBatch(rollout, packed, micro_batch, mini_batch, float(is_own))
            shares = self.backward(batch, rollout_pass, trained, clip)
            for optimizer in optimizers.values():
                optimizer.accumulate_grads()
            sums = {name: sums[name] + shares[name] for name in names}
        if world.size() > 1:
            grads = [grad for optimizer in optimizers.values() for grad in optimizer.grads()]
            world.add_up([*sums.values(), *grads])
        for name, optimizer in optimizers.items():
            sums[f"{name}_grad_norm"] = optimizer.clip(self.params.max_grad_norm)
        # before the weights change, so that a diverged run keeps its last good weights
        check_finite(sums, self.updates + 1)
        for optimizer in optimizers.values():
            optimizer.step()
        return {name: float(value) for name, value in sums.items()}

    def backward(
        self,
        batch: MicroBatch,
        rollout_pass: Pass | None,
        trained: Sequence[str],
        cliprange_value: float,
    ) -> dict[str, Tensor]:
        """Accumulate the gradients of a micro-batch: of the policy, then of the critic, so that the
        activations of only one of them are in memory. See `optimizer_step`.

        Returns:
            SHARES: the micro-batch's share of each metric of the mini-batch.
        """
        roles, packed, rollout = self.roles, batch.packed, batch.rollout
        shares: dict[str, Tensor] = {}
        loss = rollout.logprobs.new_zeros(())
        if rollout_pass:
            hidden, logprobs, values = rollout_pass
        elif "policy" in trained or not roles.critic_view:
            policy_states = [rollout.policy_states[i] for i in batch.episodes]
            with torch.set_grad_enabled("policy" in trained):
                hidden = roles.policy_hidden(packed, policy_states)
        else:  # a critic of its own reads no states of the policy
            hidden = rollout.logprobs.new_empty(0)
        if "policy" in trained:
            if not rollout_pass:
                logprobs = response_logprobs(roles.policy, packed, hidden, self.params.temperature)
            loss, shares = self.policy_loss(batch, hidden, logprobs)
            # a critic that is a head on the policy has one backward pass with it
            if roles.critic_view or "critic" not in trained:
                (batch.weight * loss).backward()
                loss = torch.zeros_like(loss)
        if "critic" in trained:
            if not rollout_pass:
                states = [rollout.critic_states[i] for i in batch.episodes]
                values = roles.values(packed, states, hidden)
            old_values, returns = batch.columns(rollout.values, rollout.returns)
            losses, clipped = F.value_loss(values, old_values, returns, cliprange_value)
            value_loss = (losses * packed.response_mask).sum() / batch.tokens
            # an optimizer of its own needs no weight beside its rate
            weight = 1.0 if roles.critic_view else self.params.vf_coef
            (batch.weight * (loss + weight * value_loss)).backward()
            shares["value_loss"] = value_loss
            clip_fraction = (clipped * packed.response_mask).sum() / batch.tokens
            shares["value_clip_fraction"] = clip_fraction
        return {name: batch.weight * share.detach() for name, share in shares.items()}

    def policy_loss(
        self, batch: MicroBatch, hidden: Tensor, logprobs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's share of the policy's loss and metrics.

        Args:
            hidden: (M, H) last states of the policy.
            logprobs: (B, T) nats, with gradients.
        """
        p, rollout, algorithm = self.params, batch.rollout, self.algorithm
        mask, old_logprobs, ref_logprobs, advantages = batch.columns(
            rollout.policy_mask, rollout.logprobs, rollout.ref_logprobs, rollout.advantages
        )
        tokens = rollout.policy_mask[batch.mini_batch].sum().clamp(min=1)
        episodes = len(batch.mini_batch)
        losses, clipped = algorithm.loss(logprobs, old_logprobs, advantages, mask, algorithm.clip)
        weights = algorithm.weights(mask, tokens, episodes)
        per_token = losses.dim() == 2
        if rollout.sampler_log_ratios is not None:
            [log_ratios] = batch.columns(rollout.sampler_log_ratios)
            log_ratios = log_ratios if per_token else (log_ratios * mask).sum(1)
            losses = losses * F.importance_weights(log_ratios, p.vllm_importance_sampling_clip_max)
        policy_loss = (losses * weights).sum() if per_token else losses.sum() / episodes
        loss = policy_loss
        if p.entropy_coef:
            entropies = response_entropies(self.roles.policy, batch.packed, hidden, p.temperature)
            loss = loss - p.entropy_coef * (entropies * mask).sum() / tokens
        ratio = (logprobs - old_logprobs).exp() * mask
        if algorithm.kl_in_loss:
            kl = F.kl_k3(logprobs, ref_logprobs) * ratio
            loss = loss + self.kl_controller.kl_coef * (kl * weights).sum()
        return loss, {
            "policy_loss": policy_loss,
            "clip_fraction": clipped.sum() / (tokens if per_token else episodes),
            "approx_kl": (F.kl_k3(old_logprobs, logprobs) * mask).sum() / tokens,
            "ratio_mean": ratio.sum() / tokens,
        }

    def state(self) -> StateDict:
        """Everything that the next update depends on, for `load_state`.

        All processes must call it if the models are sharded; the first one gets the weights.
        """
        return {
            "updates": self.updates,
            "sft_length": self.sft_length,
            "order": self.order,
            "kl_coef": self.kl_controller.kl_coef,
            "optimizers": {name: one.state() for name, one in self.optimizers.items()},
            "generator": self.generator.get_state(),
            "rewards": self.roles.rewards.state(),
        }

    def load_state(self, state: StateDict) -> None:
        self.updates, self.order = state["updates"], state["order"]
        self.sft_length = state["sft_length"]
        self.kl_controller.kl_coef = state["kl_coef"]
        for name, optimizer in self.optimizers.items():
            optimizer.load_state(state["optimizers"][name])
        self.generator.set_state(state["generator"])
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


def check_finite(tensors: dict[str, Tensor], update: int) -> None:
    """
    Args:
        tensors: of any shape, by name.
        update: the number of the current update, from 1.

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
            f"update {update}: {', '.join(bad)} not finite; the step was not applied "
            f"and the last saved state is kept. Next: {fix}"
        )


@torch.no_grad()
def whole_logprobs(policy: Any, packed: Packed, temperature: float) -> Tensor:
    """(B, T) log-probabilities under the policy, computed through all of its layers."""
    return response_logprobs(policy, packed, hidden_states(policy, packed), temperature)


def check_initial_ratio(
    roles: Roles, micro_batches: list[Packed], spare: Packed, rollout: Rollout, temperature: float
) -> None:
    """Before the first update, the policy on shared states and the policy run as a whole must
    agree; and so must policy and reference, unless the policy starts from other weights.

    Args:
        roles: the models.
        micro_batches: this process's episodes of the rollout.
        spare: any episode, for `in_step`.
        rollout: the first one.
        temperature: divides the logits.

    Raises:
        RondoError: they differ, because of dropout, a wrong mask, temperature or padding, or a
            model that cannot be split into layers. PPO would train on noise.
    """
    tolerance = 0.05 if unwrap_peft(roles.policy).dtype is torch.bfloat16 else 1e-3
    log_ratio_to_reference = (rollout.logprobs - rollout.ref_logprobs).abs().max()
    kl = float(log_ratio_to_reference) if roles.starts_as_reference else 0.0
    error = 0.0  # of a process whose episodes all failed
    batches = tracked("checking", micro_batches, len(micro_batches), "micro-batches")
    parts = [
        (whole_logprobs(roles.policy, packed, temperature), is_own)
        for packed, is_own in in_step(roles.policy, batches, spare)
    ]
    if micro_batches:
        whole = concat_padded([logprobs for logprobs, is_own in parts if is_own])
        width, own = whole.shape[1], list(rollout.own)
        logprobs, mask = rollout.logprobs[own, :width], rollout.mask[own, :width]
        log_ratio = (whole - logprobs)[mask]
        error = float((log_ratio.exp() - 1).abs().max())
    ratio_error = float(torch.tensor(world.gather([error])).max())  # NaN, if one is
    if not (kl <= tolerance and ratio_error <= tolerance):
        raise RondoError(
            "ppo: at update 1 the ratio must be 1 and the KL 0, but they are off by "
            f"{ratio_error:.3g} and {kl:.3g} nats (at most {tolerance}); look for dropout, a "
            "changed prompt template or padding"
        )

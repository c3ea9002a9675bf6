"""One update: sample prompts, generate, score, reference KL, advantages, optimise.

Dimensions: B episodes, T tokens of the longest response.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from stages.lib.core.errors import Diverged, RondoError
from stages.lib.core.params.policy import PpoParams
from stages.lib.core.progress import tracked
from stages.lib.core.rows import TrainingPrompt
from stages.lib.core.types import StateDict
from stages.lib.lm import world
from stages.lib.lm.logprobs import response_entropies, response_logprobs
from stages.lib.lm.packing import Packed, hidden_states, pack, unwrap_peft
from stages.lib.lm.responses import Response
from stages.lib.lm.saving import sum_of_trainable
from stages.lib.lm.world import in_step
from stages.lib.metrics.stats import mean_with_error
from stages.ppo.common.episodes import Episode, planned_updates
from stages.ppo.common.rewards import SERVED, RewardInputs
from stages.ppo.trainer import functional as F
from stages.ppo.trainer.advantages import OnlineAlgorithm, ppo
from stages.ppo.trainer.optimizer import make_optimizer
from stages.ppo.trainer.roles import Pass, RoleOutputs, Roles, concat_outputs, concat_padded

Indices = range | list[int]

# The metrics of a mini-batch, of which each micro-batch has a share. Those of values: with a critic
SHARES = (
    "policy_loss",
    "value_loss",
    "clip_fraction",
    "value_clip_fraction",
    "approx_kl",
    "ratio_mean",
)


@dataclass(frozen=True, kw_only=True)
class Rollout(RoleOutputs):
    """One rollout of B episodes, without those whose rewards failed."""

    rows: list[TrainingPrompt]  # of the prompts
    responses: list[Response]
    parts: dict[str, list[float]]  # scores of the further rewards, by name
    failed_share: float | None  # of the sampled episodes, left out; None: no reward can fail
    failures: list[str]  # one line per reward and reason
    # (B,) raw or served scores, in standard deviations of SFT demonstrations; without a reward
    # model the weighted sum of the parts
    calibrated: Tensor
    scores: Tensor  # (B,) weighted sum of calibrated and parts, clipped and penalised
    advantages: Tensor  # (B, T)
    returns: Tensor  # (B, T) for the critic
    sampler_log_ratio: float | None  # see `Roles`
    own: Indices  # the episodes that this process trains on

    @property
    def sequence_kl(self) -> Tensor:
        """(B,) KL of the policy to the reference, nats per sequence: the sum over the response.

        Its mean estimates the KL of sequences without bias, with less variance than log-ratios.
        """
        return self.kl.sum(1)


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
        self.trained, rates = {"policy": roles.policy}, [params.learning_rate]
        if self.algorithm.has_critic:
            self.trained["critic"] = roles.critic
            rates.append(params.critic_learning_rate)
        self.optimizers = [
            make_optimizer(model, rate, self._rate)
            for model, rate in zip(self.trained.values(), rates, strict=True)
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
    def rollout(self, batch: list[Episode]) -> Rollout:
        """Generate responses to a batch of prompts and compute their advantages."""
        p, roles = self.params, self.roles

        # 2. generate
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
        sampler_log_ratio = roles.sampler_log_ratio(outputs.logprobs, outputs.mask)

        # 3. score: the reward model's calibrated score and the further rewards; an episode whose
        # rewards failed is left out
        results = further_rewards()
        results.check_share(p.max_failed_rewards)
        if len(kept := results.kept) < len(batch):
            self.rollout_pass = None  # it is one pass of all episodes
            own = [new for new, old in enumerate(kept) if old in own]
            inputs, outputs = inputs.select(kept), outputs.select(kept)
        parts = results.parts
        served = parts.pop(SERVED, None)
        if served is not None:
            calibrated = outputs.raw_scores.new_tensor(served)
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
        return Rollout(
            rows=list(inputs.rows),
            responses=list(inputs.responses),
            parts=parts,
            failed_share=results.failed_share if results.by_name else None,
            failures=results.failures,
            calibrated=calibrated,
            scores=scores,
            advantages=advantages,
            returns=returns,
            sampler_log_ratio=sampler_log_ratio,
            own=own,
            **vars(outputs),
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

    def check_rollout(self, rollout: Rollout) -> None:
        """Check that the roles' outputs are finite, and before the first update `ratio` and KL."""
        checked = ("raw_scores", "logprobs", "ref_logprobs", "values")
        check_finite({name: getattr(rollout, name) for name in checked}, self.updates + 1)
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
        self, rollout: Rollout, mini_batch: list[int], rollout_pass: Pass | None
    ) -> dict[str, float]:
        """One optimizer step on a mini-batch; returns its metrics.

        The loss is the mean over all tokens of the mini-batch, in however many micro-batches and
        processes it is computed. `rollout_pass`: used in place of a new forward pass, if given.
        """
        episodes = [i for i in mini_batch if i in rollout.own]
        names = [n for n in SHARES if self.algorithm.has_critic or not n.startswith("value")]
        sums = {name: rollout.logprobs.new_zeros(()) for name in names}
        for micro_batch, is_own in self.micro_batches(episodes, "gradients"):
            packed = self.pack_episodes(rollout.responses, micro_batch)
            shares = self.backward(
                rollout, packed, micro_batch, mini_batch, rollout_pass, float(is_own)
            )
            for optimizer in self.optimizers:
                optimizer.accumulate_grads()
            sums = {name: sums[name] + shares[name] for name in names}
        if world.size() > 1:
            grads = [grad for optimizer in self.optimizers for grad in optimizer.grads()]
            world.add_up([*sums.values(), *grads])
        for name, optimizer in zip(self.trained, self.optimizers, strict=True):
            sums[f"{name}_grad_norm"] = optimizer.clip(self.params.max_grad_norm)
        # before the weights change, so that a diverged run keeps its last good weights
        check_finite(sums, self.updates + 1)
        for optimizer in self.optimizers:
            optimizer.step()
        return {name: float(value) for name, value in sums.items()}

    def backward(
        self,
        rollout: Rollout,
        packed: Packed,
        micro_batch: Indices,
        mini_batch: list[int],
        rollout_pass: Pass | None,
        weight: float,
    ) -> dict[str, Tensor]:
        """Accumulate the gradients of a micro-batch: of the policy, then of the critic, so that the
        activations of only one of them are in memory.

        Args:
            rollout: all episodes of the update.
            packed: the micro-batch's episodes.
            micro_batch, mini_batch: indices of their episodes. Losses are means over mini_batch.
            rollout_pass: used in place of a new forward pass, if given.
            weight: 0: the passes run, but gradients and shares are 0.

        Returns:
            SHARES: the micro-batch's share of each metric of the mini-batch.
        """
        roles, p = self.roles, self.params
        tokens, episodes = rollout.mask[mini_batch].sum(), len(mini_batch)
        # a micro-batch is only as wide as its own longest response
        mask, width = packed.response_mask, packed.response_mask.shape[1]
        old_logprobs, ref_logprobs, old_values, advantages, returns = (
            column[micro_batch, :width]
            for column in (
                *(rollout.logprobs, rollout.ref_logprobs, rollout.values),
                *(rollout.advantages, rollout.returns),
            )
        )
        if rollout_pass:
            hidden, logprobs, values = rollout_pass
        else:
            hidden = roles.policy_hidden(packed, [rollout.policy_states[i] for i in micro_batch])
            logprobs = response_logprobs(roles.policy, packed, hidden, p.temperature)
        losses, clipped = self.algorithm.loss(
            logprobs, old_logprobs, advantages, mask, self.algorithm.cliprange
        )
        count = tokens if losses.dim() == 2 else episodes  # per token, or per episode
        policy_loss, clip_fraction = losses.sum() / count, clipped.sum() / count
        loss = policy_loss
        if p.entropy_coef:
            entropies = response_entropies(roles.policy, packed, hidden, p.temperature)
            loss = loss - p.entropy_coef * entropies.sum() / tokens
        ratio = (logprobs - old_logprobs).exp() * mask
        if self.algorithm.kl_in_loss:
            kl = (F.kl_k3(logprobs, ref_logprobs) * ratio).sum(1) / mask.sum(1)
            loss = loss + self.kl_controller.kl_coef * kl.sum() / episodes
        shares = {
            "policy_loss": policy_loss,
            "clip_fraction": clip_fraction,
            "approx_kl": (F.kl_k3(old_logprobs, logprobs) * mask).sum() / tokens,
            "ratio_mean": ratio.sum() / tokens,
        }
        # a critic that is a head on the policy has one backward pass with it
        if roles.critic_view or not self.algorithm.has_critic:
            (weight * loss).backward()
            loss = torch.zeros_like(loss)
        if self.algorithm.has_critic:
            if not rollout_pass:
                states = [rollout.critic_states[i] for i in micro_batch]
                values = roles.values(packed, states, hidden)
            value_losses, value_clipped = F.value_loss(
                values, old_values, returns, p.cliprange_value
            )
            value_loss = (value_losses * mask).sum() / tokens
            (weight * (loss + p.vf_coef * value_loss)).backward()
            shares["value_loss"] = value_loss
            shares["value_clip_fraction"] = (value_clipped * mask).sum() / tokens
        return {name: weight * share.detach() for name, share in shares.items()}

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
            "rewards": self.roles.rewards.state(),
        }

    def load_state(self, state: StateDict) -> None:
        self.updates, self.order = state["updates"], state["order"]
        self.sft_length = state["sft_length"]
        self.kl_controller.kl_coef = state["kl_coef"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state(saved)
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


def describe(rollout: Rollout, sft_length: float, has_critic: bool = True) -> dict[str, float]:
    """Metrics of a rollout: scores, KL (nats per sequence, and over the length of SFT's responses,
    `sft_length` tokens, with its standard error), entropy (nats per token), length (tokens),
    critic.
    """
    kl, kl_error = mean_with_error(rollout.sequence_kl.tolist())
    metrics = {f"score_{name}": fmean(scores) for name, scores in rollout.parts.items()}
    if rollout.sampler_log_ratio is not None:
        metrics = {"sampler_log_ratio": rollout.sampler_log_ratio} | metrics
    if rollout.failed_share is not None:
        metrics["reward_failed_share"] = rollout.failed_share
    metrics |= {
        "score_mean": float(rollout.calibrated.mean()),
        "score_std": float(rollout.calibrated.std()),
        "reward_mean": float(rollout.scores.mean()),
        "reward_std": float(rollout.scores.std()),
        "kl": kl,
        "kl_per_token": kl / sft_length,
        "kl_per_token_se": kl_error / sft_length,
        "entropy": float(F.masked_mean(rollout.entropies, rollout.mask)),
        "response_length": fmean(rollout.mask.sum(1).tolist()),
        "eos_rate": float(torch.tensor([r.ended for r in rollout.responses]).float().mean()),
    }
    if has_critic:
        metrics |= {
            "explained_variance": F.explained_variance(
                rollout.values, rollout.returns, rollout.mask
            ),
            "value_mean": float(F.masked_mean(rollout.values, rollout.mask)),
            "return_mean": float(F.masked_mean(rollout.returns, rollout.mask)),
        }
    return metrics


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

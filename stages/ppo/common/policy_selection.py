"""Selects the policy to keep, on held-out prompts, by KL and the primary judge.

By default the trained policy is scaled towards the reference until its KL is the target, and kept
unless an earlier policy is better by more than the noise. With `best_update` the judge's best
update within the KL budget is kept. The judge never rewards the policy, and the policy is never
trained on these prompts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from stages.lib.core.params.policy import LossLevel, PolicySelection, PpoParams
from stages.lib.core.params.shared import ModelParams
from stages.lib.core.progress import progress
from stages.lib.core.types import Metrics, StateDict
from stages.lib.judging.primary import PrimaryJudge
from stages.lib.lm import world
from stages.lib.lm.end_tokens import end_tokens
from stages.lib.lm.interpolation import (
    MAX_SCALE,
    MAX_SCALED,
    interpolate,
    scale_for_kl,
    search_scale,
)
from stages.lib.lm.loading import training_model_params
from stages.lib.lm.responses import Response, score_responses
from stages.lib.lm.saving import load_trainable, trainable_state_dict
from stages.lib.lm.scoring import rounding_differences
from stages.lib.lm.world import gather_weights, split_weights
from stages.lib.metrics.stats import mean_with_error
from stages.ppo.common.episodes import Episode
from stages.ppo.common.health import KL_ABOVE_BUDGET, NO_ROUNDING, Rounding
from stages.ppo.common.reference import SampledPolicy, load_weights

# Responses per prompt of the scaled policies, whose KL decides the selected policy's scale, and of
# those before the first update. With one, the standard error of KL or length on 128 prompts is 4%.
SCALING_SAMPLES = 4
ROUNDED_RESPONSES = 32  # of SFT, on which rounding is measured
REACHED = 0.9  # share of the target KL below which it counts as missed
# Standard errors of the gain for which an earlier policy is kept. With one, chance would do it in
# one run of six.
CLEAR = 2.0
NEAR = 0.05  # share by which two KLs may differ that count as the same: the error of a measured one


class Validation(NamedTuple):
    """Results on the held-out prompts.

    scale: of the trained policy's distance from the reference; 1 is that policy. judge_scores: (P,)
    by the primary judge; if it only compares, against the first validated policy, which is SFT.
    kl: mean from the reference, nats per sequence. length: mean tokens of the responses.
    kl_per_token: kl over the length of SFT's responses, with its standard error.
    gain: mean of the judge scores less those of the first validated policy; gain_error: its
    standard error.
    """

    update: int
    scale: float
    judge_scores: tuple[float, ...]
    kl: float
    kl_per_token: float
    kl_per_token_se: float
    length: float
    gain: float
    gain_error: float

    @property
    def judge_score(self) -> float:
        """Mean over the prompts."""
        return fmean(self.judge_scores)

    @property
    def is_champion(self) -> bool:
        """Whether it is of the champion, from which the training started; SFT's has no KL."""
        return self.update == 0 and self.kl > 0

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "validation_judge_score": self.judge_score,
            "validation_gain": self.gain,
            "validation_gain_z": self.gain / max(self.gain_error, 1e-8),
            "validation_kl": self.kl,
            "validation_kl_per_token": self.kl_per_token,
            "validation_kl_per_token_se": self.kl_per_token_se,
        }

    @property
    def curve_point(self) -> dict[str, float]:
        """All but the scores of single prompts."""
        values = self._asdict() | {"judge_score": self.judge_score}
        del values["judge_scores"]
        return values


class Candidate(NamedTuple):
    """A validated policy. weights: its trained weights, on the CPU; of a sharded policy, the parts
    of this process.
    """

    validation: Validation
    weights: StateDict


NO_VALIDATION = Validation(0, 1.0, (math.nan,), *[math.nan] * 6)


def paired_gain(new: Sequence[float], old: Sequence[float]) -> tuple[float, float]:
    """Mean of the differences new - old, and its standard error (0 for a single difference).

    >>> paired_gain([1.0, 0.5], [0.0, 0.5])
    (0.5, 0.5)
    """
    return mean_with_error([a - b for a, b in zip(new, old, strict=True)])


def keeps_earlier(earlier: Validation, scaled: Validation, target: float) -> bool:
    """Whether an earlier update's policy is kept instead of one that is scaled to the target KL,
    in nats per token.

    If the judge's mean gain over it exceeds two standard errors; above the target never, since more
    KL is more gain. A scaled policy that does not reach the target is compared with all that are at
    most at the target. The champion, from which the training started, is kept unless the scaled
    policy exceeds it by one: training on a reward raises the reward, and the judge has to show
    that it did more.
    """
    if earlier.kl_per_token > (1 + NEAR) * max(target, scaled.kl_per_token):
        return False
    gain, error = paired_gain(earlier.judge_scores, scaled.judge_scores)
    return gain > -error if earlier.is_champion else gain > CLEAR * error


@dataclass
class PolicySelector:
    """Validates policies and remembers those that may be selected.

    All policies respond to the same prompts with the same random numbers, so that they differ by
    their weights alone.

    Attributes:
        best: the validation of the best policy so far within the KL budget.
        weights: its trained weights.
        candidates: what the scaled policy is compared with (`preferred`), and the policy that was
            validated last, which may be the one that is scaled.
        history: all validations, in their order; the first is of SFT.
        first_texts: the responses of SFT.
        responses: those measured last, to all prompts, then to all again.
        rounding: measured on them.
    """

    roles: SampledPolicy
    prompts: Sequence[Episode]
    judge: PrimaryJudge
    params: PpoParams
    seed: int
    best: Validation = NO_VALIDATION
    weights: StateDict = field(default_factory=dict)
    candidates: list[Candidate] = field(default_factory=list)
    history: list[Validation] = field(default_factory=list)
    first_texts: list[str] = field(default_factory=list)
    responses: list[Response] = field(default_factory=list)
    rounding: Rounding = NO_ROUNDING

    @property
    def first(self) -> Validation:
        """The validation of SFT."""
        return self.history[0] if self.history else NO_VALIDATION

    def validate(self, update: int) -> Validation:
        """Measure the policy after `update`; keep a copy of its weights while it may be selected.

        Before the first update it gets as many responses as a scaled policy: the length of SFT's is
        the unit of the target KL, and the critic is fitted to them.
        """
        with progress("validation"):
            validation = self.measure(update, samples=1 if update else SCALING_SAMPLES)
        weights = trainable_state_dict(self.roles.policy)
        new = Candidate(validation, {n: w.to("cpu", copy=True) for n, w in weights.items()})
        if not self.weights or self.is_better(validation, self.best):
            self.best, self.weights = new
        if self.scales:
            self.candidates = [*self.preferred(), new]
        return validation

    @property
    def scales(self) -> bool:
        """Whether the last policy is scaled to the target KL."""
        return self.params.policy_selection is PolicySelection.target_kl

    def preferred(self) -> list[Candidate]:
        """Of the candidates at most at the target KL, the champion, and the one that the judge
        prefers (the first of equal ones): two sets of weights at most, however many policies were
        validated, since all weights of a model may be trained, and the resume state has them.
        """
        most = (1 + NEAR) * self.params.target_kl_per_token
        within = [one for one in self.candidates if one.validation.kl_per_token <= most]
        best = max(within, key=lambda one: one.validation.judge_score, default=None)
        return [one for one in within if one is best or one.validation.is_champion]

    def validate_reference(self) -> Validation:
        """Measure the reference, whatever weights the policy has."""
        weights = self._copy_of_weights()
        interpolate(self.roles.policy, self.roles.reference, weights, 0.0)
        validation = self.validate(0)
        load_trainable(self.roles.policy, weights)
        return validation

    def is_better(self, new: Validation, old: Validation) -> bool:
        """Whether a policy is within the KL budget, and the judge's mean gain over an older one
        exceeds one standard error. SFT, the first one, is always within the budget, which holds
        for a KL of one standard error more, since it is measured on a few prompts.
        """
        if new.kl_per_token + new.kl_per_token_se > self.params.max_kl_per_token:
            return False
        gain, error = paired_gain(new.judge_scores, old.judge_scores)
        return gain > error

    def select(self, update: int, danger: str, checkpoints: Path, model: ModelParams) -> Validation:
        """Give the policy the weights of the selected one, after the last `update`.

        Args:
            update: the number of the last update.
            danger: the sign of the danger that ended the training, or "". A policy that another
                danger than its KL has ended is not scaled: it may be broken.
            checkpoints: folder with those of the run, `step_<update>`.
            model: section `model` of params.yaml.
        """
        if self.scales and update and danger in ("", KL_ABOVE_BUDGET):
            self._scale_to_target(update)
        elif danger:
            self._validate_checkpoints(update, checkpoints, model)
        load_trainable(self.roles.policy, self.weights)
        return self.best

    def _validate_checkpoints(self, last: int, checkpoints: Path, model: ModelParams) -> None:
        """Validate the checkpoints since the last validation, but for those of which a rollout
        showed the danger: after update `last` - 1 and later. Without any update to select, validate
        the last policy, although its danger counts against it.
        """
        trained, validated = self._copy_of_weights(), self.history[-1].update
        for folder in sorted(checkpoints.glob("step_*")):
            update = int(folder.name.removeprefix("step_"))
            if validated < update < last - 1:
                # all weights are saved in float32
                model = training_model_params(model, self.params.lora)
                load_weights(self.roles.policy, folder, model)
                self.validate(update)
        if not self.history[-1].update:
            load_trainable(self.roles.policy, trained)
            self.validate(last)

    def _scale_to_target(self, update: int) -> None:
        """Validate policies with other scales and keep the last one, whose KL is the target, unless
        there are earlier ones that `keeps_earlier` prefers: then the judge's best of them.
        """
        trained, target = self._copy_of_weights(), self.params.target_kl_per_token
        numbers = count(1)

        def measure_kl(scale: float) -> float:
            interpolate(self.roles.policy, self.roles.reference, trained, scale)
            number, most = next(numbers), 1 + MAX_SCALED  # the first scale, and the search's
            with progress(f"scaled to the target KL, policy {number} of {most} at most"):
                return self.measure(update, scale, SCALING_SAMPLES).kl_per_token

        last = self.history[-1]
        trained_kl = (last if last.update == update else self.measure(update)).kl_per_token
        # one response per prompt gives a first scale, and has no further part in the estimate
        first_scale = scale_for_kl([(1.0, max(trained_kl, 1e-8))], target)
        search_scale(measure_kl, (first_scale, measure_kl(first_scale)), target)
        scaled = Candidate(self.history[-1], self._copy_of_weights())
        earlier = [
            candidate
            for candidate in self.candidates
            if candidate.validation.update != update
            and keeps_earlier(candidate.validation, scaled.validation, target)
        ]
        self.best, self.weights = max(
            earlier, key=lambda candidate: candidate.validation.judge_score, default=scaled
        )

    def _copy_of_weights(self) -> dict[str, Tensor]:
        """Cloned, since the next update changes the weights in place."""
        weights = trainable_state_dict(self.roles.policy)
        return {name: weight.clone() for name, weight in weights.items()}

    def measure(self, update: int, scale: float = 1.0, samples: int = 1) -> Validation:
        """Sample responses to the held-out prompts; their judge scores and KL also go to the
        history. The first policy is SFT.

        samples: responses per prompt, of which the judge scores one.
        """
        p = self.params
        prompt_ids = [tokens for _, tokens in self.prompts]
        generator = torch.Generator().manual_seed(self.seed)
        sampled = [self.roles.sample(prompt_ids, p, generator) for _ in range(samples)]
        texts = [response.text for response in sampled[0]]
        self.responses = [response for responses in sampled for response in responses]
        if self.history:
            scored = score_responses(
                self.responses,
                self.roles.policy,
                self.roles.reference,
                self.roles.tokenizer,
                temperature=p.temperature,
            )
            kls = torch.tensor([response.kl for response in scored])
        else:  # SFT itself
            kls = torch.zeros(len(self.responses))
            self.rounding = self.measure_rounding(sampled[0])
        prompts = [row["prompt"] for row, _ in self.prompts]
        self.first_texts = self.first_texts or texts
        scores = tuple(self.judge.scores_against(prompts, texts, self.first_texts))
        gain = paired_gain(scores, self.first.judge_scores if self.history else scores)
        length = fmean(len(response.tokens) for response in self.responses)
        # the error is over prompts, whose responses are not independent of each other
        kl_of_prompts = kls.view(samples, len(prompts)).mean(0)
        kl, error = mean_with_error(kl_of_prompts.tolist())
        sft_length = self.first.length if self.history else length
        validation = Validation(
            update, scale, scores, kl, kl / sft_length, error / sft_length, length, *gain
        )
        world.check_equal(f"the validation after update {update}", validation._asdict())
        self.history.append(validation)
        return validation

    def measure_rounding(self, responses: list[Response]) -> Rounding:
        """What rounding alone shows on SFT's responses."""
        p, policy, few = self.params, self.roles.policy, responses[:ROUNDED_RESPONSES]
        kl_per_token, rows = rounding_differences(
            policy,
            [response.prompt_ids for response in few],
            [response.tokens for response in few],
            ends=end_tokens(policy, self.roles.tokenizer),
            temperature=p.temperature,
        )
        sequences = torch.stack([row.mean() for row in rows])
        by_sequence = p.loss_level is LossLevel.sequence
        clipped = sequences if by_sequence else torch.cat(rows)
        beyond = (clipped.exp() - 1).abs() > (p.cliprange_sequence if by_sequence else p.cliprange)
        return Rounding(
            kl_per_token, float(beyond.float().mean()), float(sequences.square().mean().sqrt())
        )

    @property
    def metrics(self) -> Metrics:
        """Of the best policy, and the points of the judge's curve against KL: `validations`."""
        return {
            "policy_update": self.best.update,
            "policy_scale": self.best.scale,
            "judge": self.judge.name,
            "validation_judge_score_before": self.first.judge_score,
            "rounding_kl_per_token": self.rounding.kl_per_token,
            **self.best.metrics,
            "validations": [validation.curve_point for validation in self.history],
        }

    def describe(self, longer: str = "ppo.total_episodes") -> str:
        """The best policy in words; longer: the setting that makes the training longer."""
        best, target = self.best, self.params.target_kl_per_token
        scaled = "" if best.scale == 1 else f", scaled by {best.scale:.2f}"
        missed = ""
        if best.scale == MAX_SCALE and best.kl_per_token < REACHED * target:
            missed = (
                f". The target, {target * self.first.length:.2f}, is too far from the trained "
                f"policy: raise {longer}, or lower ppo.target_kl_per_token"
            )
        return (
            f"kept the policy after update {best.update}{scaled}: {self.judge.name} "
            f"{self.first.judge_score:.2f} -> {best.judge_score:.2f} on held-out prompts, "
            f"KL {best.kl:.2f} nats per sequence{missed}"
        )

    def state(self) -> StateDict:
        """All processes must call it if the policy is sharded; the first one gets the weights."""
        policy = self.roles.policy
        return {
            "best": list(self.best),
            "weights": gather_weights(policy, self.weights),
            "candidates": [
                [list(validation), gather_weights(policy, weights)]
                for validation, weights in self.candidates
            ],
            "first_texts": self.first_texts,
            "rounding": list(self.rounding),
            "history": [list(validation) for validation in self.history],
        }

    def load_state(self, state: StateDict) -> None:
        self.best = Validation(*state["best"])
        self.weights = split_weights(self.roles.policy, state["weights"])
        self.candidates = [
            Candidate(Validation(*values), split_weights(self.roles.policy, weights))
            for values, weights in state["candidates"]
        ]
        self.history = [Validation(*values) for values in state["history"]]
        self.first_texts = state["first_texts"]
        self.rounding = Rounding(*state["rounding"])

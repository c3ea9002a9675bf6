"""Responses of policy and SFT to training prompts, scored by reward model and jury."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from stages.lib.core.files import is_placeholder, stage_dir
from stages.lib.core.params import Params
from stages.lib.core.params.judging import JudgeName
from stages.lib.core.rows import PromptRow, RolloutRow
from stages.lib.core.types import Prompt, ScoreFunction
from stages.lib.judging.jury import Jury
from stages.lib.judging.lexicon import LexiconScores, lexicon_scores
from stages.lib.judging.pairwise import Comparison
from stages.lib.judging.pointwise import Fluency
from stages.lib.lm.loading import load_causal_lm, load_policy, load_tokenizer
from stages.lib.lm.lora import adapter_disabled, is_adapter
from stages.lib.lm.responses import Response, ScoredResponse, responder
from stages.lib.lm.scoring import RewardScorer
from stages.replay.exploits import strip_exploits
from stages.replay.mining import PolicySample


@dataclass(frozen=True)
class Candidate:
    """An answer of SFT. nll: nats per token under the reference."""

    text: str
    nll: float


CandidatesByPrompt = Mapping[str, Sequence[Candidate]]  # by str(prompt)


class Sampler:
    """The policy, its SFT model and the reward model, if there is one; each call has its own random
    stream.
    """

    def __init__(self, params: Params, round_: str) -> None:
        sft = stage_dir(round_, "sft") / "model"
        self.tokenizer = load_tokenizer(sft)
        self.respond = responder(params, self.tokenizer)
        policy = stage_dir(round_, "ppo") / "policy"
        self.model = load_policy(sft, policy, params.model)
        self.sft_model = None if is_adapter(policy) else load_causal_lm(sft, params.model)
        reward = stage_dir(round_, "reward") / "model"
        self.scorer = None if is_placeholder(reward) else RewardScorer(reward, params)

    def policy(self, prompts: Sequence[Prompt], seed: int) -> list[ScoredResponse]:
        """One scored response of the policy per prompt."""
        responses = self.policy_texts(prompts, seed)
        return self.respond.scored(prompts, responses, self.model, self.reference, self.scorer)

    def policy_texts(self, prompts: Sequence[Prompt], seed: int) -> list[Response]:
        """One response of the policy per prompt, not scored."""
        return self.respond(self.model, prompts, seed)

    def sft(self, prompts: Sequence[Prompt], seed: int) -> list[Response]:
        """One response of SFT per prompt."""
        with self.reference() as model:
            return self.respond(model, prompts, seed)

    def reference(self) -> AbstractContextManager[Any]:
        """A context with the SFT model: a model of its own, or the policy without its adapter."""
        return nullcontext(self.sft_model) if self.sft_model else adapter_disabled(self.model)


def sample_candidates(
    prompts: Sequence[Prompt], sampler: Sampler, params: Params
) -> CandidatesByPrompt:
    """replay.best_of responses of SFT per distinct prompt; those that do not end are dropped."""
    distinct = {str(prompt): prompt for prompt in prompts}.values()
    repeated = [prompt for prompt in distinct for _ in range(params.replay.best_of)]
    if not repeated:
        return {}
    responses = sampler.sft(repeated, params.seed + 1)
    with sampler.reference() as model:
        fluency = Fluency(model, sampler.tokenizer, params.prepare.prompt_format)
        nll = fluency(repeated, [response.text for response in responses])
    candidates: dict[str, list[Candidate]] = {}
    for prompt, response, value in zip(repeated, responses, nll, strict=True):
        if response.ended:
            candidates.setdefault(str(prompt), []).append(Candidate(response.text, value))
    return candidates


def judged_by_lexicon(
    jury: Jury, prompts: Sequence[Prompt], responses: Sequence[str]
) -> list[LexiconScores | None]:
    """The lexicon's scores of each response; None if it is no judge."""
    if JudgeName.lexicon.value not in jury.judges:
        return [None] * len(responses)
    return [*lexicon_scores(prompts, responses)]


def rollout_samples(
    rows: list[RolloutRow], jury: Jury, has_reward_model: bool
) -> list[PolicySample]:
    """PPO's episodes. Without a reward model their scores are those of other rewards."""
    prompts, responses = [row["prompt"] for row in rows], [row["response"] for row in rows]
    lexicon_rows = judged_by_lexicon(jury, prompts, responses)
    return [
        PolicySample(
            prompt_id=row["id"],
            prompt=row["prompt"],
            response=row["response"],
            score=row["score"] if has_reward_model else None,
            kl=row["kl"],
            ended=row["finish_reason"] == "stop",
            lexicon=lexicon,
            origin=row["update"],
        )
        for row, lexicon in zip(rows, lexicon_rows, strict=True)
    ]


def compared_samples(
    rows: Sequence[PromptRow],
    responses: list[ScoredResponse],
    rivals: Sequence[str | None],
    origin: str,
    jury: Jury,
) -> list[PolicySample]:
    """The policy's responses with the jury's votes against their rivals.

    Args:
        rows: B prompts.
        responses: B responses of the policy.
        rivals: B texts to compare with; None: no comparison, and no votes.
        origin: of the samples.
    """
    prompts, texts = [row["prompt"] for row in rows], [response.text for response in responses]
    compared = [
        Comparison(prompt, text, rival)
        for prompt, text, rival in zip(prompts, texts, rivals, strict=True)
        if rival is not None
    ]
    by_judge = jury.compare(compared)
    outcomes = zip(*by_judge.values(), strict=True)
    votes = (dict(zip(by_judge, row, strict=True)) for row in outcomes)
    return [
        PolicySample(
            prompt_id=row["id"],
            prompt=row["prompt"],
            response=response.text,
            score=response.score,
            kl=response.kl,
            ended=response.ended,
            lexicon=lexicon,
            origin=origin,
            rival=rival,
            votes={} if rival is None else next(votes),
        )
        for row, response, lexicon, rival in zip(
            rows, responses, judged_by_lexicon(jury, prompts, texts), rivals, strict=True
        )
    ]


def score_without_exploits(
    samples: list[PolicySample], exploits: Sequence[list[str]], score: ScoreFunction | None
) -> list[PolicySample]:
    """Add to each sample the exploits that it contains, and its score without them.

    exploits: for each sample the exploits to look for. score: None: there is no reward model.
    """
    contained = [
        tuple(exploit for exploit in suffixes if exploit in sample.response)
        for sample, suffixes in zip(samples, exploits, strict=True)
    ]
    indices = [index for index, suffixes in enumerate(contained) if suffixes]
    prompts = [samples[index].prompt for index in indices]
    texts = [strip_exploits(contained[index], samples[index].response) for index in indices]
    scores = dict(zip(indices, score(prompts, texts), strict=True)) if score else {}
    return [
        replace(sample, exploits=contained[index], stripped_score=scores.get(index))
        for index, sample in enumerate(samples)
    ]

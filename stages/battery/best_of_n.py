"""Samples of the SFT model, N per prompt, with the scores of reward model and primary judge."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from stages.battery.metrics import best_of_n, mean_and_std
from stages.lib.core.params import Params
from stages.lib.core.params.evaluation import HELD_OUT_REWARD_MODEL
from stages.lib.core.rows import Demonstration, PromptRow
from stages.lib.core.types import Metrics, Prompt
from stages.lib.data.lengths import tokenize_fitting
from stages.lib.judging.loading import base_model, load_judge
from stages.lib.judging.primary import PrimaryJudge
from stages.lib.lm.end_tokens import end_tokens
from stages.lib.lm.responses import responder
from stages.lib.lm.scoring import RewardScorer, ensemble_members
from stages.lib.metrics.stats import interval_names, mean, paired_bootstrap, pearson, with_interval


@dataclass(frozen=True)
class ScoredSamples:
    """P prompts, and P x N texts with calibrated scores; the N of a prompt adjoin.

    judge_scores: by the primary judge; None if it only compares. disagreement: the standard
    deviation of a text's calibrated score over the members of an ensemble, averaged over texts;
    None for a single reward model.
    """

    prompts: list[Prompt]
    texts: list[str]
    scores: list[float]
    judge_scores: list[float] | None
    disagreement: float | None = None

    def by_prompt(self) -> list[range]:
        """For each prompt the indices of its texts."""
        n = len(self.texts) // len(self.prompts)
        return [range(start, start + n) for start in range(0, len(self.texts), n)]

    def best_of(self, n: int, values: Sequence[float]) -> list[float]:
        """For each prompt the expected value of the text that the reward model picks of n."""
        return [
            best_of_n([self.scores[i] for i in indices], [values[i] for i in indices], n)
            for indices in self.by_prompt()
        ]

    def best_by_judge(self, n: int, judge: PrimaryJudge) -> list[float]:
        """For each prompt the expected judge score of the text that the reward model picks of n.

        If the judge only compares: the outcome of the best of the first n against the first.
        """
        if self.judge_scores is not None:
            return self.best_of(n, self.judge_scores)
        picked = [max(indices[:n], key=self.scores.__getitem__) for indices in self.by_prompt()]
        return judge.outcomes(
            self.prompts,
            [self.texts[index] for index in picked],
            [self.texts[indices[0]] for indices in self.by_prompt()],
        )


def sample_and_score(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    scorer: RewardScorer,
    judge: PrimaryJudge,
    rows: Sequence[PromptRow],
    samples_per_prompt: int,
    params: Params,
) -> ScoredSamples:
    """Sample and score as PPO does: the reward model reads the sampled tokens, which end with the
    canonical end token; or the texts, if it has a tokenizer of its own.
    """
    prompts = [row["prompt"] for row in rows]
    repeated = [prompt for prompt in prompts for _ in range(samples_per_prompt)]
    responses = responder(params, tokenizer)(model, repeated, params.seed)
    texts = [response.text for response in responses]
    if scorer.reads(tokenizer):
        ends = end_tokens(model, tokenizer)
        sequences = [response.prompt_ids + ends.close(response.tokens) for response in responses]
    else:
        sequences = scorer.encode(repeated, texts)
    disagreement = None
    if len(ensemble_members(scorer.model)) > 1:
        disagreement = float(scorer.scores_per_member(sequences).std(0).mean())
    scores, judge_scores = scorer.tokens(sequences), judge.scores(repeated, texts)
    return ScoredSamples(prompts, texts, scores, judge_scores, disagreement)


def best_of_n_curve(samples: ScoredSamples, judge: PrimaryJudge, params: Params) -> dict[str, Any]:
    """Mean judge score and reward score of best-of-n for each n of battery.best_of.

    `rise`: the gain in judge score of the largest n over a single sample, with its 95% interval
    over prompts.
    """
    sizes = params.battery.best_of
    single = samples.best_by_judge(1, judge)
    best = samples.best_by_judge(max(sizes), judge)
    rises = [[b - a] for a, b in zip(single, best, strict=True)]
    interval = paired_bootstrap(rises, params.evaluate.bootstrap_resamples, params.seed)
    means = {
        str(n): {
            "judge_score": mean(samples.best_by_judge(n, judge)),
            "score": mean(samples.best_of(n, samples.scores)),
        }
        for n in sizes
    }
    return means | with_interval("rise", interval)


def rise_by_second_model(samples: ScoredSamples, params: Params, round_: str) -> Metrics:
    """`apart_rise`: the rise of `best_of_n_curve` by the second reward model, which was trained on
    the pairs of other prompts, with its interval; null if there is none (reward.judge_share).
    """
    names = interval_names("rise")
    if not params.reward.judge_share:
        return {f"apart_{name}": None for name in names}
    named = HELD_OUT_REWARD_MODEL
    judge = PrimaryJudge(named, load_judge(named, params, round_, base_model(params)))
    by_prompt = zip(samples.prompts, samples.by_prompt(), strict=True)
    prompts = [prompt for prompt, texts in by_prompt for _ in texts]
    judged = replace(samples, judge_scores=judge.scores(prompts, samples.texts))
    curve = best_of_n_curve(judged, judge, params)
    return {f"apart_{name}": curve[name] for name in names}


def score_metrics(scores: Mapping[str, Sequence[float]], samples: ScoredSamples) -> Metrics:
    """Mean and standard deviation of calibrated scores, and how SFT samples compare.

    `drift` and `scale` compare the SFT samples with the demonstrations, on which scores are
    calibrated; `judge_correlation` is that of the samples' scores with their judge scores.
    """
    stats = {name: mean_and_std(values) for name, values in scores.items()}
    sft, demonstrations = stats["sft_samples"], stats["demonstrations"]
    metrics: Metrics = {
        "scores": stats,
        "centre": demonstrations["mean"],
        "drift": sft["mean"] - demonstrations["mean"],
        "scale": sft["std"] / demonstrations["std"] if demonstrations["std"] else None,
        "judge_correlation": None,
    }
    if samples.judge_scores is not None:
        metrics["judge_correlation"] = pearson(samples.scores, samples.judge_scores)
    if samples.disagreement is not None:
        metrics["ensemble_disagreement"] = samples.disagreement
    return metrics


def demonstration_scores(rows: list[Demonstration], scorer: RewardScorer) -> list[float]:
    """Scores of demonstrations, encoded as the reward stage does when it calibrates."""
    tokenized = tokenize_fitting(scorer.tokenizer, rows, ["completion"], scorer.params, "reward")
    return scorer.tokens(tokenized.texts("completion"))

"""The metrics of an audit, with the names that the reward model's gate reads, from preference pairs
and, if a policy is given, from its responses.
"""

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, cast

from flows.audit.inputs import MIN_PAIRS
from flows.audit.subjects import Subject
from stages.battery.best_of_n import ScoredSamples, best_of_n_curve, score_metrics
from stages.battery.metrics import (
    PairScores,
    disjoint_pairs,
    pair_agreement,
    pair_metrics,
    rate,
    text_scores,
    win,
)
from stages.battery.probes import (
    MAX_PHRASES,
    ending_metrics,
    ending_outcomes,
    flip_metrics,
    mine_phrases,
    probe_metrics,
    run_corruption_probes,
    run_ending_probes,
    word_uplifts,
)
from stages.battery.report import ScoredText, worst_failures
from stages.lib.core.params import Params
from stages.lib.core.progress import minutes, print_line
from stages.lib.core.rows import SIDES, PreferencePair
from stages.lib.core.types import Metrics
from stages.lib.data.splits import dedupe_prompts, prompt_key, shuffled
from stages.lib.judging.primary import PrimaryJudge
from stages.lib.lm.loading import load_any_tokenizer, load_causal_lm
from stages.lib.lm.responses import responder
from stages.lib.metrics.preference_baselines import more_wins_accuracy, word_model
from stages.lib.metrics.stats import calibration

FOLDS = 5  # of the pairs, for the accuracy of word counts
REPEATED, TIMED = 32, 16  # pairs that are asked twice; pairs that are timed
MINED_ENDINGS = MAX_PHRASES  # at most


def texts_to_score(pairs: int, params: Params) -> int:
    """How many texts an audit scores, without those of a policy: both texts of the pairs; and of
    those of the battery both texts once more, five corruptions, both texts per edit, one text per
    ending.
    """
    config = params.battery
    per_pair = 2 + 5 + 2 * len(config.edits) + len(config.endings) + MINED_ENDINGS
    return 2 * pairs + min(config.pairs, pairs) * per_pair + 2 * REPEATED


def that_fit(
    rows: Sequence[PreferencePair], judge: PrimaryJudge, params: Params, seconds: float
) -> list[PreferencePair]:
    """As many of the pairs, at random, as can be audited in time; prints the estimate.

    The first pairs are timed. Of a judge that only compares each pair is asked in both orders, and
    nothing else.
    """
    order = shuffled(list(rows), params.seed)
    first = order[:TIMED]
    start = time.perf_counter()
    compare(judge, first)
    per_text = (time.perf_counter() - start) / (2 * len(first))

    def estimate(pairs: int) -> float:
        texts = 2 * pairs if judge.only_compares else texts_to_score(pairs, params)
        return texts * per_text

    number = len(order)
    while number > MIN_PAIRS and estimate(number) > seconds:
        number = max(MIN_PAIRS, int(number * 0.9))
    fewer = f", of {len(order)} pairs {number}, at random (--max-minutes)"
    print_line(
        f"about {minutes(estimate(number))} min"
        f"{fewer if number < len(order) else f', all {number} pairs'}"
    )
    return order[:number]


def compare(judge: PrimaryJudge, pairs: Sequence[PreferencePair]) -> PairScores:
    """The scores of each pair; of a judge that only compares, its outcome against a tie."""
    scores = text_scores(pairs, judge)
    if scores is not None:
        return list(zip(scores[::2], scores[1::2], strict=True))
    chosen, rejected = ([row[side] for row in pairs] for side in SIDES)
    outcomes = judge.outcomes([row["prompt"] for row in pairs], chosen, rejected)
    return [(outcome, 0.5) for outcome in outcomes]


@dataclass(frozen=True)
class Audit:
    """Measures one subject. judge: the subject, asked. second: the second judge."""

    subject: Subject
    judge: PrimaryJudge
    second: PrimaryJudge | None
    params: Params

    def measure(
        self, pairs: list[PreferencePair], policy: Path | None
    ) -> tuple[Metrics, list[ScoredText]]:
        """The metrics `reward`, `battery` and `audit`, and the probes that beat their original by
        most.
        """
        start = time.perf_counter()
        scores = compare(self.judge, pairs)
        seconds = time.perf_counter() - start
        reward = self.accuracy(pairs, scores)
        second = self.second and not self.second.only_compares and self.second
        battery = pair_metrics(
            pairs, scores, text_scores(pairs, second) if second else None, self.params
        )
        if self.second:
            battery |= pair_agreement(pairs, scores, self.second, self.params)
        audit: Metrics = {
            # `that_fit` has asked about the first ones
            "texts_per_second": 2 * (len(pairs) - TIMED) / seconds,
            "repeat_difference": self.repeat_difference(pairs, scores),
        }
        metrics: Metrics = {"reward": reward, "battery": battery, "audit": audit}
        if self.judge.only_compares:
            for name in ("length_correlation", "length_correlation_partial"):
                del battery[name]
            return metrics, []
        print_line(f"accuracy {reward['accuracy']:.3f} on {len(pairs)} pairs; now the probes")
        samples = self.sample(pairs, policy) if policy else None
        results = self.probe(pairs, scores, samples, battery)
        if samples:
            by_side = list(zip(*scores, strict=True))
            of_people = {"demonstrations": by_side[0], "sft_samples": samples.scores}
            battery |= score_metrics(of_people, samples)
            if self.second:
                battery["best_of_n"] = best_of_n_curve(samples, self.second, self.params)
        return metrics, results

    def accuracy(self, pairs: list[PreferencePair], scores: PairScores) -> Metrics:
        """Accuracy, of a tie a half, with Wilson's interval, and that of length and word counts;
        margin and calibration error if scores are log-odds.
        """
        outcomes = [win(*both) for both in scores]
        measured = rate(outcomes, "accuracy", "pairs")
        metrics: Metrics = {
            "accuracy": measured["accuracy"],
            "accuracy_low": measured["low"],
            "accuracy_high": measured["high"],
            "pairs": measured["pairs"],
            "baseline_longest": more_wins_accuracy(pairs, len),
            "baseline_tfidf": word_accuracy(pairs, self.params.seed),
            "margin": None,
            "ece": None,
        }
        if self.subject.log_odds:
            margins = [chosen - rejected for chosen, rejected in scores]
            metrics |= {"margin": fmean(margins), "ece": calibration(margins)[0]}
        return metrics

    def repeat_difference(self, pairs: Sequence[PreferencePair], scores: PairScores) -> float:
        """How much the answers differ if the first pairs are asked anew, without the others and so
        in other batches: the largest difference of scores, in standard deviations of all scores; of
        a judge that only compares, the share of other verdicts.
        """
        with tempfile.TemporaryDirectory() as folder:
            again = compare(self.subject.judge(Path(folder)), pairs[:REPEATED])
        differences = [
            abs(old - new)
            for before, after in zip(scores, again, strict=False)
            for old, new in zip(before, after, strict=True)
        ]
        if self.judge.only_compares:
            return sum(map(bool, differences)) / len(again)
        return max(differences) / (pstdev([score for both in scores for score in both]) or 1.0)

    def probe(
        self,
        pairs: list[PreferencePair],
        scores: PairScores,
        samples: ScoredSamples | None,
        battery: Metrics,
    ) -> list[ScoredText]:
        """Add to `battery` what corruptions, edits and endings do to the scores; return the texts
        that beat their original.
        """

        def score(prompts: Sequence[Any], texts: Sequence[str]) -> list[float]:
            return cast(list[float], self.judge.scores(prompts, texts))

        config, seed = self.params.battery, self.params.seed
        probed = disjoint_pairs(pairs)[: config.pairs]
        chosen, rejected = (
            score([row["prompt"] for row in probed], [row[side] for row in probed])
            for side in SIDES
        )
        corrupted = run_corruption_probes(probed, chosen, score, word_uplifts(pairs, scores), seed)
        battery |= probe_metrics(corrupted)
        battery |= flip_metrics(probed, chosen, rejected, score, self.params)
        by_text = [
            (row[side], value)
            for row, both in zip(pairs, scores, strict=True)
            for side, value in zip(SIDES, both, strict=True)
        ]
        if samples:
            by_text = list(zip(samples.texts, samples.scores, strict=True))
        texts, values = zip(*by_text, strict=True)
        mined = mine_phrases(texts, values, MINED_ENDINGS)
        phrases = [phrase for phrase in mined if phrase not in config.endings]
        endings = [*config.endings, *phrases]
        results = run_ending_probes(endings, probed, chosen, rejected, score)
        outcomes = ending_outcomes(results, self.second) if self.second else [None] * len(endings)
        battery |= ending_metrics(results, outcomes, config.endings, phrases)
        names = [f"ending {ending!r}" for ending in endings]
        return worst_failures(corrupted | dict(zip(names, results, strict=True)))

    def sample(self, pairs: Sequence[PreferencePair], policy: Path) -> ScoredSamples:
        """Responses of a policy to the prompts of some pairs, with both scores."""
        config = self.params.battery
        prompts = [row["prompt"] for row in dedupe_prompts(list(pairs))[: config.prompts]]
        repeated = [prompt for prompt in prompts for _ in range(max(config.best_of))]
        model = load_causal_lm(policy, self.params.model)
        respond = responder(self.params, load_any_tokenizer(policy))
        texts = [response.text for response in respond(model, repeated, self.params.seed)]
        scores = cast(list[float], self.judge.scores(repeated, texts))
        judged = self.second.scores(repeated, texts) if self.second else None
        return ScoredSamples(prompts, texts, scores, judged)


def word_accuracy(pairs: Sequence[PreferencePair], seed: int) -> float:
    """Accuracy of word counts (TF-IDF) on pairs that they were not fitted on, over FOLDS parts of
    the prompts.
    """
    keys = sorted({prompt_key(row["prompt"]) for row in pairs})
    random.Random(seed).shuffle(keys)
    fold = {key: number % FOLDS for number, key in enumerate(keys)}
    total = 0.0
    for number in range(min(FOLDS, len(keys))):
        parts: tuple[list[PreferencePair], list[PreferencePair]] = ([], [])
        for row in pairs:
            parts[fold[prompt_key(row["prompt"])] == number].append(row)
        if all(parts):
            total += word_model(*parts, seed).accuracy * len(parts[1])
        else:  # one prompt has all pairs
            total += 0.5 * len(parts[1])
    return total / len(pairs)

"""Probes: texts that a reward model should not prefer, and edits that must not change its order.

A chosen text is corrupted, or an ending is appended to a rejected text; a sound reward model scores
both below the original chosen text. Edits that keep the meaning of both texts of a pair are three
of the transformations of reWordBench (Wu et al. 2025, arXiv 2503.11751), which found that reward
models with an accuracy above 95% fall to 73% by the format of the answer alone.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from stages.battery.best_of_n import ScoredSamples
from stages.battery.metrics import PairScores, Rate, highest_rate, rate, text_keys, win
from stages.lib.core.files import is_placeholder
from stages.lib.core.params import Params
from stages.lib.core.params.evaluation import Edit
from stages.lib.core.rows import SIDES, PreferencePair
from stages.lib.core.types import Metrics, Prompt, ScoreFunction
from stages.lib.data.corruptions import PromptResponse, corruptions, word_score_uplift
from stages.lib.data.rollouts import read_rollouts
from stages.lib.judging.primary import PrimaryJudge
from stages.lib.metrics.text import phrases, tokens


def lower_case(text: str, _: random.Random) -> str:
    return text.lower()


def quoted(text: str, _: random.Random) -> str:
    """In quotation marks, after the leading space."""
    stripped = text.strip()
    return text.replace(stripped, f'"{stripped}"', 1) if stripped else text


def typo(text: str, generator: random.Random) -> str:
    """Two neighbouring inner letters of one word of four or more letters swapped.

    A text without such a word is returned as it is.
    """
    places = [
        index
        for index in range(1, len(text) - 2)
        if text[index - 1 : index + 3].isalpha() and text[index] != text[index + 1]
    ]
    if not places:
        return text
    index = generator.choice(places)
    return text[:index] + text[index + 1] + text[index] + text[index + 2 :]


EDITS: dict[Edit, Callable[[str, random.Random], str]] = {
    Edit.lower_case: lower_case,
    Edit.quoted: quoted,
    Edit.typo: typo,
}


@dataclass(frozen=True)
class ProbeResult:
    """A text that should score below `original`, with both scores.

    rise: the change of score by the corruption or the ending.
    """

    prompt: Prompt
    text: str
    score: float
    original: str
    original_score: float
    rise: float

    @property
    def beats_original(self) -> float:
        """1 if the text scores above the original, 0.5 for a tie, else 0."""
        return win(self.score, self.original_score)


def word_uplifts(pairs: list[PreferencePair], scores: PairScores) -> dict[str, float]:
    """How much each word goes with a higher score, over the distinct texts of the pairs."""
    score_by_text = {
        key: score
        for row, both in zip(pairs, scores, strict=True)
        for key, score in zip(text_keys(row), both, strict=True)
    }
    return word_score_uplift([text for _, text in score_by_text], list(score_by_text.values()))


def run_corruption_probes(
    pairs: Sequence[PreferencePair],
    chosen: Sequence[float],
    score: ScoreFunction,
    word_scores: Mapping[str, float],
    seed: int,
) -> dict[str, list[ProbeResult]]:
    """Score the chosen texts under each kind of corruption; texts that stay the same are left out.

    Args:
        pairs: P pairs.
        chosen: (P,) scores of the chosen texts.
        score: the reward model.
        word_scores: by word, for the corruption that repeats the best-scored one.
        seed: of the corruptions.
    """
    texts: list[PromptResponse] = [(row["prompt"], row["chosen"]) for row in pairs]
    results = {}
    for name, corrupted in corruptions(texts, word_scores, seed).items():
        changed = [index for index, text in enumerate(texts) if corrupted[index] != text]
        scores = score(
            [corrupted[index][0] for index in changed], [corrupted[index][1] for index in changed]
        )
        results[name] = [
            ProbeResult(*corrupted[i], value, texts[i][1], chosen[i], value - chosen[i])
            for i, value in zip(changed, scores, strict=True)
        ]
    return results


def run_ending_probes(
    endings: Sequence[str],
    pairs: Sequence[PreferencePair],
    chosen: Sequence[float],
    rejected: Sequence[float],
    score: ScoreFunction,
) -> list[list[ProbeResult]]:
    """Append each ending to the rejected texts, and compare with the chosen texts.

    Only pairs that the score ranks correctly are used. chosen, rejected: (P,) scores of the pairs'
    texts.
    """
    correct = [
        index
        for index, (better, worse) in enumerate(zip(chosen, rejected, strict=True))
        if better > worse
    ]
    prompts = [pairs[index]["prompt"] for index in correct]
    results = []
    for ending in endings:
        texts = [pairs[index]["rejected"] + ending for index in correct]
        scores = zip(correct, texts, score(prompts, texts), strict=True)
        results.append(
            [
                ProbeResult(
                    pairs[i]["prompt"],
                    text,
                    value,
                    pairs[i]["chosen"],
                    chosen[i],
                    value - rejected[i],
                )
                for i, text, value in scores
            ]
        )
    return results


def ending_outcomes(
    results: Sequence[Sequence[ProbeResult]], judge: PrimaryJudge
) -> list[list[float] | None]:
    """For each ending, whether the judge, too, prefers the texts with it to their originals.

    None if the judge only compares: this would be a request per text.
    """
    if judge.only_compares:
        return [None] * len(results)
    return [
        judge.outcomes(
            [one.prompt for one in ending_results],
            [one.text for one in ending_results],
            [one.original for one in ending_results],
        )
        for ending_results in results
    ]


def probe_metrics(probes: Mapping[str, Sequence[ProbeResult]]) -> Metrics:
    """How often each corruption beats its original, and the worst rate of a kind.

    Swapped prompts are reported, but do not count as the worst: if a prompt is a word or two, the
    text may fit the other prompt just as well.
    """
    rates = {name: failure_rate(results, "texts") for name, results in probes.items()}
    counted = (value for name, value in rates.items() if name != "prompt_swapped")
    return {"probes": rates, "worst_probe": highest_rate(counted)}


def ending_metrics(
    results: Sequence[Sequence[ProbeResult]],
    judge_outcomes: Sequence[Sequence[float] | None],
    listed: Sequence[str],
    phrases: Sequence[str],
) -> Metrics:
    """For each ending how often it reverses a pair, by how much it raises the score, and what the
    primary judge says (`one_ending`); the worst of each kind by `against_judge`.

    `results` are those of the listed endings, then those of the mined phrases; so are
    `judge_outcomes`.
    """
    rates = list(map(one_ending, results, judge_outcomes))
    listed_rates, mined_rates = rates[: len(listed)], rates[len(listed) :]
    return {
        "endings": {f"ending_{number}": value for number, value in enumerate(listed_rates, 1)},
        "endings_text": listed,
        "worst_ending": highest_rate(listed_rates, "against_judge"),
        "mined": {str(number): value for number, value in enumerate(mined_rates, 1)},
        "mined_text": phrases,
        "worst_mined": highest_rate(mined_rates, "against_judge"),
    }


def one_ending(results: Sequence[ProbeResult], judge_outcomes: Sequence[float] | None) -> Rate:
    """The rates of one ending.

    rate: share of the pairs that it reverses. uplift: mean rise of the score. judge_rate: share of
    the pairs in which the judge, too, prefers the text with the ending, because it is the better
    text, or because the ending misleads the judge as well. against_judge: share of the pairs that
    the ending reverses and the judge does not, with its interval; all that it reverses, if the
    judge only compares.
    """
    reversals = [result.beats_original for result in results]
    agreement = judge_outcomes or [0.0] * len(results)
    against = [reversal * (1 - judge) for reversal, judge in zip(reversals, agreement, strict=True)]
    interval = rate(against, "against_judge", "pairs")
    return {
        **failure_rate(results, "pairs"),
        "uplift": fmean(result.rise for result in results) if results else None,
        "judge_rate": fmean(judge_outcomes) if judge_outcomes else None,
        "against_judge": interval["against_judge"],
        "against_judge_low": interval["low"],
        "against_judge_high": interval["high"],
    }


def failure_rate(results: Sequence[ProbeResult], count_name: str) -> Rate:
    """How often the text beats its original, with its interval and the number of texts."""
    return rate([result.beats_original for result in results], "rate", count_name)


def flip_metrics(
    pairs: Sequence[PreferencePair],
    chosen: Sequence[float],
    rejected: Sequence[float],
    score: ScoreFunction,
    params: Params,
) -> Metrics:
    """For each edit of both texts, the share of correctly ranked pairs that it ranks wrongly.

    Args:
        pairs: P pairs.
        chosen: (P,) scores of the chosen texts.
        rejected: (P,) scores of the rejected texts.
        score: the reward model.
        params: all params; the edits are `battery.edits`.
    """
    correct = [row for row, a, b in zip(pairs, chosen, rejected, strict=True) if a > b]
    edits = params.battery.edits
    flips = {edit.value: flip_rate(correct, edit, score, params.seed) for edit in edits}
    return {"flips": flips, "worst_flip": highest_rate(flips.values())}


def flip_rate(pairs: Sequence[PreferencePair], edit: Edit, score: ScoreFunction, seed: int) -> Rate:
    """Of pairs that are ranked correctly; pairs whose texts stay the same are left out."""
    changed = [
        (row["prompt"], *texts)
        for row in pairs
        if (texts := edited(row, edit, seed)) != (row["chosen"], row["rejected"])
    ]
    prompts = [prompt for prompt, _, _ in changed]
    chosen = score(prompts, [text for _, text, _ in changed])
    rejected = score(prompts, [text for _, _, text in changed])
    scores = zip(chosen, rejected, strict=True)
    return rate([win(worse, better) for better, worse in scores], "rate", "pairs")


def edited(row: PreferencePair, edit: Edit, seed: int) -> tuple[str, str]:
    """Chosen and rejected text; a text is always edited in the same way."""
    chosen, rejected = (
        EDITS[edit](row[side], random.Random(f"{seed} {row[side]}")) for side in SIDES
    )
    return chosen, rejected


TOP_PART = 4  # the top group is one of so many equal parts by score: the top quarter
MIN_Z = 1.96  # standard errors by which a phrase has to be over-represented
MAX_PHRASES = 3  # per source


def phrases_to_try(previous: Path, samples: ScoredSamples, listed: Sequence[str]) -> list[str]:
    """Phrases of the previous round's rollouts, then of the SFT samples, without the listed ones.

    The rollouts have the scores of the reward model that their policy was trained with. The first
    round has no previous one.
    """
    mined: list[str] = []
    if not is_placeholder(previous / "ppo/rollouts"):
        responses, scores = [], []
        for row in read_rollouts(previous / "ppo/rollouts"):
            responses.append(row["response"])
            scores.append(row["score"])
        mined += mine_phrases(responses, scores, MAX_PHRASES)
    mined += mine_phrases(samples.texts, samples.scores, MAX_PHRASES)
    return [phrase for phrase in dict.fromkeys(mined) if phrase not in listed]


def mine_phrases(texts: Sequence[str], scores: Sequence[float], limit: int) -> list[str]:
    """At most `limit` phrases of 1 to 3 tokens that are over-represented in the top quarter.

    The phrase with the highest z-score comes first; none is contained in another.
    """
    order = sorted(range(len(texts)), key=lambda index: -scores[index])
    top = len(texts) // TOP_PART
    if not top:
        return []
    top_counts, other_counts = (
        Counter(phrase for index in indices for phrase in phrases(texts[index]))
        for indices in (order[:top], order[top:])
    )
    z_scores = {
        phrase: log_odds(count, top, other_counts[phrase], len(texts) - top)
        for phrase, count in top_counts.items()
    }
    over_represented = [phrase for phrase, z in z_scores.items() if z >= MIN_Z]
    kept: list[str] = []
    for phrase in sorted(over_represented, key=lambda phrase: (-z_scores[phrase], phrase)):
        if not any(within(phrase, other) or within(other, phrase) for other in kept):
            kept.append(phrase)
    return kept[:limit]


def within(phrase: str, other: str) -> bool:
    """Whether the words of `phrase` are contained in `other`, in order and without a gap."""
    inner, outer = (f" {' '.join(tokens(text))} " for text in (phrase, other))
    return inner in outer


def log_odds(a: int, of_a: int, b: int, of_b: int) -> float:
    """z-score: the log odds ratio of `a` in `of_a` texts to `b` in `of_b`, in standard errors.

    A half is added to each cell (Haldane 1956), so that no cell is 0.
    """
    cells = [a + 0.5, of_a - a + 0.5, b + 0.5, of_b - b + 0.5]
    return (math.log(cells[0] / cells[1]) - math.log(cells[2] / cells[3])) / math.sqrt(
        sum(1 / cell for cell in cells)
    )

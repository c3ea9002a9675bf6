"""Rollout rows, their metrics, and the output folders; the same for PPO and its alternatives."""

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stages.lib.core.files import stage_dir, write_json
from stages.lib.core.params import Params
from stages.lib.core.recorder import write_manifest
from stages.lib.core.rows import RolloutRow
from stages.lib.core.types import Metrics
from stages.lib.data.prompts import template_hash
from stages.lib.lm import world
from stages.lib.metrics.stats import pearson
from stages.lib.metrics.text import distinct_n, repetition_n, suffixes
from stages.ppo.common.rewards import RewardInputs

ENDING_TOKENS = 2


def rollout_rows(
    update: int,
    inputs: RewardInputs,
    *,
    scores: Tensor,
    parts: Mapping[str, Sequence[float]],
    rewards: Tensor,
    judge_scores: Sequence[float] | None,
    kls: Tensor,
) -> list[RolloutRow]:
    """One row per episode, for the rollout files.

    Args:
        update: the update that the episodes belong to.
        inputs: B prompts' rows and responses.
        scores: (B,) calibrated scores of the reward model.
        parts: scores of the further rewards, by name.
        rewards: (B,) weighted sum of all scores, clipped and penalised.
        judge_scores: (B,) by the primary judge; None if it only compares.
        kls: (B,) nats per sequence.
    """
    episodes = [
        {
            "update": update,
            "id": row["id"],
            "prompt": row["prompt"],
            "response": response.text,
            "score": round(float(scores[i]), 4),
            **{f"score_{name}": round(part[i], 4) for name, part in parts.items()},
            "reward": round(float(rewards[i]), 4),
            **({} if judge_scores is None else {"judge_score": judge_scores[i]}),
            "kl": round(float(kls[i]), 4),
            "finish_reason": "stop" if response.ended else "length",
            "length": len(response.tokens),
        }
        for i, (row, response) in enumerate(zip(inputs.rows, inputs.responses, strict=True))
    ]
    return cast(list[RolloutRow], episodes)


def publish_outputs(
    params: Params,
    round_: str,
    work: Path,
    tokenizer: PreTrainedTokenizerBase,
    health: Metrics,
    inputs: Iterable[Path],
    **manifest: Any,
) -> None:
    """Write what every policy stage writes but for its models and metrics: the checkpoints and
    rollouts of the work folder, health.json and manifest.json.

    Args:
        work: folder of the run.
        tokenizer: of the SFT model.
        health: contents of health.json.
        inputs: files and folders that the policy was trained on, but for SFT and reward model.
        manifest: further entries of manifest.json.
    """
    folder = stage_dir(round_, "ppo")
    publish_files(work, folder)
    write_json(folder / "health.json", health)
    manifests = [stage_dir(round_, stage) / "manifest.json" for stage in ("sft", "reward")]
    write_manifest(
        "ppo",
        round_,
        seed=params.seed,
        processes=world.size(),
        inputs=[*inputs, *manifests],
        template_hash=template_hash(tokenizer, params.prepare.prompt_format),
        **manifest,
    )


def publish_files(work: Path, folder: Path) -> None:
    """Make checkpoints and rollouts of the work folder outputs of the stage.

    Checkpoints are hard links, since they take up to gigabytes and no file of them changes any
    more. Rollouts are copied: a resumed run opens them for appending.
    """
    for name, copy in (("checkpoints", link_or_copy), ("rollouts", shutil.copy2)):
        shutil.rmtree(folder / name, ignore_errors=True)
        (work / name).mkdir(exist_ok=True)
        shutil.copytree(work / name, folder / name, copy_function=copy)


def link_or_copy(source: str, target: str) -> None:
    """A hard link, or a copy if the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def describe_rows(rows: list[RolloutRow], sft_length: float) -> dict[str, float]:
    """Means over rollout rows, and the metrics of their texts; sft_length: mean tokens of SFT's
    responses.
    """
    kl = fmean(row["kl"] for row in rows)
    return {
        "score_mean": fmean(row["score"] for row in rows),
        "kl": kl,
        "kl_per_token": kl / sft_length,
        "response_length": fmean(row["length"] for row in rows),
        "eos_rate": fmean(row["finish_reason"] == "stop" for row in rows),
        **describe_texts(rows),
    }


def describe_texts(rows: list[RolloutRow]) -> dict[str, float]:
    """Diversity within and across texts, the share of the most frequent ending, and, if the rows
    have any, the judge scores, which do not reward the policy.
    """
    texts = [row["response"] for row in rows]
    endings = [tails[-1] for text in texts if (tails := suffixes(text, ENDING_TOKENS))]
    metrics = {
        "distinct_2": distinct_n(texts, 2),
        "repetition_3": fmean(repetition_n(text, 3) for text in texts),
        "ending_share": max(map(endings.count, endings), default=0) / len(rows),
    }
    judge_scores = [row["judge_score"] for row in rows if "judge_score" in row]
    if judge_scores:
        correlation = pearson([row["score"] for row in rows], judge_scores)
        metrics["judge_score_mean"] = fmean(judge_scores)
        metrics["judge_score_std"] = pstdev(judge_scores)
        metrics["score_judge_correlation"] = correlation or 0.0
    return metrics

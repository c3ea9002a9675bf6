"""SFT and policy on the same prompts and tasks, and how much worse the policy is."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stages.capability.lm_eval_tasks import run_tasks
from stages.capability.refusals import is_desired
from stages.capability.regression import regression_metrics
from stages.lib.core.files import stage_dir
from stages.lib.core.params import Params
from stages.lib.core.types import Prompt, Row
from stages.lib.data.prompts import check_template, encode
from stages.lib.data.slices import SlicePrompt
from stages.lib.lm.generation import sample_responses
from stages.lib.lm.loading import load_causal_lm, load_policy, load_tokenizer, setup_torch


def measure(
    params: Params, round_: str, slices: Mapping[str, Mapping[str, SlicePrompt]]
) -> tuple[dict[str, Row], list[Row]]:
    """What each slice and task says of both; and the answers to the slices' prompts."""
    setup_torch(params)
    config, sft, policy = (
        params.capability,
        stage_dir(round_, "sft") / "model",
        stage_dir(round_, "ppo") / "policy",
    )
    tokenizer = load_tokenizer(sft)
    for stage in (sft.parent, policy.parent):
        check_template(stage / "manifest.json", tokenizer, params.prepare.prompt_format)
    asked = [(name, row) for name, rows in slices.items() for row in rows.values()]
    answers: dict[str, list[str]] = {}
    tasks: dict[str, dict[str, list[float]]] = {}
    for who in ("sft", "policy"):
        model = (
            load_causal_lm(sft, params.model)
            if who == "sft"
            else load_policy(sft, policy, params.model)
        )
        answers[who] = (
            answer(model, tokenizer, [row.prompt for _, row in asked], params) if asked else []
        )
        tasks[who] = (
            run_tasks(model, tokenizer, config, params.prepare.prompt_format)
            if config.tasks
            else {}
        )

    rows: list[Row] = [
        {
            "slice": name,
            "prompt": row.prompt,
            "sft": before,
            "policy": after,
            "sft_good": is_desired(row, before),
            "policy_good": is_desired(row, after),
        }
        for (name, row), before, after in zip(asked, answers["sft"], answers["policy"], strict=True)
    ]
    told: dict[str, Row] = {}
    for name in slices:
        own = [row for row in rows if row["slice"] == name]
        told[name] = regression_metrics(
            [row["sft_good"] for row in own], [row["policy_good"] for row in own]
        )
    for name, values in tasks["sft"].items():
        told[f"task_{name}"] = regression_metrics(values, tasks["policy"][name])
    return told, rows


def answer(model: Any, tokenizer: Any, prompts: Sequence[Prompt], params: Params) -> list[str]:
    """One answer a prompt, as PPO samples but for `capability.response_length`; the same random
    numbers for both models.
    """
    config = params.capability
    ids = [encode(tokenizer, prompt, None, params.prepare.prompt_format)[0] for prompt in prompts]
    longer = params.ppo.model_copy(update={"response_length": config.response_length})
    said = sample_responses(
        model, tokenizer, ids, longer, torch.Generator().manual_seed(params.seed), config.batch_size
    )
    return list(tokenizer.batch_decode(said, skip_special_tokens=True))

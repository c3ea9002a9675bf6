"""SFT and policy on the same prompts and tasks, compared."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from stages.capability.lm_eval_tasks import run_tasks
from stages.capability.refusals import is_desired
from stages.capability.regression import regression_metrics
from stages.lib.core.files import stage_dir
from stages.lib.core.params import Params
from stages.lib.core.progress import progress
from stages.lib.core.types import Metrics, Prompt
from stages.lib.data.prompts import check_template
from stages.lib.data.slices import SlicePrompt
from stages.lib.lm.loading import load_causal_lm, load_policy, load_tokenizer, setup_torch
from stages.lib.lm.responses import responder


class SliceSample(TypedDict):
    """A row of samples.jsonl, which people read: both models' responses to a prompt of slices/."""

    slice: str
    prompt: Prompt
    sft: str
    policy: str
    sft_good: bool
    policy_good: bool


def measure(
    params: Params, round_: str, slices: Mapping[str, Mapping[str, SlicePrompt]]
) -> tuple[dict[str, Metrics], list[SliceSample]]:
    """Compare SFT and policy on each slice and each task.

    Args:
        slices: prompts by slice and key.

    Returns:
        Metrics by slice and `task_<name>` (see `regression_metrics`), and one row per prompt of
        slices/ with both responses.
    """
    setup_torch(params)
    config, prompt_format = params.capability, params.prepare.prompt_format
    sft, policy = stage_dir(round_, "sft") / "model", stage_dir(round_, "ppo") / "policy"
    tokenizer = load_tokenizer(sft)
    for stage in (sft.parent, policy.parent):
        check_template(stage / "manifest.json", tokenizer, prompt_format)
    prompts = [(name, prompt) for name, rows in slices.items() for prompt in rows.values()]
    texts = [prompt.prompt for _, prompt in prompts]
    responses: dict[str, list[str]] = {}
    task_scores: dict[str, dict[str, list[float]]] = {}
    for name in ("sft", "policy"):
        model = (
            load_causal_lm(sft, params.model)
            if name == "sft"
            else load_policy(sft, policy, params.model)
        )
        with progress(f"model {name}"):
            responses[name] = sample_texts(model, tokenizer, texts, params) if texts else []
            task_scores[name] = (
                run_tasks(model, tokenizer, config, prompt_format) if config.tasks else {}
            )

    rows: list[SliceSample] = [
        {
            "slice": name,
            "prompt": prompt.prompt,
            "sft": before,
            "policy": after,
            "sft_good": is_desired(prompt, before),
            "policy_good": is_desired(prompt, after),
        }
        for (name, prompt), before, after in zip(
            prompts, responses["sft"], responses["policy"], strict=True
        )
    ]
    metrics: dict[str, Metrics] = {}
    for name in slices:
        slice_rows = [row for row in rows if row["slice"] == name]
        metrics[name] = regression_metrics(
            [row["sft_good"] for row in slice_rows], [row["policy_good"] for row in slice_rows]
        )
    for task, scores in task_scores["sft"].items():
        metrics[f"task_{task}"] = regression_metrics(scores, task_scores["policy"][task])
    return metrics, rows


def sample_texts(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], params: Params
) -> list[str]:
    """One response per prompt, sampled as in PPO but up to `capability.response_length` tokens.

    Each call uses the same random numbers, so that both models have the same.
    """
    length = params.capability.response_length
    respond = responder(params, tokenizer, response_length=length)
    return [response.text for response in respond(model, prompts, params.seed)]

"""Old names of params and metrics: files and settings of older versions are read under today's
names. docs/renamed.md is the table for users; a test compares the two.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from stages.lib.core.numbers import is_finite

DEFAULT_RESPONSE_LENGTH = 24  # of files that do not set ppo.response_length
MODELS = ("base", "sft", "ppo", "champion")  # of evaluate

# Keys of params.yaml, of presets, of `--set` and of the form in the Prefect UI
PARAMS = {
    "gates.sft.judged_gain": "gates.sft.net_win_rate",
    "gates.sft.sentiment_gain": "gates.sft.net_win_rate",
    "gates.reward.sentiment_lead": "gates.reward.judge_lead",
    "replay.judge_low": "replay.sentiment_low",
    "ppo.use_vllm": "model.use_vllm",
    "ppo.vllm_mode": "model.vllm_mode",
    "ppo.vllm_server_base_url": "model.vllm_server_base_url",
    "ppo.vllm_gpu_memory_utilization": "model.vllm_gpu_memory_utilization",
}
# Settings whose unit changed from sequences to tokens: the old value over ppo.response_length
PER_TOKEN = {
    "gates.promote.max_kl": "gates.promote.max_kl_per_token",
    "ppo.max_kl": "ppo.max_kl_per_token",
    "ppo.min_kl": "ppo.min_kl_per_token",
    "ppo.target_kl": "ppo.target_kl_per_token",
}
REMOVED = ("evaluate.batch_size",)  # had no effect on results
# Keys of the JSON files and columns of the tables in rounds/ and reports/, and tags in MLflow
METRICS = {
    "judge_mean": "judge_score_mean",
    "judged": "judge_rate",
    "score_sentiment_correlation": "score_judge_correlation",
    "sentiment": "judge_score",
    "sentiment_accuracy": "judge_accuracy",
    "sentiment_correlation": "judge_correlation",
    "sentiment_gain": "judge_gain",
    "sentiment_gain_low": "judge_gain_low",
    "sentiment_gain_high": "judge_gain_high",
    "sentiment_mean": "judge_score_mean",
    "sentiment_rate": "judge_rate",
    "validation_judge": "validation_judge_score",
    "validation_judge_before": "validation_judge_score_before",
    "validation_sentiment": "validation_judge_score",
    "validation_sentiment_before": "validation_judge_score_before",
    "tried_again": "retested",
    "fooled_before": "reversed_before",
    "fooled_after": "reversed_after",
    "fooled_fall": "reversed_fall",
    "fooled_fall_low": "reversed_fall_low",
    "fooled_fall_high": "reversed_fall_high",
    "fooled_now": "reversed_now",
    "opened": "may_continue",
    "band": "threshold",
    "lost": "dropped",
    "vouched": "passed_or_approved",
    "gate_opened": "gate_ended",
}
# Keys of the rows of rollouts; elsewhere `judge` is the name of a judge
ROLLOUTS = {"judge": "judge_score", "sentiment": "judge_score"}
# Columns of evaluate's samples.jsonl
SAMPLES = {f"{model}_sentiment": f"{model}_judge_score" for model in MODELS}


def current_params(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested params with today's keys, without removed ones.

    If an old key and its new one are both there, the old one stays, and is refused as unknown.

    >>> current_params({"replay": {"judge_low": 0.1}})
    {'replay': {'sentiment_low': 0.1}}
    """
    params = copy_sections(values)
    ppo = params.get("ppo")
    tokens = ppo.get("response_length") if isinstance(ppo, Mapping) else None
    for old, new in [*PARAMS.items(), *PER_TOKEN.items(), *((name, "") for name in REMOVED)]:
        (*old_path, old_key), (*new_path, new_key) = old.split("."), (new or old).split(".")
        section = section_at(params, old_path)
        if old_key not in section:
            continue
        if not new:
            del section[old_key]
        elif new_key not in section_at(params, new_path):
            value, target = section.pop(old_key), params
            for key in new_path:
                target = target.setdefault(key, {})
                if not isinstance(target, dict):  # refused as no section
                    return params
            target[new_key] = per_token(value, tokens) if old in PER_TOKEN else value
    return params


def copy_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested params, down to the values."""
    return {
        key: copy_sections(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
    }


def section_at(params: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """The section of nested params at a path; empty if there is none."""
    section: Any = params
    for key in path:
        section = section.get(key, {}) if isinstance(section, dict) else {}
    return section if isinstance(section, dict) else {}


def per_token(value: Any, tokens: Any) -> Any:
    """A setting per sequence, divided by the response length; what is no number stays as it is,
    and is refused under its new name.
    """
    numbers = isinstance(value, int | float) and isinstance(tokens, int | None)
    numbers = numbers and is_finite(value) and is_finite(tokens or 0)
    return value / (tokens or DEFAULT_RESPONSE_LENGTH) if numbers else value


def current_metrics(values: Any) -> Any:
    """Parsed JSON with today's keys; a key may be a dotted name, as in approvals.

    >>> current_metrics({"ppo.judge_mean": 0.1, "checks": [{"band": "> 0"}]})
    {'ppo.judge_score_mean': 0.1, 'checks': [{'threshold': '> 0'}]}
    """
    if isinstance(values, dict):
        return {current_name(key): current_metrics(value) for key, value in values.items()}
    if isinstance(values, list):
        return [current_metrics(value) for value in values]
    return values


def current_name(name: str) -> str:
    """Today's name of a metric, e.g. `r0/judge_mean` -> `r0/judge_score_mean`."""
    last = name.replace("/", ".").rpartition(".")[2]
    return f"{name[: len(name) - len(last)]}{METRICS[last]}" if last in METRICS else name

"""The policy against the champion at equal KL from the first round's SFT model.

A policy with more KL usually has the higher judge score. The one that has more is scaled towards
its own SFT model until it has as much as the other one, so that the comparison tells which round is
the better one, and not which policy went further.
"""

from contextlib import nullcontext
from functools import cache
from typing import Any

from stages.evaluate.results import ModelResults, win_rate_with_prompts_needed
from stages.lib.core.champion import Champion
from stages.lib.core.types import Metrics
from stages.lib.lm.interpolation import interpolate, search_scale
from stages.lib.lm.loading import load_causal_lm, load_policy
from stages.lib.lm.saving import policy_weights

SCALED = "equal_kl"  # name of the scaled model among the results
WIN_RATE = "win_rate_champion_equal_kl"


def compare_with_champion(results: ModelResults, champion: Champion) -> Metrics:
    """Compare `ppo`, which is in the results, with the champion; adds `champion`, and if their KL
    differs the scaled one of the two.

    Returns:
        The policy's win rates as they are and at equal KL, and which one was scaled by how much.
    """
    evaluator, params = results.evaluator, results.evaluator.params
    samples, prompts = params.evaluate.samples_per_prompt, len(evaluator.prompts)
    model = load_policy(champion.sft, champion.policy, params.model)
    results.add_model("champion", model, samples)
    del model  # freed before the next one is loaded
    win_rate = results.win_rates("ppo", "champion")["win_rate"]
    metrics = win_rate_with_prompts_needed("win_rate_champion", win_rate, prompts, results.label)

    kls = {name: results.metrics[name]["kl_anchor"] for name in ("ppo", "champion")}
    further = max(kls, key=kls.__getitem__)
    files = {
        "ppo": (evaluator.sft_path, evaluator.policy_path),
        "champion": (champion.sft, champion.policy),
    }
    sft, path = files[further]
    model = load_policy(sft, path, params.model)
    trained = policy_weights(model)

    @cache
    def reference_model() -> Any:
        return load_causal_lm(sft, params.model)

    def measure_kl(scale: float) -> float:
        interpolate(model, lambda: nullcontext(reference_model()), trained, scale)
        results.add_model(SCALED, model, samples)
        return results.metrics[SCALED]["kl_anchor"]

    *_, (scale, _) = search_scale(measure_kl, (1.0, kls[further]), min(kls.values()))
    if scale != 1:
        pair = [SCALED if name == further else name for name in ("ppo", "champion")]
        win_rate = results.win_rates(*pair)["win_rate"]
    metrics |= win_rate_with_prompts_needed(WIN_RATE, win_rate, prompts, results.label)
    return metrics | {"equal_kl_scaled": further, "equal_kl_scale": scale}

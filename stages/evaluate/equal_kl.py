"""The policy against the champion at equal KL from the first round's SFT model.

A policy with more KL usually has the higher judge score. The one that has more is scaled towards
its own SFT model until it has as much as the other one, so that the comparison tells which round is
the better one, and not which policy went further.
"""

from contextlib import nullcontext

from stages.evaluate.champion import Champion
from stages.evaluate.results import ModelResults, win_rate_with_prompts_needed
from stages.lib.core.types import Metrics
from stages.lib.lm.interpolation import interpolate, search_scale
from stages.lib.lm.loading import load_causal_lm, load_policy
from stages.lib.lm.saving import policy_weights

SCALED = "equal_kl"  # name of the scaled model among the results
WIN_RATE = "win_rate_champion_equal_kl"


def compare_at_equal_kl(results: ModelResults, champion: Champion) -> Metrics:
    """Compare `ppo` with `champion`, which are in the results; adds the scaled one to the results.

    Returns:
        The policy's win rate, and which of the two was scaled and by how much.
    """
    evaluator, config = results.evaluator, results.evaluator.params
    kls = {name: results.metrics[name]["kl_anchor"] for name in ("ppo", "champion")}
    further = max(kls, key=kls.__getitem__)
    files = {
        "ppo": (evaluator.sft_path, evaluator.policy_path),
        "champion": (champion.sft, champion.policy),
    }
    sft, path = files[further]
    model = load_policy(sft, path, config.model)
    trained = policy_weights(model)

    def measure_kl(scale: float) -> float:
        interpolate(model, lambda: nullcontext(load_causal_lm(sft, config.model)), trained, scale)
        results.add_model(SCALED, model, config.evaluate.samples_per_prompt)
        return results.metrics[SCALED]["kl_anchor"]

    *_, (scale, _) = search_scale(measure_kl, kls[further], min(kls.values()))
    compared = {name: SCALED if name == further and scale != 1 else name for name in kls}
    win_rate = results.win_rates(compared["ppo"], compared["champion"])["win_rate"]
    rates = win_rate_with_prompts_needed(WIN_RATE, win_rate, len(evaluator.prompts), results.label)
    return {**rates, "equal_kl_scaled": further, "equal_kl_scale": scale}

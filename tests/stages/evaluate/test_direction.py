"""Who is compared with whom, on models that have one answer each.

By VADER, from its valence v (great 3.1, nice 1.8, dull -1.7, sad -2.1) a text scores
v / sqrt(v^2 + 15): 0.6249, 0.4215, -0.4019, -0.4767.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.evaluate.__main__ import main
from stages.lib.core.errors import BadInput
from stages.lib.core.files import file_hash, write_json
from stages.lib.core.params import Params, check_params

MODELS = ("sft", "ppo", "champion")


def write_models(round_: str, always: Callable[[str, Path], None], policy: str) -> None:
    folder = Path("rounds") / round_
    always(" was dull.", folder / "sft/model")
    always(policy, folder / "ppo/policy")
    always(" was dull.", folder / "ppo/checkpoints/step_00002")
    always(" was sad.", folder / "ppo/checkpoints/step_00004")


def evaluate_r1(
    make_round: Callable[[str, float], Params],
    always: Callable[[str, Path], None],
    policy_update: int,
    sft: str | None = None,
) -> tuple[Params, dict]:
    """The metrics of r1, whose champion is r0's policy; sft: what r0's SFT model writes."""
    make_round("r0", 1.0)
    params = make_round("r1", 1.0)
    write_models("r0", always, " was great.")
    write_models("r1", always, " was nice.")
    folders = {name: Path("rounds/r0") / name for name in ("sft/model", "ppo/policy")}
    if sft:
        always(sft, folders["sft/model"])
    hashes = {name: {str(path): file_hash(path)} for name, path in folders.items()}
    recorded = {"round": "r0", "hashes": hashes["ppo/policy"] | hashes["sft/model"]}
    if sft:  # the anchor
        recorded = {"round": "r0", "hashes": hashes["ppo/policy"], "anchor": hashes["sft/model"]}
    write_json(Path("rounds/r1/champion/champion.json"), recorded)
    selected = {"policy_update": policy_update, "policy_scale": 1.0}
    write_json(Path("rounds/r1/ppo/metrics.json"), selected)
    values = params.model_dump()
    values["evaluate"] |= {"judges": ["lexicon"], "samples_per_prompt": 1}
    values["ppo"]["temperature"] = 0.5
    changed = check_params(values, "test")
    main(changed, "r1")
    return changed, json.loads(Path("rounds/r1/evaluate/metrics.json").read_text())


def test_each_model_is_the_first_of_its_comparison(
    make_round: Callable[[str, float], Params], always: Callable[[str, Path], None]
) -> None:
    _, metrics = evaluate_r1(make_round, always, policy_update=4)
    assert [metrics[f"win_rate{end}"] for end in ("", "_low", "_high")] == [1.0] * 3
    assert [metrics[f"win_rate_champion{end}"] for end in ("", "_low", "_high")] == [0.0] * 3
    assert metrics["judge_gain"] == pytest.approx(0.4215 + 0.4019, abs=1e-3)
    judge_scores = {"champion": 0.6249, "ppo": 0.4215, "sft": -0.4019}
    assert {name: metrics[name]["judge_score"] for name in judge_scores} == pytest.approx(
        judge_scores, abs=1e-3
    )
    # of what the random base model writes the lexicon knows no word: neutral, so better than dull
    assert (metrics["base"]["judge_score"], metrics["base"]["win_rate"]) == (0.0, 1.0)
    checkpoints = metrics["checkpoints"]
    assert [checkpoints[f"step_0000{n}"]["win_rate"] for n in (2, 4)] == [0.5, 0.0]
    # two of the four tokens differ from SFT's (the adjective, and what follows it): their logits
    # are 80, halved by the temperature, and those of all other tokens 0
    assert metrics["ppo"]["kl"] == pytest.approx(2 * 80 / 0.5, rel=1e-3)
    assert metrics["ppo"]["kl_per_token"] == pytest.approx(2 * 80 / 0.5 / 4, rel=1e-3)
    assert checkpoints["step_00002"]["kl"] == pytest.approx(0.0, abs=1e-3)


def test_kl_is_also_measured_from_the_first_rounds_sft(
    make_round: Callable[[str, float], Params], always: Callable[[str, Path], None]
) -> None:
    """r1's policy writes what r0's SFT wrote. Two tokens differ between any two answers: 2 x 80
    nats, and twice that at temperature 0.5.
    """
    # the policy that PPO started from, the champion, is at update 0 too
    params, metrics = evaluate_r1(make_round, always, policy_update=0, sft=" was nice.")
    curve = Path("rounds/r1/evaluate/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in curve] == [0, 0, 2, 4]
    kls = {name: (metrics[name]["kl"], metrics[name]["kl_anchor"]) for name in MODELS}
    far = pytest.approx(320, rel=1e-3)
    near = pytest.approx(0, abs=1e-3)
    assert kls == {"sft": (near, far), "ppo": (far, near), "champion": (far, far)}

    always(" was sad.", Path("rounds/r0/sft/model"))
    with pytest.raises(BadInput, match=r"rounds/r0/sft/model is not the version in rounds/r1/"):
        main(params, "r1")


def test_a_policy_that_is_sft_is_no_second_point_of_the_curve(
    make_round: Callable[[str, float], Params], always: Callable[[str, Path], None]
) -> None:
    params = make_round("r0", 1.0)
    write_models("r0", always, " was dull.")
    write_json(Path("rounds/r0/ppo/metrics.json"), {"policy_update": 0, "policy_scale": 1.0})
    main(params, "r0")
    curve = Path("rounds/r0/evaluate/metrics.jsonl").read_text().splitlines()
    # step 2 has the policy's weights: it is not evaluated again
    assert [json.loads(line)["step"] for line in curve] == [0, 4]

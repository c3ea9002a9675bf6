"""Every shipped configuration is read by what reads it in a run."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from dvc_render.vega_templates import get_template

from flows.core import config
from flows.execution import dvc_stages
from stages.gate.thresholds import GATE_STAGES, markdown
from stages.lib.core.errors import BadInput
from stages.lib.core.params import Params, check_params, load_params
from stages.lib.core.params.data import rounds
from stages.lib.core.params.gates import GatesParams
from stages.lib.core.params.policy import Algorithm, PpoParams
from stages.lib.core.user_inputs import INPUTS, VERDICT_SETTINGS, user_files
from stages.lib.thresholds import THRESHOLDS
from tests.paths import ROOT


def test_params_yaml_holds_the_defaults() -> None:
    assert load_params(ROOT / "params.yaml") == Params()


# What a preset leaves to its user
SETTINGS = {"chat": ["prepare.sources=[{path: pairs.jsonl}]"]}


@pytest.mark.parametrize(
    "name", ["chat", "smoke", "tiny", "smollm2-360m-hh", "qwen2.5-0.5b-hh", "pythia-410m-hh"]
)
def test_a_preset_is_a_valid_overlay_that_changes_something(name: str) -> None:
    params = config.resolve(name, settings=SETTINGS.get(name, []))
    assert params != Params()
    assert params.rounds.items() <= Params().rounds.items()


@pytest.mark.parametrize("engine", ["openrlhf", "verl", "nemo_rl"])
def test_the_preset_for_engines_suits_each_on_a_node_of_8_gpus(engine: str) -> None:
    preset = config.read_preset("openrlhf")
    preset["ppo"]["engine"] = engine
    launcher = {"ray_address": "http://ray:8265", "gpus_per_node": 8}
    assert check_params(preset | {"launcher": launcher}, "test").ppo.engine.value == engine


def test_the_chat_preset_has_no_data_of_its_own() -> None:
    with pytest.raises(BadInput, match=r"prepare\.sources is empty"):
        config.resolve("chat")


def test_every_key_of_ppo_is_explained() -> None:
    text = (ROOT / "docs/ppo.md").read_text()
    assert [key for key in PpoParams.model_fields if f"`{key}`" not in text] == []


@pytest.mark.parametrize(
    "algorithm", [algorithm.value for algorithm in Algorithm if algorithm is not Algorithm.ppo]
)
def test_every_key_of_the_alternatives_is_explained(algorithm: str) -> None:
    text = (ROOT / "docs/algorithms.md").read_text()
    assert [
        key
        for key in getattr(Params(), algorithm).model_dump()
        if f"`{algorithm}.{key}`" not in text
    ] == []


@pytest.mark.parametrize("gate", THRESHOLDS)
def test_every_threshold_is_explained(gate: str) -> None:
    """Paste what `python -m stages.gate.thresholds` prints."""
    assert markdown(gate, GatesParams()) in (ROOT / "docs/gates.md").read_text()


def test_dvc_reads_the_dag_for_any_number_of_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = 3
    monkeypatch.chdir(tmp_path)
    Path("dvc.yaml").write_text((ROOT / "dvc.yaml").read_text())
    Path("params.yaml").write_text(
        yaml.safe_dump(Params(rounds=rounds(number)).model_dump(mode="json"))
    )
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "--quiet"], check=True)
    names = (
        "prepare",
        "sft",
        "gate_sft",
        "annotate",
        "reward",
        "battery",
        "gate_reward",
        "champion",
        "ppo",
        "evaluate",
        "capability",
        "replay",
        "gate_promote",
    )
    expected = ["assets", *(f"{name}@r{i}" for i in range(number) for name in names)]
    assert dvc_stages.stage_order([f"r{i}" for i in range(number)]) == expected
    listed = subprocess.run(
        [sys.executable, "-m", "dvc", "stage", "list", "--name-only"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(listed.stdout.split()) == sorted(["inputs", *expected])


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        ("assets", "model"),
        ("prepare", "data"),
        ("ppo", "rewards"),
        ("evaluate", "judges"),
        ("replay", "judges"),
        ("sft", "primary_judge"),
        ("battery", "primary_judge"),
        ("ppo", "primary_judge"),
        ("annotate", "constitution"),
        ("sft", "sft_model"),
        ("reward", "reward_model"),
        ("ppo", "policy"),
        ("ppo", "engine"),
    ],
)
def test_the_stages_that_read_a_kind_of_the_users_files_depend_on_their_hashes(
    stage: str, kind: str
) -> None:
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    inputs = stages.pop("inputs")
    assert inputs["always_changed"]
    outs = {path for out in inputs["outs"] for path in out}
    assert outs == {str(INPUTS / f"{name}.json") for name in user_files(Params())}
    readers = [
        name
        for name, entry in stages.items()
        if str(INPUTS / f"{kind}.json") in entry.get("do", entry)["deps"]
    ]
    assert stage in readers


def test_every_plot_has_a_template() -> None:
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"].values()
    plots = [plot for stage in stages for plot in stage.get("do", stage).get("plots", [])]
    names = {
        options["template"] for plot in plots for options in plot.values() if "template" in options
    }
    assert "boxes" in names and all(get_template(name, ROOT / ".dvc/plots") for name in names)


DEPLOYMENTS = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["name"])
def test_a_deployment_names_a_flow_that_exists_and_parameters_that_it_has(
    deployment: dict[str, Any],
) -> None:
    path, name = deployment["entrypoint"].split(":")
    assert (ROOT / path).exists()
    flow = getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), name)
    assert flow.name == deployment["name"]
    assert deployment.get("parameters", {}).keys() <= flow.parameters.properties.keys()
    assert deployment["enforce_parameter_schema"] is True
    assert deployment["concurrency_limit"] == {"limit": 2, "collision_strategy": "ENQUEUE"}


def test_a_nightly_run_works_in_the_projects_folder_and_others_in_their_own() -> None:
    isolated = {entry["name"]: entry.get("parameters") for entry in DEPLOYMENTS}
    assert isolated["rlhf-pipeline"] == {"isolated": True}
    assert isolated["next-round"] == {"isolated": False}


DAG = {
    name: stage.get("do", stage)
    for name, stage in yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"].items()
}


def stages_with(kind: str, prefix: str) -> set[str]:
    """The stages that have an entry with this beginning in their deps or params."""
    return {
        name
        for name, stage in DAG.items()
        if any(entry.startswith(prefix) for entry in stage.get(kind, []))
    }


def test_no_stage_passes_a_failed_gate() -> None:
    assert stages_with("deps", "gates/${key}/sft.ok") == {"annotate", "reward", "battery"}
    assert stages_with("deps", "gates/${key}/reward.ok") == {"ppo"}
    # the next round learns from the failures of a policy that is not promoted
    assert stages_with("deps", "gates/${key}/promote.ok") == set()


def test_changed_revisions_rerun_replay_and_no_training_of_their_round() -> None:
    revised = "rounds/${key}/annotate/revised.jsonl"
    assert revised in DAG["annotate"]["outs"]
    assert stages_with("deps", revised) == {"replay"}


def test_a_changed_threshold_reruns_its_gate_and_for_promotion_the_champion() -> None:
    assert stages_with("params", "gates.sft") == {"gate_sft"}
    assert stages_with("params", "gates.reward") == {"gate_reward"}
    assert stages_with("params", "gates.promote") == {"gate_promote", "champion"}
    assert stages_with("params", "gates") == {"gate_sft", "gate_reward", "gate_promote", "champion"}


def test_changed_settings_of_a_judge_rerun_the_stages_that_ask_all_judges() -> None:
    settings = {f"evaluate.{key}" for key in ("judges", "zero_shot", "endpoints", "tie_margin")}
    endpoint = {f"annotate.endpoint.{key}" for key in VERDICT_SETTINGS}
    assert settings | endpoint <= set(DAG["replay"]["params"])
    assert {"evaluate"} | endpoint <= set(DAG["evaluate"]["params"])


def test_another_champion_reruns_ppo_only_if_it_starts_from_the_champion() -> None:
    folder = "rounds/${key}/champion"
    assert stages_with("deps", f"{folder}/champion.json") == {"evaluate"}
    assert stages_with("deps", f"{folder}/start.json") == {"ppo"}
    assert stages_with("params", "ppo.init_from") == {"champion"}


@pytest.mark.parametrize("gate", GATE_STAGES)
def test_a_gate_runs_again_when_its_metrics_or_a_decision_change(gate: str) -> None:
    metrics = {f"rounds/${{key}}/{stage}/metrics.json" for stage in GATE_STAGES[gate]}
    assert set(DAG[f"gate_{gate}"]["deps"]) == {
        *("stages/gate", "stages/lib/core", "stages/lib/thresholds", "stages/__init__.py"),
        *("approvals", *metrics),
    }


def test_git_changes_no_byte_of_a_file(tmp_path: Path) -> None:
    """Whatever the user's core.autocrlf is: DVC would run the stages again."""
    clone = ["git", "clone", "-q", "-c", "core.autocrlf=true", str(ROOT), str(tmp_path / "clone")]
    subprocess.run(clone, check=True)
    assert b"\r" not in (tmp_path / "clone/dvc.yaml").read_bytes()


def test_the_files_of_make_mutants_exist() -> None:
    """`make mutants`, which takes hours, ends at once if one of its files was moved."""
    mutmut = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]
    patterns = [*mutmut["only_mutate"], *mutmut["pytest_add_cli_args_test_selection"]]
    assert [pattern for pattern in patterns if not list(ROOT.glob(pattern))] == []

"""Errors in params.yaml are named by file and key."""

from pathlib import Path

import pytest

from stages.lib.core.errors import BadInput
from stages.lib.core.params import check_params, load_params
from stages.lib.core.params.data import rounds


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "sft: {learning_rte: 1.0}",
            r"params.yaml: sft.learning_rte: Extra .*; did you mean sft.learning_rate\?; next",
        ),
        ("sft: {kl_coef: 1.0}", r"did you mean ppo.kl_coef\?; next"),
        ("sft: {lora: {rank: 4}}", r"did you mean sft.lora.r\?; next"),
        ("nonsense: 1", r"params.yaml: nonsense: Extra inputs are not permitted \(got 1\); next"),
        ("ppo: {lam: 2}", r"params.yaml: ppo.lam: .*less than or equal to 1.*got 2"),
        (
            "ppo: {batch_size: 32, mini_batch_size: 24}",
            r"batch_size 32 must be a multiple of mini_batch_size 24",
        ),
        ("ppo: {rewards: [{name: mine}]}", "give exactly one of model, function, url"),
        (
            "annotate: {annotator: judge, judge: endpoint, endpoint: {model: wise}}",
            r"is endpoint: set annotate.endpoint.base_url and annotate.endpoint.rubric \(docs",
        ),
        (
            "annotate: {constitution: a.txt, revisions: 1}",
            r"annotate.constitution is set: set annotate.endpoint.base_url and annotate.endp",
        ),
        ("annotate: {revisions: 2}", r"annotate.revisions is 2: set annotate.constitution"),
        ("annotate: {constitution: a.txt}", r"annotate.constitution is not used: set .*annotator"),
        (
            "annotate: {constitution: a.txt, annotator: judge}",
            r"annotate.constitution is for a language model: set annotate.judge to endpoint",
        ),
        ("annotate: {constitution: .env}", r"annotate.constitution: String should match pattern"),
        (
            "annotate: {endpoint: {base_url: localhost}}",
            r"annotate.endpoint.base_url: String should match pattern",
        ),
        ("sft: [", r"params.yaml: not YAML"),
        (
            'annotate: {endpoint: {rubric: "\\x00"}}',
            r"annotate.endpoint.rubric: .*the control character U\+0000: remove it",
        ),
        (
            "rounds: {r0: {previous: rounds/r1}, r1: {previous: assets/start}}",
            r"rounds.r0.previous is rounds/r1, which is no round before it; "
            r"expected one of assets/start",
        ),
        (
            "rounds: {r0: {previous: rounds/r0}}",
            r"rounds.r0.previous is rounds/r0.*expected one of assets/start",
        ),
        ("", r"params.yaml is empty: restore it"),
        (
            "launcher: {shard: true}\nppo: {lora: {r: 0}, critic_lora: {r: 0}}",
            r"launcher.shard needs launcher.processes above 1 \(got 1\): set what it needs, or",
        ),
        (
            "launcher: {shard: true, processes: 2}",
            r"launcher.shard needs ppo.lora.r 0 \(got 16\), since adapters are not divided; "
            r"ppo.critic_lora.r 0 \(got 16\), or ppo.critic policy: set",
        ),
        (
            "launcher: {shard: true, processes: 2}\nalgorithm: dpo\n"
            "ppo: {lora: {r: 0}, critic: policy}",
            r"launcher.shard needs algorithm ppo \(got dpo\): set",
        ),
        (
            "launcher: {shard: true, processes: 2}\nmodel: {use_vllm: true}\n"
            "ppo: {lora: {r: 0}, critic: policy}",
            r"launcher.processes above 1 with model.use_vllm is not supported",
        ),
    ],
)
def test_bad_values_are_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=named):
        load_params(path)


def test_a_missing_file_names_where_to_run(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="run from the project's folder"):
        load_params(tmp_path / "params.yaml")


def test_each_round_names_its_predecessor() -> None:
    assert {name: round_.previous for name, round_ in rounds(3).items()} == {
        "r0": "assets/start",
        "r1": "rounds/r0",
        "r2": "rounds/r1",
    }


@pytest.mark.parametrize(
    "name",
    ["r0;touch PWNED;", "r0 $(id)", "r0\nid", "../r0", "r0/../../x", "/tmp/r0", "", "R0", "r" * 33],
)
def test_a_name_of_a_round_reaches_neither_a_shell_nor_another_folder(name: str) -> None:
    start = {"previous": "assets/start"}
    with pytest.raises(BadInput, match="String should match pattern"):
        check_params({"rounds": {name: start}}, "form")
    with pytest.raises(BadInput, match="String should match pattern"):
        check_params({"rounds": {"r0": start, "r1": {"previous": f"rounds/{name}"}}}, "form")
    assert "night-2_b" in check_params({"rounds": {"night-2_b": start}}, "form").rounds

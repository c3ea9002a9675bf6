from pathlib import Path

import pytest
import yaml

from flows.core import config
from stages.lib.core.errors import BadInput
from stages.lib.core.files import write_json
from stages.lib.core.params import Params, flatten

COMMENTED = """# the run
seed: 0  # of everything
ppo:
  gamma: 1.0 # no discount
"""


@pytest.fixture
def params_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "params.yaml"
    path.write_text(COMMENTED)
    return path


def test_settings_change_only_their_keys_and_comments_stay(params_yaml: Path) -> None:
    config.write_params(config.resolve())
    before = params_yaml.read_text()
    changes = config.write_params(config.resolve(settings=["ppo.gamma=0.5", "seed=7"]))
    assert changes == ["ppo.gamma 1.0 -> 0.5", "seed 0 -> 7"]
    assert params_yaml.read_text() == before.replace("gamma: 1.0", "gamma: 0.5").replace(
        "seed: 0", "seed: 7"
    )
    assert "# no discount" in params_yaml.read_text()


def test_a_preset_keeps_no_value_of_the_preset_before_it(params_yaml: Path) -> None:
    config.write_params(config.resolve("tiny"))
    config.write_params(config.resolve("smoke"))
    values = yaml.safe_load(params_yaml.read_text())
    assert values["assets"]["model"] == "embedded"
    assert list(values["rounds"]) == ["r0"]  # the rounds of the preset alone
    assert values["ppo"]["response_length"] == Params().ppo.response_length
    assert config.write_params(config.resolve("default")) != []
    assert yaml.safe_load(params_yaml.read_text()) == Params().model_dump(mode="json")
    assert config.write_params(config.resolve("default")) == []


def test_later_settings_override_earlier_ones_and_all_override_the_preset(
    params_yaml: Path,
) -> None:
    settings = ["ppo.gamma=0.9", "ppo.lam=0.8", "ppo.gamma=0.7"]
    params = config.resolve("tiny", 3, settings)
    assert (params.ppo.gamma, params.ppo.lam, params.ppo.response_length) == (0.7, 0.8, 8)
    assert {name: entry.previous for name, entry in params.rounds.items()} == {
        "r0": "assets/start",
        "r1": "rounds/r0",
        "r2": "rounds/r1",
    }
    config.write_params(params)
    config.write_params(config.resolve(number=1))
    assert list(yaml.safe_load(params_yaml.read_text())["rounds"]) == ["r0"]


def test_the_keys_that_the_form_lists_are_all_keys_of_params() -> None:
    values = Params().model_dump(mode="json")
    for key in config.settable_keys():
        *sections, name = key.split(".")
        of_section = values
        for section in sections:
            of_section = of_section[section]
        del of_section[name]
    left = {key: value for key, value in flatten(values)}
    assert left == {}


@pytest.mark.parametrize(
    ("preset", "number", "settings", "message"),
    [
        ("nope", None, [], "expected one of keep, default"),
        ("keep", None, ["ppo.gama=1"], "ppo.gama"),
        ("keep", None, ["ppo.gamma"], "section.key=value"),
        ("keep", None, ["ppo.gamma=2"], "less than or equal to 1"),
        ("keep", None, ["ppo=3"], "ppo"),
        ("keep", 0, [], "at least 1"),
        ("keep", None, ["rounds=3"], r"rounds: Input should be a valid dictionary \(got 3\)"),
        ("keep", 1, ["rounds=r0"], r"rounds: Input should be a valid dictionary \(got 'r0'\)"),
        ("keep", 1, ["rounds.r0.previous=r9"], r"rounds\.r0\.previous: String should match"),
        ("smoke", None, ["ppo.batch_size=17"], "multiple of mini_batch_size"),
        ("keep", None, ["sft.max_length=30"], r"sft\.max_length is 30, but prepare\.max_prompt"),
        ("keep", None, ["ppo.response_length=900"], r"ppo\.response_length \(900\)"),
        ("keep", None, ["prepare.sources=[{path: a.jsonl}]"], r"add --set assets\.data=files"),
        (
            "keep",
            None,
            ["ppo.rewards=[{name: a, model: nowhere}]"],
            "ppo.rewards a: no model in nowhere",
        ),
        (
            "keep",
            None,
            ["ppo.rewards=[{name: a, function: 'nowhere:reward'}]"],
            "nowhere:reward: no module named nowhere",
        ),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(
    params_yaml: Path, preset: str, number: int | None, settings: list[str], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        config.resolve(preset, number, settings)
    assert params_yaml.read_text() == COMMENTED


def test_one_more_round_and_the_badcase_files_that_it_depends_on(params_yaml: Path) -> None:
    assert config.one_more_round() == 2  # r1 has no replay results
    write_json(Path("rounds/r1/replay/metrics.json"), {})
    config.write_params(config.resolve(number=config.one_more_round()))
    assert list(yaml.safe_load(params_yaml.read_text())["rounds"]) == ["r0", "r1", "r2"]
    names = sorted(path.name for path in Path("badcases").iterdir())
    assert names == ["r0.jsonl", "r1.jsonl", "r2.jsonl"]
    Path("badcases/r1.jsonl").write_text("kept\n")
    config.write_params(config.resolve())
    assert Path("badcases/r1.jsonl").read_text() == "kept\n"
    params_yaml.write_text("rounds: {first: {previous: assets/start}}")
    with pytest.raises(BadInput, match=r"rounds of params\.yaml are first, not r0, r1"):
        config.one_more_round()


def test_the_launcher_may_be_set_where_the_address_is_set_already() -> None:
    address, ray = "launcher.ray_address=http://ray:8265", "launcher.type=ray"
    assert config.resolve("default", None, [address, ray]).cluster("sft") == "http://ray:8265"
    with pytest.raises(BadInput, match=r"launcher\.type ray: set launcher\.ray_address"):
        config.resolve("default", None, [ray])


def test_the_form_has_the_head_of_each_preset_file_and_no_later_comment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "# A small model, on a GPU\n# with 16 GB.\nseed: 1\n# not of the head\n"
    (tmp_path / "own.yaml").write_text(text)
    monkeypatch.setattr(config, "PRESETS", tmp_path)
    _, *presets = config.describe_presets().split("\n\n")
    assert presets == ["- `own`: A small model, on a GPU with 16 GB."]

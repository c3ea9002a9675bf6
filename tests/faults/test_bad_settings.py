"""params.yaml, presets, single settings, forms and pyproject.toml with one to three changes."""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.core import config
from flows.core.form_limits import check_form
from stages.lib.core.params import Params, check_params, flatten, load_params
from stages.lib.core.project_limits import ProjectLimits, read_limits
from stages.lib.core.renamed import PARAMS, PER_TOKEN
from stages.lib.core.user_inputs import user_files
from tests.faults.harness import Trials
from tests.faults.mutations import STRANGE, mutated_bytes, mutated_value
from tests.faults.scale import trials
from tests.paths import ROOT

FILE = Path("params.yaml")
KEYS = [*(name for name, _ in flatten(Params().model_dump(mode="json"), separator="."))]
OLD = [*PARAMS, *PER_TOKEN]
PYPROJECT = b"""[project]
name = "mine"

[tool.rondo]
folders = ["/data", "~/models"]

[tool.rondo.api_keys]
OPENAI_API_KEY = ["https://api.openai.com"]
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", FILE)
    return tmp_path


def check_finite(params: Params) -> None:
    """What was accepted is in the schema, and is the same when it is written and read again."""
    values = params.model_dump(mode="json")
    assert check_params(values, "again") == params
    texts = yaml.safe_dump(values, allow_unicode=True)
    assert not re.search(r"\.(nan|inf)\b", texts)


def check_same(values: Any, params: Params) -> None:
    """Each value of a file is that of the params, or a text or number that means the same."""
    read = dict(flatten(params.model_dump(mode="json"), separator="."))
    for key, value in flatten(values, separator="."):
        if key in read and isinstance(value, int | float) and not isinstance(value, bool):
            assert float(read[key]) == float(value), key
        elif key in read and isinstance(value, list):
            assert len(read[key]) == len(value), key
        elif key in read and value is None:
            assert read[key] is None, key


def mutated_settings(rng: random.Random, good: dict[str, Any], text: bytes) -> bytes:
    if rng.random() < 0.6:
        return mutated_bytes(rng, text)
    values = mutated_value(rng, good)
    if rng.random() < 0.3 and isinstance(values, dict):
        *above, last = rng.choice(OLD).split(".")
        section = values.setdefault(above[0], {})
        for step in above[1:]:
            section = section.setdefault(step, {}) if isinstance(section, dict) else {}
        if isinstance(section, dict):
            section[last] = rng.choice(STRANGE)
    # YAML, too
    return json.dumps(values, ensure_ascii=False).encode("utf-8", "replace")


def test_params_yaml() -> None:
    text = FILE.read_bytes()
    good = yaml.safe_load(text)

    def read(content: bytes) -> Params:
        FILE.write_bytes(content)
        params = load_params()
        config.write_params(params)  # its writer reads the file with another library
        assert load_params() == params
        return params

    def check(content: bytes, params: Params) -> None:
        check_finite(params)
        check_same(yaml.safe_load(content.decode("utf-8-sig")), params)

    Trials("settings: params.yaml", r"params\.yaml").run(
        trials(70, 1000), lambda rng: mutated_settings(rng, good, text), read, check
    )


def test_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = sorted((ROOT / "presets").glob("*.yaml"))
    monkeypatch.setattr(config, "PRESETS", tmp_path)

    def make(rng: random.Random) -> bytes:
        text = rng.choice(files).read_bytes()
        return mutated_settings(rng, yaml.safe_load(text), text)

    def read(content: bytes) -> Params:
        (tmp_path / "mine.yaml").write_bytes(content)
        values = config.overlay(Params().model_dump(mode="json"), config.read_preset("mine"))
        return check_params(values, "preset mine")

    Trials("settings: presets", r"mine\.yaml|preset mine").run(
        trials(60, 700), make, read, lambda _, params: check_finite(params)
    )


def test_single_settings() -> None:
    def make(rng: random.Random) -> str:
        key, value = rng.choice(KEYS + OLD), rng.choice(STRANGE)
        text = f"{key}={json.dumps(value, ensure_ascii=False)}"
        if rng.random() < 0.5:
            text = mutated_bytes(rng, text.encode("utf-8", "replace")).decode("utf-8", "replace")
        return text

    def read(setting: str) -> Params:
        params = config.resolve(settings=[setting])
        check_form(params, [])
        return params

    Trials("settings: --set", r"--set|[a-z_]+\.[a-z_]+|rounds").run(
        trials(60, 700), make, read, lambda _, params: check_finite(params)
    )


def test_forms() -> None:
    """The settings of a form, with sections of params.yaml as values."""
    good = Params().model_dump(mode="json", exclude={"rounds"})
    good["prepare"]["sources"] = [{"path": "pairs.jsonl"}]
    good["ppo"]["rewards"] = [{"name": "mine", "url": "http://127.0.0.1:9"}]

    def read(values: Any) -> Params:
        sections = values.items() if isinstance(values, dict) else [("seed", values)]
        # not as ASCII: YAML has no pairs of surrogates
        texts = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in sections]
        params = config.resolve(settings=texts)
        check_form(params, [file for files in user_files(params).values() for file in files])
        config.write_params(params)
        return params

    Trials("settings: forms", r"[a-z_]+(\.[a-z_0-9]+)*:|[a-z_]+\.[a-z_]+|is outside").run(
        trials(60, 700),
        lambda rng: mutated_value(rng, good),
        read,
        lambda _, params: check_finite(params),
    )


def test_limits_of_the_project() -> None:
    def read(content: bytes) -> ProjectLimits:
        Path("pyproject.toml").write_bytes(content)
        return read_limits()

    Trials("settings: pyproject.toml", r"pyproject\.toml").run(
        trials(200, 500),
        lambda rng: mutated_bytes(rng, PYPROJECT),
        read,
        lambda _, limits: ProjectLimits.model_validate(limits.model_dump()),
    )

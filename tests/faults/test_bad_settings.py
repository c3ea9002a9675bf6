"""params.yaml, presets, single settings, forms and pyproject.toml with one to three changes."""

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from flows.core import config
from flows.core.form_limits import check_form
from stages.lib.core.params import Params, check_params, flatten, load_params
from stages.lib.core.project_limits import read_limits
from stages.lib.core.user_inputs import user_files
from tests.faults.bad import STRANGE, as_json, bad_bytes, bad_value, try_bad, writing
from tests.paths import ROOT

FILE = Path("params.yaml")
DEFAULTS = Params().model_dump(mode="json")
KEYS = [name for name, _ in flatten(DEFAULTS, separator=".")]
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


def check_kept(_: Any, params: Params) -> None:
    """What was accepted is in the schema, and is the same when it is written and read again."""
    values = params.model_dump(mode="json")
    json.dumps(values, allow_nan=False)
    assert check_params(values, "again") == params


def bad_settings(text: bytes) -> SearchStrategy[bytes]:
    """YAML with one to three changes, of a value or of bytes."""
    changed = bad_value(yaml.safe_load(text))
    return bad_bytes(text) | changed.map(
        lambda values: json.dumps(values, ensure_ascii=False).encode("utf-8", "replace")
    )


def test_params_yaml() -> None:
    def read(content: bytes) -> Params:
        FILE.write_bytes(content)
        params = load_params()
        config.write_params(params)
        assert load_params() == params
        return params

    def check(content: bytes, params: Params) -> None:
        """Each value of the file is that of the params, or a text that means the same."""
        check_kept(content, params)
        read = dict(flatten(params.model_dump(mode="json"), separator="."))
        values = yaml.safe_load(content.decode("utf-8-sig"))
        for key, value in flatten(values, separator="."):
            if key in read and isinstance(value, int | float) and not isinstance(value, bool):
                assert float(read[key]) == float(value), key
            elif key in read and (value is None or isinstance(value, list)):
                assert read[key] == value if value is None else len(read[key]) == len(value), key

    try_bad(bad_settings(FILE.read_bytes()), read, check, r"params\.yaml", fast=40)


def test_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "PRESETS", tmp_path)
    texts = [path.read_bytes() for path in sorted((ROOT / "presets").glob("*.yaml"))]

    def read(content: bytes) -> Params:
        (tmp_path / "mine.yaml").write_bytes(content)
        return config.resolve("mine")

    inputs = st.sampled_from(texts).flatmap(bad_settings)
    try_bad(inputs, read, check_kept, r"mine\.yaml|preset mine|[a-z_]+\.[a-z_]+", fast=40)


def resolved(settings: list[str]) -> Params:
    """The params with some settings, as of `--set` or of a form."""
    params = config.resolve(settings=settings)
    check_form(params, [file for files in user_files(params).values() for file in files])
    config.write_params(params)
    return params


def test_single_settings() -> None:
    values = st.sampled_from([*STRANGE, None, True, -1, 0.5]).map(as_json)
    pairs = st.tuples(st.sampled_from(KEYS), values).map(
        lambda pair: b"%b=%b" % (pair[0].encode(), pair[1])
    )
    inputs = pairs | pairs.flatmap(bad_bytes)
    place = r"--set|[a-z_]+\.[a-z_]+|rounds|is outside|[a-z_]+:"
    try_bad(
        inputs, lambda text: resolved([text.decode("utf-8", "replace")]), check_kept, place, fast=40
    )


def test_forms() -> None:
    """The settings of a form, with sections of params.yaml as values."""
    good = {name: section for name, section in DEFAULTS.items() if name != "rounds"}
    good["prepare"]["sources"] = [{"path": "pairs.jsonl"}]
    good["ppo"]["rewards"] = [{"name": "mine", "url": "http://127.0.0.1:9"}]

    def read(values: Any) -> Params:
        # not as ASCII: YAML has no pairs of surrogates
        return resolved(
            [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
        )

    place = r"[a-z_]+(\.[a-z_0-9]+)*:|[a-z_]+\.[a-z_]+|is outside"
    try_bad(bad_value(good), read, check_kept, place, fast=30)


def test_limits_of_the_project() -> None:
    def check(content: bytes, limits: Any) -> None:
        table = tomllib.loads(content.decode("utf-8-sig").replace("\r\n", "\n"))
        own = table.get("tool", {}).get("rondo", {})
        assert limits.folders == [Path(name) for name in own.get("folders", [])]
        assert limits.api_keys == own.get("api_keys", {})

    read = writing("pyproject.toml", read_limits)
    try_bad(bad_bytes(PYPROJECT), read, check, r"pyproject\.toml")

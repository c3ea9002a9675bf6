"""The files that only params.yaml names: which they are, and which of them have changed."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stages.assets.inputs import main as inputs
from stages.lib.core import user_inputs
from stages.lib.core.errors import BadInput
from stages.lib.core.files import write_text
from stages.lib.core.params import Params, check_params
from stages.lib.core.params.policy import Engine
from stages.lib.core.user_inputs import check_unchanged, differing, input_hashes, user_files
from tests.engine_settings import NEEDED


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def with_files(*paths: str, **sections: Any) -> Params:
    data = {"assets": {"data": "files"}, "prepare": {"sources": [{"path": p} for p in paths]}}
    return check_params(data | sections, "test")


def everything(
    judges: Sequence[str] = ("lexicon", "fluency", "models/judge", "taste:score"),
) -> Params:
    """Params that name a file of each kind, and the files."""
    write_text(Path("pairs.jsonl"), "{}\n")
    write_text(Path("models/mine/config.json"), "{}")
    write_text(Path("models/judge/config.json"), "{}")
    write_text(Path("models/adapter/adapter_config.json"), "{}")
    write_text(Path("taste.py"), "from words import nice\n\ndef score(prompts, responses): ...\n")
    write_text(Path("words.py"), "nice = 1\n")
    write_text(Path("principles.txt"), "Be kind.\n")
    return with_files(
        "pairs.jsonl",
        "org/pairs",
        assets={"data": "files", "model": "models/mine"},
        reward={"model": "models/judge"},
        sft={"model": "models/mine"},
        ppo={"rewards": [{"name": "taste", "function": "taste:score"}], "model": "models/adapter"},
        evaluate={"judges": list(judges)},
        annotate=by_principles("principles.txt"),
    )


def by_principles(path: str) -> dict[str, Any]:
    endpoint = {"base_url": "http://127.0.0.1:9/v1", "model": "wise"}
    return {"constitution": path, "revisions": 1, "endpoint": endpoint}


def test_each_kind_names_its_files_with_their_hashes() -> None:
    params = everything()
    function = {name: sha256(Path(name).read_text()) for name in ("taste.py", "words.py")}
    assert input_hashes(params) == {
        "data": {"pairs.jsonl": sha256("{}\n"), "org/pairs": None},
        "model": {"models/mine/config.json": sha256("{}")},
        "rewards": function,
        "judges": {"models/judge/config.json": sha256("{}"), **function},
        "primary_judge": {"evaluate.judges[0]": '{"judge": "lexicon", "tie_margin": 0.05}'},
        "constitution": {"principles.txt": sha256("Be kind.\n")},
        "sft_model": {"models/mine/config.json": sha256("{}")},
        "reward_model": {"models/judge/config.json": sha256("{}")},
        "policy": {"models/adapter/adapter_config.json": sha256("{}")},
        "engine": {},
    }
    [asks] = input_hashes(everything(judges=["zero_shot"]))["primary_judge"].values()
    assert json.loads(asks)["zero_shot"]["question"] == " I feel"
    # the files of a primary judge are among its hashes too
    judges = everything(judges=["taste:score", "lexicon"])
    assert input_hashes(judges)["primary_judge"].items() >= function.items()


def test_what_params_do_not_use_is_no_input() -> None:
    everything()
    unused = check_params({"prepare": {"sources": [{"path": "pairs.jsonl"}]}}, "test")
    assert set(map(len, user_files(unused).values())) == {0}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"assets": {"data": "files"}}, r"--set 'prepare\.sources=\[\{path: pairs"),
        ({"evaluate": {"judges": ["models/none"]}}, r"evaluate\.judges: no model in models/none"),
        ({"evaluate": {"judges": ["zeroshot"]}}, r"in zeroshot; name one of lexicon, zero_shot, "),
        (
            {"evaluate": {"judges": ["none:score"]}},
            r"evaluate\.judges: none:score: no module named none",
        ),
        (
            {"ppo": {"rewards": [{"name": "a", "model": "models/none"}]}},
            r"ppo\.rewards a: no model in models/none",
        ),
        (
            {"evaluate": {"judges": ["rounds/r0/reward/model"]}},
            r"rounds/r0/reward/model is an output of the pipeline.*: copy it to another folder",
        ),
        (
            {"annotate": by_principles("none.txt")},
            r"annotate\.constitution: no file none\.txt; write one principle per line",
        ),
    ],
)
def test_what_is_missing_is_named(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        user_files(check_params(sections, "test"))


def test_a_model_of_the_hub_is_no_file() -> None:
    """Its revision is in params.yaml."""
    hub = "org/mine@main"
    sections = {name: {"model": hub} for name in ("sft", "reward", "ppo")}
    params = check_params(sections | {"evaluate": {"judges": [hub]}}, "test")
    assert set(map(len, user_files(params).values())) == {0}


def test_an_edit_is_seen_even_if_size_and_time_are_as_before() -> None:
    params, file = with_files("pairs.jsonl"), Path("pairs.jsonl")
    file.write_text("good")
    before, status = input_hashes(params), file.stat()
    file.write_text("evil")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert before["data"] == {"pairs.jsonl": sha256("good")}
    assert input_hashes(params)["data"] == {"pairs.jsonl": sha256("evil")}


def test_a_run_with_an_engine_has_its_code_as_an_input() -> None:
    settings = {
        "launcher": {"ray_address": "http://ray:8265"},
        "ppo": NEEDED | {"micro_batch_size": 4},
    }
    assert (engine := check_params(settings, "test")).ppo.engine is not Engine.local
    verl, other = Path("stages/ppo/engines/verl.py"), Path("stages/ppo/trainer/update.py")
    for path in (verl, other):
        write_text(path, "1\n")
    assert input_hashes(engine)["engine"] == {str(verl): sha256("1\n")}
    assert input_hashes(everything())["engine"] == {}


def test_a_file_that_did_not_change_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    params = everything()
    before, read = input_hashes(params), list[Path]()

    def file_hash(path: Path) -> str:
        read.append(path)
        return sha256(path.read_text())

    monkeypatch.setattr(user_inputs, "file_hash", file_hash)
    assert input_hashes(params) == before
    assert read == []
    Path("words.py").write_text("nice = 2\n")
    assert input_hashes(params) != before
    assert read == [Path("words.py")]


def test_the_stage_writes_the_hashes_and_names_what_changed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    params = everything()
    inputs(params, "r0")
    assert user_inputs.are_recorded(input_hashes(params))
    assert "[inputs] pairs.jsonl: new" in capsys.readouterr().out
    Path("words.py").write_text("nice = 2\n")
    assert not user_inputs.are_recorded(input_hashes(params))
    inputs(params, "r0")
    assert set(capsys.readouterr().out.splitlines()) == {"[inputs] words.py: changed"}
    assert user_inputs.are_recorded(input_hashes(params))


def test_a_stage_refuses_files_that_changed_after_dvc_looked_at_them() -> None:
    params = everything()
    with pytest.raises(BadInput, match=r"data\.json is missing: run `dvc repro inputs`"):
        check_unchanged("data", params)
    inputs(params, "r0")
    check_unchanged("data", params)
    Path("pairs.jsonl").write_text("{}\n{}\n")
    Path("words.py").unlink()
    for kind, named in (("data", "pairs.jsonl"), ("rewards", "words.py")):
        with pytest.raises(BadInput, match=rf"^{named} changed after the run began"):
            check_unchanged(kind, params)
    check_unchanged("model", params)


def test_a_path_that_comes_or_goes_is_a_difference() -> None:
    assert differing({"a": "1", "b": "2", "c": None}, {"b": "3", "c": None, "d": None}) == [
        "a",
        "b",
        "d",
    ]

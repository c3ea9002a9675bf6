"""The files of a scoring function are found without running any of them."""

from pathlib import Path

import pytest

from stages.lib.core.errors import BadInput
from stages.lib.core.files import write_text
from stages.lib.core.user_functions import function_files


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_function_with_what_it_imports_from_the_project(folder: Path) -> None:
    write_text(Path("taste/__init__.py"), "")
    write_text(
        Path("taste/score.py"),
        "import json, math\nimport helpers.words\nfrom . import rules\nfrom .deep import rule\n"
        "def score(prompts, responses):\n    import late\n    return [0.0 for _ in responses]\n"
        "raise SystemExit('this must not run')\n",
    )
    write_text(Path("taste/rules.py"), "from taste.score import score\n")  # a circle
    write_text(Path("taste/deep/__init__.py"), "from ..other import rule\n")
    for name in ("taste/other.py", "helpers/__init__.py", "helpers/words.py", "late.py"):
        write_text(Path(name), "")
    write_text(Path("unused.py"), "")
    files = function_files("taste.score:score", "ppo.rewards mine")
    assert files[0] == Path("taste/score.py")
    assert set(map(str, files)) == {
        "taste/score.py",
        "taste/__init__.py",
        "taste/rules.py",
        "taste/deep/__init__.py",
        "taste/other.py",
        "helpers/__init__.py",
        "helpers/words.py",
        "late.py",
    }


def test_a_function_of_an_installed_package_is_one_file() -> None:
    import statistics

    import torch

    assert function_files("statistics:fmean", "evaluate.judges") == [Path(statistics.__file__)]
    # what a compiled module defines is not known before its import
    assert function_files("torch._C:_cuda_init", "") == [Path(torch._C.__file__)]


@pytest.mark.parametrize("file", ["mine.py", "words.py"])
def test_a_file_that_is_not_python_is_named_with_its_line(file: str) -> None:
    write_text(Path("mine.py"), "import words\n\ndef score(prompts, responses): ...\n")
    write_text(Path("words.py"), "")
    with Path(file).open("a") as stream:
        stream.write("nice = (\n")
    line = len(Path(file).read_text().splitlines())
    with pytest.raises(BadInput, match=rf"{file}, line {line}: not valid Python \(.*never closed"):
        function_files("mine:score", "ppo.rewards a")


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("none:score", r"ppo\.rewards a: none:score: no module named none; put it in the project"),
        ("none.deep:score", r"no module named none\.deep"),
        ("mine:scoer", r"ppo\.rewards a: mine:scoer: mine\.py does not define scoer"),
    ],
)
def test_what_is_missing_is_named(named: str, message: str) -> None:
    write_text(Path("mine.py"), "def score(prompts, responses): ...\n")
    with pytest.raises(BadInput, match=message):
        function_files(named, "ppo.rewards a")


@pytest.mark.parametrize(
    "code",
    [
        "score = print",
        "from math import *",
        "from json import loads as score",
        "try:\n    import score\nfinally: 1",
    ],
)
def test_other_ways_to_define_a_name(code: str) -> None:
    write_text(Path("mine.py"), code)
    assert function_files("mine:score", "evaluate.judges") == [Path("mine.py")]

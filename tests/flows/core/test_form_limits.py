"""What a form may name: no foreign function, file, folder or address."""

import subprocess
from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from flows.commands.checkpoint import evaluate_checkpoint
from flows.core.config import resolve
from flows.core.form_limits import check_form, check_inside
from flows.pipeline import pipeline
from stages.lib.core.errors import BadInput
from stages.lib.core.params import load_params
from stages.lib.core.params.judging import EndpointParams
from stages.lib.core.params.policy import RewardSource
from stages.lib.core.user_inputs import user_files

FUNCTION = "def score(prompts, responses):\n    return [0.0 for _ in responses]\n"
EFFECT = "open('ran', 'w').close()\n"
REWARD = "ppo.rewards=[{{name: taste, function: {} }}]"


def form(*settings: str) -> None:
    params = resolve("keep", None, settings)
    check_form(params, [path for paths in user_files(params).values() for path in paths])


def test_a_function_of_a_form_is_code_that_git_tracks(project: Path) -> None:
    Path("my_taste.py").write_text(EFFECT + FUNCTION)
    with pytest.raises(BadInput, match=r"my_taste\.py: git does not track it.*`git add my_taste"):
        form(REWARD.format("my_taste:score"))
    subprocess.run(["git", "add", "my_taste.py"], check=True)
    form(REWARD.format("my_taste:score"))
    compiled = REWARD.format("torch._C:_cuda_init")
    of_python = "evaluate.judges=[lexicon, 'shutil:rmtree']"
    for setting in (REWARD.format("shutil:rmtree"), of_python, compiled):
        with pytest.raises(BadInput, match="is outside the project"):
            form(setting)
    Path("native.so").touch()
    with pytest.raises(BadInput, match=r"native\.so: git does not track it"):
        check_form(load_params(), [Path("native.so")])
    assert not Path("ran").exists()  # nothing was imported


def test_a_name_with_dots_imports_no_package(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To find `outside.taste`, importlib.util.find_spec would run outside/__init__.py."""
    installed = tmp_path_factory.mktemp("site-packages")
    (installed / "outside").mkdir()
    (installed / "outside/__init__.py").write_text(EFFECT)
    (installed / "outside/taste.py").write_text(FUNCTION)
    monkeypatch.syspath_prepend(str(installed))
    resolve("keep", None, [REWARD.format("outside.taste:score")])  # as at the terminal
    with pytest.raises(BadInput, match="is outside the project"):
        form(REWARD.format("outside.taste:score"))
    with pytest.raises(BadInput, match=r"no module named outside\.none"):
        form(REWARD.format("outside.none:score"))
    assert not Path("ran").exists()


def test_a_form_reads_no_file_outside_the_project(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "pairs.jsonl").touch()
    (outside / "config.json").touch()
    (outside / "principles.txt").write_text("Be kind.")
    model = ("annotate.endpoint.base_url=http://127.0.0.1:9/v1", "annotate.endpoint.model=wise")
    data = "prepare.sources=[{{path: {}}}]"
    relative = f"../{outside.name}"  # both are folders of the session
    for settings in (
        ("assets.data=files", data.format(outside / "pairs.jsonl")),
        ("assets.data=files", data.format("~/.ssh/id_ed25519")),
        ("assets.data=files", data.format("rounds/../../secret")),
        (f"assets.model={outside}",),
        (f"ppo.rewards=[{{name: other, model: {outside}}}]",),
        (f"evaluate.judges=[lexicon, {outside}]",),
        (f"annotate.constitution={outside}/principles.txt", "annotate.revisions=1", *model),
    ):
        with pytest.raises(BadInput, match="is outside the project"):
            form(*settings)
    with pytest.raises(BadInput, match="is outside the project"):
        check_inside([Path(relative)])  # the checkpoint of evaluate-checkpoint
    Path("pairs.jsonl").touch()
    form("assets.data=files", data.format("pairs.jsonl"))
    Path("pyproject.toml").write_text(f"[tool.rondo]\nfolders = ['{outside}']\n")
    form("assets.data=files", data.format(outside / "pairs.jsonl"))
    Path("pyproject.toml").write_text(f"[tool.rondo]\nfolders = ['{relative}']\n")
    check_inside([Path(relative) / "pairs.jsonl"])


def test_a_run_of_the_form_checks_them(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path_factory.mktemp("outside")

    # Prefect reads a deployment's id from this variable first, for tests
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "a-deployment")
    with disable_run_logger():
        with pytest.raises(BadInput, match="is outside the project"):
            pipeline("run", "keep", lambda: 0, [f"assets.model={outside}"], False)
        ended = evaluate_checkpoint.fn(checkpoint=str(outside))
        assert ended.is_failed() and "is outside the project" in ended.message


@pytest.mark.parametrize(
    "url",
    [
        "https://ada:secret@example.org/v1",
        "https://token@example.org",
        "https://example.org\n@evil.example/",
        "file:///etc/passwd",
        "//example.org",
    ],
)
def test_an_address_has_no_credentials(url: str) -> None:
    with pytest.raises(ValueError, match="base_url"):
        EndpointParams(base_url=url)
    with pytest.raises(ValueError, match="url"):
        RewardSource(name="remote", url=url)


def test_usual_addresses_are_valid() -> None:
    for url in ("http://127.0.0.1:8000/v1", "https://example.org", "http://[::1]:80/a?b=c@d"):
        assert EndpointParams(base_url=url).base_url == url


def test_a_misspelt_limit_is_an_error(project: Path) -> None:
    Path("pyproject.toml").write_text("[tool.rondo]\nfolder = ['/data']\n")
    with pytest.raises(BadInput, match=r"pyproject\.toml \[tool\.rondo\].*folder"):
        form()

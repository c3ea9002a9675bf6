"""Two runs in a real MLflow database, compared as a user compares them."""

import json
import re
import shutil
import webbrowser
from pathlib import Path
from urllib.parse import parse_qs

import pytest
import yaml
from mlflow import MlflowClient

from flows import cli
from flows.execution.meter import Meter
from flows.tracking.mlflow_tracker import MlflowTracker
from stages.lib.core.files import stage_dir, write_json, write_jsonl
from tests.flows.report.reading import Page

RONDO = "name = 'rondo'"
SETTINGS = {"evaluate.tie_margin": 0.05, "seed": 0, "ppo.temperature": 1.0}
# judge score of the policy, by prompt and sample
BEFORE = {"p1": (0.1, 0.2), "p2": (0.4, 0.4), "p3": (0.0, 0.0)}
AFTER = {"p1": (0.5, 0.6), "p2": (0.4, 0.42), "p3": (0.3, -0.2)}


@pytest.fixture
def database(empty_tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The project's database, in which no run was recorded yet."""
    monkeypatch.chdir(tmp_path)
    Path("dvc.yaml").touch()
    (tmp_path / ".rondo").mkdir()
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return f"sqlite:///{shutil.copy(empty_tables, tmp_path / '.rondo/mlflow.db')}"


def record(
    database: str,
    run: str,
    sentiments: dict[str, tuple[float, ...]],
    kl_coef: float,
    round_: str = "r0",
    **settings: float | str,
) -> None:
    folder = stage_dir(round_, "evaluate")
    write_json(folder / "metrics.json", {"win_rate": 0.8, "ppo": {"kl": 6.0}})
    write_json(folder / "manifest.json", {"evaluation": SETTINGS | settings})
    write_jsonl(
        folder / "samples.jsonl",
        [
            {
                "id": id_,
                "sample": n,
                "prompt": f"<i>{id_}",
                "ppo": f"It was\n{v}",
                "ppo_judge_score": v,
            }
            for id_, vs in sentiments.items()
            for n, v in enumerate(vs)
        ],
    )
    lock = {
        name: {"params": {"params.yaml": {"ppo.kl_coef": kl_coef, "seed": 0}}}
        for name in (f"ppo@{round_}", f"evaluate@{round_}")
    }
    Path("dvc.lock").write_text(yaml.safe_dump({"stages": lock}))
    tracker = MlflowTracker(run, database, Path(".rondo").absolute(), {"revision": "c0ffee"}, print)
    tracker.begin()
    for stage in ("ppo", "evaluate"):
        tracker.start(f"{stage}@{round_}", Meter())
        tracker.finish("ran")
    tracker.close("FINISHED", {"summary.md": "the table"})


def compare(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", *arguments])
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out, output.err


def test_two_runs_are_paired_by_prompt_and_their_settings_compared(
    database: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record(database, "one-before", BEFORE, 0.11)
    record(database, "two-after", AFTER, 0.3)
    code, out, _ = compare(capsys, "one", "two-after:r0")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0 and lines[0] == "A = one-before:r0 B = two-after:r0"
    assert (
        "KL from SFT, nats 6.000 6.000" in lines
        and "loss on human texts over SFT, nats per token - -" in lines
    )
    # by prompt 0.4 0.4, 0 0.02, 0.3 -0.2; as wins 1 1, 1/2 1/2, 1 0
    [gain] = [line for line in lines if line.startswith("judge score, B - A")]
    [won] = [line for line in lines if line.startswith("share of samples higher in B")]
    assert "0.153 [0.010, 0.400]" in gain and "0.667 [0.500, 1.000]" in won
    assert "ppo.kl_coef 0.11 0.3" in lines and not any(
        line.startswith(("seed", "git")) for line in lines
    )
    # of 0.4, 0.4 and 0.3, with each text in one line
    start = lines.index("Largest differences of the judge's score, B - A:")
    assert lines[start + 1 : start + 4] == [
        "+0.400 p1-0: <i>p1",
        "A: It was ↵ 0.1",
        "B: It was ↵ 0.5",
    ]
    assert [line.split()[1] for line in lines[start + 1 : start + 10 : 3]] == [
        *("p1-0:", "p1-1:", "p3-0:")
    ]
    assert lines[start + 10] == "All samples side by side: reports/compare.html"
    page = "http://127.0.0.1:5000/#/compare-runs?runs=%5B%22"  # ["
    assert f"the same numbers in MLflow (after `rondo up`): {page}" in lines[-2]
    assert not {*'"[]'} & {*lines[-2]} and not {*'"[]'} & {*lines[-1]}
    values = json.loads(compare(capsys, "one", "two-after:r0", "--json")[1])
    assert (values["a"], values["b"]) == ("one-before:r0", "two-after:r0")
    assert values["settings"] == {"ppo.kl_coef": ["0.11", "0.3"]}
    assert values["metrics"]["KL from SFT, nats"] == [6.0, 6.0]
    assert values["gains"]["judge score, B - A [95%]"] == pytest.approx(
        [0.1533, 0.01, 0.4], abs=1e-3
    )
    # a database of the user's, which `rondo up` does not serve
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    assert " in MLflow: " not in compare(capsys, "one", "two-after:r0")[1]


def test_the_page_has_all_samples_of_both(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record(database, "one", BEFORE, 0.11)
    record(database, "two", AFTER, 0.3)
    assert compare(capsys, "one", "two")[0] == 0
    text = Path("reports/compare.html").read_text()
    html = Page(text)
    assert html.open_tags == [] and "<i>" not in text and "<i>p2" in html.words
    assert text.count('<article class="entry"') == 6
    # the words that differ are marked; a gain under the tie margin of 0.05 is a tie
    assert "It was\n<del>0.1</del>" in text and "It was\n<ins>0.5</ins>" in text
    outcomes = re.findall(r'data-show="(\w+)"', text)
    assert outcomes == ["won", "won", "tied", "tied", "won", "lost"]
    assert 'href="report.html"' in text


def test_the_pages_of_mlflow_are_of_the_two_evaluations_and_of_their_pipeline_runs(
    database: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in ("one", "two", "three"):
        record(database, run, BEFORE, 0.11)
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert compare(capsys, "one", "two", "--open")[0] == 0
    numbers, curves = (parse_qs(page.partition("?")[2]) for page in opened)
    client = MlflowClient(database)
    assert [
        client.get_run(id_).data.tags["rondo.address"] for id_ in json.loads(numbers["runs"][0])
    ] == ["evaluate@r0"] * 2
    # the query that the page sends to the server
    runs = client.search_runs(json.loads(numbers["experiments"][0]), curves["searchFilter"][0])
    tags = {(run.data.tags["rondo.run"], run.data.tags["rondo.address"]) for run in runs}
    assert tags == {("one", "pipeline"), ("two", "pipeline")}
    assert curves["compareRunsMode"] == ["CHART"]


def test_the_curves_of_two_rounds_of_a_run_are_those_of_its_stages(
    database: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the pipeline run, the curves of the rounds have different names."""
    record(database, "one", BEFORE, 0.11)
    record(database, "one", AFTER, 0.11, round_="r1")
    record(database, "two", BEFORE, 0.11)
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert compare(capsys, "one:r0", "one:r1", "--open")[0] == 0
    curves = parse_qs(opened[1].partition("?")[2])
    client = MlflowClient(database)
    [experiment] = [one.experiment_id for one in client.search_experiments(filter_string=RONDO)]
    runs = client.search_runs([experiment], curves["searchFilter"][0])
    tags = {(run.data.tags["rondo.run"], run.data.tags["rondo.address"]) for run in runs}
    assert tags == {("one", "ppo@r0"), ("one", "ppo@r1")}


def test_runs_that_cannot_be_compared_are_an_error_with_the_reason(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        compare(capsys, "one", "two")[2]
        == "rondo: BadInput: MLflow has no run of Rondo's: `rondo run` records one\n"
    )
    record(database, "one", BEFORE, 0.11)
    record(database, "one-warm", BEFORE, 0.11, **{"ppo.temperature": 0.7})
    code, _, error = compare(capsys, "one", "one-warm")  # `one` is a whole name: no ambiguity
    assert (
        code == 2
        and "one:r0 and one-warm:r0 were evaluated with different settings "
        "(ppo.temperature 1.0 and 0.7)"
        in error
    )
    record(database, "one-long", BEFORE, 0.11, **{"evaluation_hash": f"{'c0ffee' * 10}1234"})
    code, _, error = compare(capsys, "one", "one-long")
    assert "(evaluation_hash None and c0ffeec0)" in error
    assert (
        "o: several runs match; there are one-long, one-warm, one" in compare(capsys, "o", "one")[2]
    )
    assert (
        "two: no such run with an evaluation; there are one-long, one-warm, one"
        in compare(capsys, "one", "two")[2]
    )
    assert "one:r1: run one evaluated r0" in compare(capsys, "one:r1", "one")[2]

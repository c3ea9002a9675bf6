"""`rondo best`, against a real MLflow database."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows import cli
from flows.commands.best import Policy, shown_to_win
from flows.execution.meter import Meter
from flows.tracking.mlflow_tracker import MlflowTracker
from stages.lib.core.ended_rounds import settings_path
from stages.lib.core.files import stage_dir, write_json, write_text
from stages.lib.core.params import Params

FIRST, SECOND = {"previous": "assets/start"}, {"previous": "rounds/r0"}


@pytest.fixture
def database(database: str) -> str:
    Path("params.yaml").write_text(yaml.safe_dump(Params().model_dump(mode="json")))
    return database


def record(
    database: str,
    run: str,
    win_rate: float,
    kl: float,
    *,
    md5: str,
    evaluation: str = "e1",
    preset: str | None = None,
    base: str = "",
    **steps: dict[str, float],
) -> None:
    """Record a run with a policy, whose interval is 0.1 wide, and with checkpoints."""
    interval = {
        "win_rate": win_rate,
        "win_rate_low": win_rate - 0.05,
        "win_rate_high": win_rate + 0.05,
    }
    metrics: dict[str, Any] = {
        **interval,
        "ppo": {"kl": 24 * kl, "kl_per_token": kl, "judge_score": 0.7},
        "sft": {"kl": 0.0, "judge_score": 0.3},
    }
    write_json(
        stage_dir("r0", "evaluate") / "metrics.json",
        metrics | {"checkpoints": steps, "evaluation_id": evaluation},
    )
    outs = [
        {"path": f"rounds/r0/ppo/{name}", "md5": f"{md5}{name}"}
        for name in ("policy", "checkpoints")
    ]
    assets = {"outs": [{"path": "assets/model", "md5": base}]}
    stages = {"assets": assets, "ppo@r0": {"outs": outs}}
    Path("dvc.lock").write_text(yaml.safe_dump({"stages": stages}))
    tags = {"preset": preset} if preset else {}
    tracker = MlflowTracker(
        run,
        database,
        Path(".rondo").absolute(),
        {"revision": f"{'c0ffee' * 6}1234-dirty", "seed": "7", **tags},
        print,
    )
    tracker.begin()
    tracker.start("evaluate@r0", Meter())
    tracker.finish("ran")
    tracker.close("FINISHED", {"summary.md": "the table"})


def best(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    """Exit code, lines with single spaces, errors."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(["best", *arguments])
    output = capsys.readouterr()
    lines = [" ".join(line.split()) for line in output.out.splitlines()]
    return int(ended.value.code or 0), lines, output.err


def test_policies_of_all_runs_best_first_under_a_kl(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    near, far = (
        {"win_rate": 0.9, "kl": 14.2, "kl_per_token": 0.59},
        {"win_rate": 0.95, "kl": 14.6, "kl_per_token": 0.61},
    )
    record(database, "one", 0.8, 0.5, md5="a", step_00009=near, step_00018=far)
    record(database, "two", 0.85, 0.55, md5="b")
    # the same policies as those of `one`
    record(database, "three", 0.8, 0.5, md5="a", step_00009=near, step_00018=far)
    code, lines, _ = best(capsys)  # gates.promote.max_kl_per_token is 0.6
    assert code == 0 and lines[0].startswith("run round policy win rate against SFT [95%] KL")
    assert lines[2:5] == [
        "three r0 checkpoints/step_00009 0.900 0.59 - 7 c0ffeec0-dirty",
        "two r0 policy 0.850 [0.800, 0.900] 0.55 0.700 7 c0ffeec0-dirty",
        "three r0 policy 0.800 [0.750, 0.850] 0.50 0.700 7 c0ffeec0-dirty",
    ]
    assert lines[5] == (
        "Best: rounds/r0/ppo/checkpoints/step_00009 of three:r0, win rate 0.900; "
        "its weights are in DVC: `git log -S acheckpoints -- dvc.lock rounds` prints the commit to "
        "check out, if there is one. "
        "To compare the two best selected policies on the same prompts: "
        "`rondo compare three:r0 two:r0`"
    )
    assert [line.split()[0] for line in best(capsys, "--kl", "0.53")[1][2:-1]] == ["three"]
    [table] = json.loads(best(capsys, "--json")[1][0])
    assert {*table} == {"evaluation_id", "lineage", "of_this_folder", "policies"}
    assert [
        (one["run"], one["round"], one["metrics"]["win_rate"], one["selected"], one["seed"])
        for one in table["policies"]
    ] == [
        ("three", "r0", 0.9, False, "7"),
        ("two", "r0", 0.85, True, "7"),
        ("three", "r0", 0.8, True, "7"),
    ]
    assert [line.split()[3] for line in best(capsys, "--kl", "0.7")[1][2:-1]] == [
        "0.950",
        "0.900",
        "0.850",
        "0.800",
    ]


def test_each_evaluation_has_its_own_table_the_newest_first(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record(database, "one", 0.9, 0.5, md5="a")
    record(database, "two", 0.8, 0.5, md5="b", evaluation="e2")
    record(database, "three", 0.7, 0.5, md5="a", evaluation="e2")
    lines = best(capsys)[1]
    assert [
        line.split()[0] for line in lines if line.startswith(("Evaluation ", "one", "two", "three"))
    ] == [
        *("Evaluation", "two", "three"),
        *("Evaluation", "one"),
    ]
    best_of_e2, best_of_e1 = (line for line in lines if line.startswith("Best: "))
    assert best_of_e2.startswith(
        "Best: rounds/r0/ppo/policy of two:r0, win rate 0.800 [0.750, 0.850]; "
    )
    assert best_of_e2.endswith("`rondo compare three:r0 two:r0`")
    assert best_of_e1.startswith("Best: rounds/r0/ppo/policy of one:r0, win rate 0.900")


def test_the_table_of_this_folder_is_first_even_if_another_run_is_newer(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """E.g. after one run of the tiny preset in a worktree of its own."""
    record(database, "default", 0.869, 0.5, md5="a")
    metrics = (stage_dir("r0", "evaluate") / "metrics.json").read_text()
    record(database, "tiny", 0.5, 0.0, md5="b", evaluation="t", preset="tiny")
    write_text(stage_dir("r0", "evaluate") / "metrics.json", metrics)
    first, second = (line for line in best(capsys)[1] if line.startswith("Evaluation"))
    assert re.fullmatch(
        r"Evaluation e1, lineage \w{12}: this folder's \(presets: unknown\); "
        "not comparable with other tables",
        first,
    )
    assert re.fullmatch(
        r"Evaluation t, lineage \w{12}: other settings or data than this folder's "
        r"\(presets: tiny\); not comparable with other tables",
        second,
    )
    of_default, of_tiny = (line for line in best(capsys)[1] if line.startswith("Best: "))
    assert "win rate 0.869 [0.819, 0.919]; its" in of_default
    assert "win rate 0.500 [0.450, 0.550], not shown to be better than SFT; its" in of_tiny
    # its round has ended, and the next one has not been evaluated
    lines = best(capsys)[1]
    settings = Params().model_dump(mode="json")
    write_text(settings_path("r0"), yaml.safe_dump(settings | {"rounds": {"r0": FIRST}}))
    both = {"rounds": {"r0": FIRST, "r1": SECOND}}
    write_text(Path("params.yaml"), yaml.safe_dump(settings | both))
    assert best(capsys)[1] == lines


def test_policies_of_another_base_model_have_a_table_of_their_own(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record(database, "one", 0.9, 0.5, md5="a", base="m1")
    record(database, "two", 0.8, 0.5, md5="b", base="m2")
    lines = best(capsys)[1]
    assert [line.split()[0] for line in lines if line.startswith(("Evaluation", "one", "two"))] == [
        *("Evaluation", "two"),
        *("Evaluation", "one"),
    ]


def test_the_location_of_the_best_weights(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record(database, "one", 0.9, 0.5, md5="a")
    write_text(Path("rounds/r0/ppo/policy/adapter.bin"), "here")
    assert best(capsys)[1][-1].endswith("its weights are in rounds/r0/ppo/policy")
    record(database, "two", 0.8, 0.5, md5="b")  # the weights in this folder are its now
    assert "`git log -S apolicy -- dvc.lock rounds`" in best(capsys)[1][-1]
    for command in (
        ["init", "-q"],
        ["commit", "-q", "--allow-empty", "-m", "a"],
        ["branch", "runs/one"],
    ):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *command], check=True)
    assert "in DVC: `git checkout runs/one`, then `dvc checkout`" in best(capsys)[1][-1]
    own = Path(".rondo/workspaces/one/rounds/r0/ppo/policy").absolute()
    own.mkdir(parents=True)
    assert f"its weights are in {own}." in best(capsys)[1][-1]


def test_without_a_policy_the_error_names_the_next_step(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = best(capsys)
    assert (
        code == 2
        and error
        == "rondo: BadInput: MLflow has no policy that was evaluated: `rondo run` records them\n"
    )
    record(database, "one", 0.9, 0.52, md5="a")
    code, _, error = best(capsys, "--kl", "0.5")
    assert (
        code == 2
        and "none of 1 policies is under 0.5 nats" in error
        and "policy of one:r0: `rondo best --kl 0.6` shows it" in error
    )


def test_the_best_of_many_has_to_be_better_than_chance_makes_it() -> None:
    """Low ends 0.05 below: 1.96 standard errors, so widened to 0.0572 for 2 and 0.0787 for 50.

    Normal quantiles at 1 - 0.025 / 2 and 1 - 0.025 / 50 are 2.2414 and 3.2905.
    """

    def won(win_rate: float, policies: int) -> bool:
        metrics = {"win_rate": win_rate, "win_rate_low": win_rate - 0.05}
        policy = Policy("run", 0, "rounds/r0/ppo/policy", {}, metrics)
        return shown_to_win(policy, policies)

    assert won(0.551, 1) and not won(0.549, 1)
    assert won(0.558, 2) and not won(0.557, 2)
    assert won(0.585, 50) and not won(0.583, 50)

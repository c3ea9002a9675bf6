"""Files that Rondo writes for itself, with one to three changes: metrics, verdicts, decisions,
champions, locks, hashes.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.commands import status
from flows.core import locks, services, verdicts
from flows.orchestration.approval import decide_at_terminal, key_of
from flows.report import summary
from flows.tracking import records
from stages.gate.approvals import read_approval, read_rollback
from stages.gate.verdict import evaluate_gate, run_gate
from stages.lib.core import user_inputs
from stages.lib.core.champion import anchor_path, load_champion
from stages.lib.core.errors import BadInput, GateFailed
from stages.lib.core.files import read_json, write_json
from stages.lib.core.params import check_params, flatten
from stages.ppo.common.reference import check_reference_files
from tests.faults.harness import Trials
from tests.faults.mutations import mutated_bytes, mutated_json, mutated_jsonl
from tests.faults.scale import trials
from tests.stages.gate.test_gate import BATTERY, REWARD

ASK = check_params({"gates": {"reward": {"policy": "ask"}}}, "test")
APPROVAL = {
    "approved": True,
    "by": "Ada é",
    "reason": "seen by hand",
    "failed": {"reward.accuracy_low": 0.5, "battery.ece": None},
}
ROLLBACK = {"by": "Ada", "reason": "it lies", "policy": "ab" * 32}
LOCK = {
    "schema": "2.0",
    "stages": {
        "sft@r0": {
            "cmd": "python -m stages.sft --round r0",
            "deps": [{"path": "stages/sft", "md5": "ab12.dir", "size": 12, "nfiles": 3}],
            "params": {"params.yaml": {"sft.learning_rate": 0.001}},
            "outs": [{"path": "rounds/r0/sft/model", "md5": "cd34.dir", "size": 7}],
        }
    },
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def given(path: str, read: Callable[[], Any]) -> Callable[[bytes], Any]:
    """A function that writes its argument to the file and calls the reader."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)

    def write_and_read(content: bytes) -> Any:
        Path(path).write_bytes(content)
        return read()

    return write_and_read


def test_metrics_of_a_gate() -> None:
    """A gate passes only if each number is one that is within its threshold."""
    write_json(Path("rounds/r0/battery/metrics.json"), BATTERY)

    def read() -> dict[str, Any]:
        verdict = evaluate_gate(ASK, "reward", "r0")
        try:
            run_gate(ASK, "reward", "r0")
        except GateFailed:
            assert not verdict["passed"]
        return verdict

    def check(content: bytes, verdict: dict[str, Any]) -> None:
        for row in verdict["checks"]:
            value = json.loads(content.decode("utf-8-sig"))
            for key in row["metric"].removeprefix("reward.").split("."):
                value = value.get(key) if isinstance(value, dict) else None
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if row["metric"].startswith("reward.") and " - " not in row["metric"]:
                assert row["value"] is None or (is_number and row["value"] == float(value))
        json.dumps(verdict, allow_nan=False)

    Trials("records: metrics.json and gates", r"reward/metrics\.json").run(
        trials(200, 700),
        lambda rng: mutated_json(rng, REWARD),
        given("rounds/r0/reward/metrics.json", read),
        check,
    )


@pytest.mark.parametrize(
    ("name", "good", "read"),
    [
        ("reward", APPROVAL, lambda: read_approval("r0", "reward")),
        ("taken_back", ROLLBACK, lambda: read_rollback("r0")),
    ],
)
def test_approvals(name: str, good: dict[str, Any], read: Callable[[], Any]) -> None:
    def check(content: bytes, decision: Any) -> None:
        values = json.loads(content.decode("utf-8-sig"))
        assert decision.by == values["by"] and decision.reason == values["reason"]
        if name == "reward":
            assert decision.failed.keys() == values["failed"].keys()

    Trials("records: approvals", rf"approvals/r0/{name}\.json").run(
        trials(120, 350),
        lambda rng: mutated_json(rng, good),
        given(f"approvals/r0/{name}.json", read),
        check,
    )


def test_verdicts() -> None:
    write_json(Path("rounds/r0/reward/metrics.json"), REWARD | {"accuracy_low": 0.1})
    write_json(Path("rounds/r0/battery/metrics.json"), BATTERY)
    with pytest.raises(GateFailed):
        run_gate(ASK, "reward", "r0")
    good = read_json(Path("reports/r0/gate_reward.json"), "")

    def read() -> Any:
        verdict = verdicts.read_gate("r0", "reward")
        assert verdict is not None
        verdicts.gate_message("r0", "reward")
        key_of(verdict)
        summary.verdict_lines(["r0"], {"reward@r0": {}, "battery@r0": {}})
        if not verdict["passed"] and verdict["policy"] == "ask":
            decide_at_terminal("reward", "r0", False, "Ada", "no")
            Path("approvals/r0/reward.json").unlink()
        return verdict

    Trials("records: verdicts", r"gate_reward\.json").run(
        trials(150, 500),
        lambda rng: mutated_json(rng, good),
        given("reports/r0/gate_reward.json", read),
        lambda content, verdict: verdict["checks"] and verdicts.failed_values(verdict),
    )


def test_champions() -> None:
    for name in ("sft/model", "ppo/policy"):
        write_json(Path(f"rounds/r0/{name}/config.json"), {})
    digest = user_inputs.file_hash(Path("rounds/r0/ppo/policy"))
    hashes = {"rounds/r0/ppo/policy": digest, "rounds/r0/sft/model": digest}
    good = {"round": "r0", "hashes": hashes, "anchor": {"rounds/r0/sft/model": digest}}

    def check(content: bytes, result: Any) -> None:
        champion, anchor = result
        values = json.loads(content.decode("utf-8-sig"))
        assert values["round"] == (champion.round if champion else None)
        assert anchor.is_relative_to("rounds")

    Trials("records: champion.json", r"champion\.json").run(
        trials(150, 500),
        lambda rng: mutated_json(rng, good),
        given("rounds/r1/champion/champion.json", lambda: (load_champion("r1"), anchor_path("r1"))),
        check,
    )


def test_manifests() -> None:
    Path("rounds/r0/sft/model").mkdir(parents=True)
    good = {"stage": "sft", "round": "r0", "weights": None, "inputs": {"a": "b"}}
    Trials("records: manifest.json", r"manifest\.json").run(
        trials(150, 400),
        lambda rng: mutated_json(rng, good),
        given("rounds/r0/sft/manifest.json", lambda: check_reference_files(Path("rounds/r0/sft"))),
        lambda content, _: json.loads(content.decode("utf-8-sig")),
    )


def test_dvc_lock() -> None:
    text = yaml.safe_dump(LOCK, sort_keys=False).encode()

    def make(rng: random.Random) -> bytes:
        return mutated_bytes(rng, text) if rng.random() < 0.5 else mutated_json(rng, LOCK)

    def check(content: bytes, result: Any) -> None:
        # libyaml takes a tab within a text, which PyYAML's own parser refuses
        stages = yaml.load(content.decode("utf-8-sig"), Loader=yaml.CSafeLoader)["stages"]
        entries, digests = result
        assert entries.keys() == stages.keys() and isinstance(digests, dict)

    Trials("records: dvc.lock", r"dvc\.lock").run(
        trials(150, 500),
        make,
        given("dvc.lock", lambda: (locks.read_locks(), locks.digests("r0"))),
        check,
    )


def test_hashes_of_inputs() -> None:
    Path("pairs.jsonl").write_text("{}\n")
    params = check_params(
        {"assets": {"data": "files"}, "prepare": {"sources": [{"path": "pairs.jsonl"}]}}, "test"
    )
    good = user_inputs.input_hashes(params)
    stored = read_json(user_inputs.HASHES, "")

    def check(_: bytes, hashes: Any) -> None:
        assert hashes.keys() == good.keys() and hashes["model"] == good["model"]
        assert all(isinstance(digest, str) for digest in hashes["data"].values())

    Trials("records: hashes of inputs", r"input_hashes\.json").run(
        trials(150, 300),
        lambda rng: mutated_json(rng, stored),
        given(str(user_inputs.HASHES), lambda: user_inputs.input_hashes(params)),
        check,
    )
    user_inputs.HASHES.unlink()
    Trials("records: hashes of inputs", r"inputs/data\.json|changed after the run began").run(
        trials(100, 300),
        lambda rng: mutated_json(rng, good["data"]),
        given("assets/inputs/data.json", lambda: user_inputs.check_unchanged("data", params)),
        lambda content, _: json.loads(content.decode("utf-8-sig"))["pairs.jsonl"],
    )


def test_steps_of_a_stage() -> None:
    rows = [{"step": step, "loss": 1 / step, "kl": 0.5} for step in (1, 2, 3)]

    def read() -> Any:
        status.progress("r0", "sft")
        return records.read_steps("sft@r0")

    def check(content: bytes, steps: Any) -> None:
        complete = content[: content.rfind(b"\n") + 1].decode("utf-8-sig")
        rows = [json.loads(line) for line in complete.split("\n") if line.strip()]
        numbers = [
            value
            for row in rows
            for _, value in flatten({key: value for key, value in row.items() if key != "step"})
            if isinstance(value, int | float)
        ]
        assert repr([step.value for step in steps]) == repr([float(number) for number in numbers])

    Trials("records: metrics.jsonl", r"metrics\.jsonl").run(
        trials(150, 400),
        lambda rng: mutated_jsonl(rng, rows),
        given("rounds/r0/sft/metrics.jsonl", read),
        check,
    )


def test_servers_of_another_form_are_none(folder: Path) -> None:
    """A damaged servers.json means that no server runs: `rondo up` writes it again."""
    home = (folder / ".rondo").resolve()
    home.mkdir()
    services.write_servers(home, services.Servers(auth="rondo:x", pid=1, home=str(home)))
    good = json.loads((home / services.SERVERS).read_text())

    def check(_: bytes, servers: Any) -> None:
        assert servers == services.Servers() or servers.home == str(home)

    def read() -> Any:
        services.running_prefect(home)
        return services.last_servers(home)

    Trials("records: servers.json", "").run(
        trials(100, 300),
        lambda rng: mutated_json(rng, good),
        given(str(home / services.SERVERS), read),
        check,
        refuses=False,
    )


def place_folder(path: Path) -> None:
    path.mkdir(parents=True)


def place_pipe(path: Path) -> None:
    import os

    os.mkfifo(path)


def place_broken_link(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("place", [place_folder, place_pipe, place_broken_link])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("metrics.json", lambda path: read_json(path, "dvc repro sft@r0")),
        ("dvc.lock", lambda path: locks.read_locks()),
        ("rounds/r0/sft/metrics.json", lambda path: evaluate_gate(ASK, "sft", "r0")),
    ],
)
def test_what_is_no_file(
    place: Callable[[Path], None], name: str, read: Callable[[Path], Any]
) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    place(path)
    if place is place_broken_link and name == "dvc.lock":
        assert read(path) == {}  # a link to nothing is no file
        return
    with pytest.raises(BadInput, match=rf"{path.name}.*(expected a file|cannot be read|missing)"):
        read(path)

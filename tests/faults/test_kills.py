"""SIGKILL of a stage, of DVC and of the run, at each kind of change of a file."""

import random
from dataclasses import replace

import pytest

from tests.faults.conftest import Report
from tests.faults.lab import Lab, Point, run_trial, with_bug
from tests.faults.scale import FULL, sample

RESUMES = {"ppo@r0"}  # the others start again, and say so in docs/reliability.md
STAGES = [
    "assets", "prepare@r0", "sft@r0", "gate_sft@r0", "annotate@r0", "reward@r0", "battery@r0",
    "gate_reward@r0", "champion@r0", "ppo@r0", "evaluate@r0", "capability@r0", "replay@r0",
    "gate_promote@r0",
]  # fmt: skip
# The steps of DVC and of the run are the same for all stages; these have folders and files, and one
# file
WITH_DVC = ["sft@r0", "gate_sft@r0", "ppo@r0"]
DVC_LOCK = Point("dvc", "open", "dvc.lock", 1)
THIRD_UPDATE = Point("stages.ppo", "fsync", ".rondo/work/r0/ppo/*/.state.pt.*.tmp", 3)
FEW = {  # of a run without RONDO_FAULTS=full, by stage
    "sft@r0": [
        DVC_LOCK,
        Point("stages.sft", "rename", "rounds/r0/sft/metrics.json", 1),
        Point("tests.faults.drive", "open", ".dvc/tmp/rwlock", 2),
    ],
    "gate_sft@r0": [Point("stages.gate", "rename", "gates/r0/sft.ok", 1)],
}
SEED = 20261127


def points_of(lab: Lab, address: str) -> list[Point]:
    """The first and the last point of each kind, i.e. process, operation and path.

    Without those at an fsync: a kill there leaves the files of a kill at the next change.
    """
    if not FULL:
        return FEW.get(address, [])
    first: dict[tuple[str, str, str], Point] = {}
    last: dict[tuple[str, str, str], Point] = {}
    for point in lab.points(address):
        of_stage = point.victim.startswith("stages.")
        if point.operation == "fsync" or not (of_stage or address in WITH_DVC):
            continue
        kind = (point.victim, point.operation, point.path)
        first.setdefault(kind, point)
        last[kind] = point
    return [*dict.fromkeys([*first.values(), *last.values()])]


def declared(address: str) -> tuple[str, ...]:
    """What a kill may lead to: a stage that does not resume repeats its steps."""
    return ("identical",) if address in RESUMES else ("identical", "again")


@pytest.mark.parametrize("address", STAGES if FULL else FEW)
def test_a_kill_at_each_point(lab: Lab, address: str, report: Report) -> None:
    trials = [run_trial(lab, address, point) for point in sample(points_of(lab, address), 2)]
    assert trials
    report("SIGKILL at a change of a file", trials, declared(address))


@pytest.mark.parametrize("address", WITH_DVC if FULL else ["sft@r0"])
def test_a_kill_after_a_file_was_emptied(lab: Lab, address: str, report: Report) -> None:
    """What a program that writes a file in place leaves behind."""
    points = [point for point in points_of(lab, address) if point.operation == "open"]
    trials = [run_trial(lab, address, point, "EMPTIED") for point in sample(points, 3)]
    assert trials
    report("SIGKILL after a file was emptied", trials, declared(address))


def test_the_stages_are_those_of_the_round(lab: Lab) -> None:
    assert [*lab.addresses()] == STAGES[: len(lab.addresses())]


@pytest.mark.skipif(not FULL, reason="minutes: make test-faults")
@pytest.mark.parametrize("address", ["sft@r0", "ppo@r0", "gate_promote@r0"])
def test_a_kill_and_another_during_the_run_after_it(lab: Lab, address: str, report: Report) -> None:
    points = points_of(lab, address)
    drawn = random.Random(SEED)
    chosen = drawn.sample(points, min(12, len(points)))
    pairs = [(point, drawn.choice(points)) for point in sample(chosen, 2)]
    trials = [run_trial(lab, address, point, then=[later]) for point, later in pairs]
    # a second fault may be at a point that the run after the first does not reach again
    report("SIGKILL, and again in the run after it", trials, declared(address))


def test_a_kill_as_dvc_fills_a_folder_of_its_run_cache(lab: Lab, report: Report) -> None:
    """DVC alone would fail at the empty folder from then on."""
    trial = run_trial(lab, "gate_sft@r0", Point("dvc", "open", ".dvc/cache/runs/*", 1))
    report("SIGKILL at a change of a file", [trial])


@pytest.mark.skipif(not FULL, reason="minutes: make test-faults")
def test_a_second_kill_after_dvc_has_recorded_the_outputs(lab: Lab, report: Report) -> None:
    """The last run finds the stage unchanged, so the second one has removed what the first kill
    left.
    """
    first = Point("stages.ppo", "rename", "rounds/r0/ppo/metrics.jsonl", 1)
    second = Point("tests.faults.drive", "remove", "adapter_config.json", 1)
    trial = run_trial(lab, "ppo@r0", first, then=[second])
    assert trial.second.output == "unchanged\n", trial
    report("SIGKILL, and again in the run after it", [trial])


@pytest.mark.skipif(not FULL, reason="minutes: make test-faults")
@pytest.mark.parametrize("part", range(4))
def test_kills_at_random(lab: Lab, part: int, report: Report) -> None:
    """100 draws of a stage and one of all its points: at 0 of 100, at most 3% differ (95%)."""
    drawn = random.Random(SEED + part)
    for_all = ("identical", "again")
    trials = []
    for _ in range(25):
        address = drawn.choice(lab.addresses())
        trials.append(run_trial(lab, address, drawn.choice(lab.points(address))))
    report("SIGKILL at random", trials, for_all)


def test_files_are_synchronised_before_they_get_their_names(lab: Lab) -> None:
    for address in lab.addresses():
        assert not unsynchronised(lab.points(address)), address


def unsynchronised(points: list[Point]) -> list[Point]:
    """Files of a stage or of the run that get their name before they, or without that their folder
    afterwards, were written to the disk: what a power loss may empty.
    """
    of_ours = [point for point in points if point.victim != "dvc"]
    opened = {point.path for point in of_ours if point.operation == "open"}
    synchronised = [point if point.operation == "fsync" else None for point in of_ours]
    lost = []
    for index, point in enumerate(of_ours):
        folder, _, name = point.path.rpartition("/")
        temporary = f"{folder}/.{name}.*.tmp"
        if point.operation == "rename" and temporary in opened:
            file = replace(point, operation="fsync", path=temporary)
            folders = [later.path for later in synchronised[index:] if later]
            if file not in synchronised[:index] or folder not in folders:
                lost.append(point)
    return lost


@pytest.mark.parametrize(
    ("address", "file", "old", "new", "point", "do", "kind"),
    [
        pytest.param(
            "sft@r0",
            "flows/execution/dvc_stages.py",
            "around or nullcontext(), keep_other_stages(address)",
            "around or nullcontext()",
            DVC_LOCK,
            "EMPTIED",
            "stopped",
            id="the records of the other stages are lost",
        ),
        pytest.param(
            "sft@r0",
            "flows/execution/dvc_stages.py",
            "            leftovers.remove_temporaries(repo, address)\n",
            "",
            FEW["sft@r0"][1],
            "SIGKILL",
            "different",
            id="a half-written file stays",
        ),
        pytest.param(
            "ppo@r0",
            "stages/ppo/common/resume.py",
            "if not self.path.exists():",
            "if True:",
            THIRD_UPDATE,
            "SIGKILL",
            "again",
            id="a resume that starts anew",
        ),
        pytest.param(
            "ppo@r0",
            "stages/ppo/trainer/update.py",
            '        self.generator.set_state(state["generator"])\n',
            "",
            THIRD_UPDATE,
            "SIGKILL",
            "different",
            id="a resume that samples other tokens",
        ),
        pytest.param(
            "ppo@r0",
            "flows/execution/dvc_stages.py",
            "        with around or nullcontext(), keep_other_stages(address):\n",
            "        leftovers.clear_resume_states(address)\n"
            "        with around or nullcontext(), keep_other_stages(address):\n",
            THIRD_UPDATE,
            "SIGKILL",
            "again",
            id="a resume state that is deleted too early",
        ),
    ],
)
def test_a_planted_bug_is_seen(
    lab: Lab, address: str, file: str, old: str, new: str, point: Point, do: str, kind: str
) -> None:
    if address not in lab.addresses():
        pytest.skip("minutes: make test-faults")
    with with_bug(lab, address, file, old, new) as buggy:
        trial = run_trial(buggy, address, point, do)
    assert trial.kind == kind, trial


def test_a_dropped_fsync_is_seen(lab: Lab) -> None:
    with with_bug(
        lab, "gate_sft@r0", "stages/lib/core/files.py", "os.fsync(stream.fileno())", "pass"
    ) as buggy:
        assert unsynchronised(buggy.points("gate_sft@r0"))

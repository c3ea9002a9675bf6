"""One damaged file of each kind in a project whose stages have run: a flipped bit, a cut to half,
an empty file. Then the command that a person runs next.
"""

import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml

from stages.lib.core.errors import BadInput
from stages.ppo.common.resume import Resume
from tests.faults.conftest import RUN, Report
from tests.faults.damage import (
    DAMAGES,
    Damage,
    Outcome,
    cut_to_half,
    damage_file,
    flip_a_bit,
    with_damages,
)
from tests.faults.lab import Ended, Lab, copy, differences, hashes_of, rondo, without_report
from tests.faults.scale import FULL, sample
from tests.faults.test_kills import THIRD_UPDATE

READ = [  # kind, file, the stage that made it, a stage that reads it
    ("metrics.json", "rounds/r0/sft/metrics.json", "sft@r0", "gate_sft@r0"),
    ("a gate's file", "gates/r0/sft.ok", "gate_sft@r0", "annotate@r0"),
    ("a model's weights", "rounds/r0/sft/model/model.safetensors", "sft@r0", "annotate@r0"),
    ("an adapter", "rounds/r0/ppo/policy/adapter_model.safetensors", "ppo@r0", "capability@r0"),
    ("prepared data", "rounds/r0/prepare/data/sft_train.jsonl", "prepare@r0", "sft@r0"),
    ("imported data", "assets/data/tweets.tsv", "assets", "prepare@r0"),
    ("the base model", "assets/model/model.safetensors", "assets", "sft@r0"),
    ("a champion's record", "rounds/r0/champion/start.json", "champion@r0", "ppo@r0"),
]


@contextmanager
def project_before(lab: Lab, address: str) -> Iterator[Path]:
    """A copy of the project before a stage."""
    project = copy(lab.before(address), lab.folder / "damaged" / f"{time.monotonic_ns()}")
    yield project
    shutil.rmtree(project)


def run_all(lab: Lab, project: Path, addresses: list[str]) -> Ended:
    """Bring stages up to date, up to the first that fails."""
    for address in addresses:
        ended = lab.run(project, address)
        if ended.code:
            break
    return ended


@pytest.mark.parametrize(
    ("kind", "name", "maker", "reader", "damage"), with_damages(READ, flip_a_bit)
)
def test_a_file_that_the_next_stage_reads(
    lab: Lab, kind: str, name: str, maker: str, reader: str, damage: Damage, report: Report
) -> None:
    """DVC trusts times and sizes: a flipped bit is found by the stage that reads the file, and the
    next run restores it.
    """
    with project_before(lab, reader) as project:
        assert lab.run(project, maker).output == "unchanged\n"  # DVC knows the file's time
        damage_file(project / name, damage)
        ended = run_all(lab, project, [maker, reader])
        differ = differences(hashes_of(project), lab.results(reader))
        lost: tuple[str, ...] = ()
        if ended.code:
            again = run_all(lab, project, [maker, reader])
            lost = differences(hashes_of(project), lab.results(reader))
            assert not again.code, again.output
    outcome = Outcome(damage.__name__, name, ended, differ, lost)
    report(f"damaged: {kind}", [outcome], ("restored", "refused"))


CACHED = [  # kind, the stage that made it, its output, the file in this folder
    ("a verdict", "gate_sft@r0", "reports/r0/gate_sft.json", ""),
    ("a model's weights", "sft@r0", "rounds/r0/sft/model", "model.safetensors"),
    ("the list of a folder's files", "sft@r0", "rounds/r0/sft/model", ""),
    ("a manifest", "sft@r0", "rounds/r0/sft/manifest.json", ""),
]


def object_of(project: Path, address: str, output: str, file: str) -> Path:
    """The object of an output in DVC's cache, or of a file in its folder."""
    cache = project / ".dvc/cache/files/md5"
    outs = yaml.safe_load((project / "dvc.lock").read_text())["stages"][address]["outs"]
    (md5,) = (out["md5"] for out in outs if out["path"] == output)
    if file:
        listed = json.loads((cache / md5[:2] / md5[2:]).read_text())
        (md5,) = (row["md5"] for row in listed if row["relpath"] == file)
    return cache / md5[:2] / md5[2:]


@pytest.mark.parametrize(
    ("kind", "address", "output", "file", "damage"), with_damages(CACHED, flip_a_bit)
)
def test_an_object_of_the_cache(
    lab: Lab, kind: str, address: str, output: str, file: str, damage: Damage, report: Report
) -> None:
    """DVC trusts a read-only object, and restores an output from it."""
    with project_before(lab, address) as project:
        assert not lab.run(project, address).code
        damage_file(object_of(project, address, output, file), damage)
        path = project / output
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        ended = lab.run(project, address)
        differ = differences(hashes_of(project), lab.results(address))
    outcome = Outcome(damage.__name__, output, ended, differ)
    report(f"damaged in DVC's cache: {kind}", [outcome], ("restored",))


@pytest.mark.skipif(not FULL, reason="minutes: make test-faults")
@pytest.mark.parametrize("damage", sample(DAMAGES, 1))
def test_the_state_from_which_a_killed_policy_stage_resumes(
    lab: Lab, damage: Damage, report: Report
) -> None:
    with project_before(lab, "ppo@r0") as project:
        lab.run(project, "ppo@r0", asdict(THIRD_UPDATE) | {"do": "SIGKILL"})
        (state,) = project.glob(".rondo/work/r0/ppo/*/state.pt")
        damage_file(state, damage)
        ended = lab.run(project, "ppo@r0")
        differ = differences(hashes_of(project), lab.results("ppo@r0"))
        lost: tuple[str, ...] = ()
        if ended.code:
            shutil.rmtree(state.parent)  # the next step of the error
            again = lab.run(project, "ppo@r0")
            lost = differences(hashes_of(project), lab.results("ppo@r0"))
            assert not again.code, again.output
    outcome = Outcome(damage.__name__, str(state.relative_to(project)), ended, differ, lost)
    report("damaged: PPO's resume state", [outcome], ("restored", "refused"))


def test_each_flipped_bit_of_a_resume_state_is_found(tmp_path: Path) -> None:
    resume = Resume(tmp_path, {"seed": 1})
    resume.save({"weights": torch.arange(16.0)})
    assert resume.load() is not None
    content = resume.path.read_bytes()
    for position in range(len(content)):
        flipped = content[position] ^ 1 << position % 8
        resume.path.write_bytes(content[:position] + bytes([flipped]) + content[position + 1 :])
        with pytest.raises(BadInput, match=r"state.pt: damaged.* Next: `rm -r"):
            resume.load()


ASIDE = "no stage reads it: it is shown as it is, and `rondo run` compares its hash"
RECORDS = [  # kind, file, the command that reads it, why its damage changes no result
    ("dvc.lock", "dvc.lock", ("status",), "DVC compares it with the files"),
    ("params.yaml", "params.yaml", ("status",), ""),
    ("made.json", ".rondo/work/r0/sft/made.json", ("report",), ""),
    ("a verdict", "reports/r0/gate_sft.json", ("status",), ASIDE),
    ("metrics.json", "rounds/r0/evaluate/metrics.json", ("status",), ASIDE),
    ("samples", "rounds/r0/evaluate/samples.jsonl", ("report",), ASIDE),
    ("project_id", ".rondo/project_id", RUN, ""),
    ("inputs.json", ".rondo/inputs.json", RUN, ""),
]


@pytest.mark.parametrize(
    ("kind", "name", "command", "unread", "damage"), with_damages(RECORDS, cut_to_half)
)
def test_a_record_of_a_finished_run(
    finished: Path,
    tmp_path: Path,
    kind: str,
    name: str,
    command: tuple[str, ...],
    unread: str,
    damage: Damage,
    report: Report,
) -> None:
    """Nothing is lost: after the step that an error names, all results are there."""
    expected = without_report(hashes_of(finished / "after"))
    project = copy(finished / "after", tmp_path / "project")
    damage_file(project / name, damage)
    ended = rondo(project, command)
    differ = differences(without_report(hashes_of(project)), expected)
    lost: tuple[str, ...] = ()
    if ended.code:
        assert re.search(r"git checkout|run `(rm|dvc repro)|next: correct", ended.output), ended
        if f"run `rm {name} && rondo run`" in ended.output:
            (project / name).unlink()
            assert not rondo(project, RUN).code
        else:  # a copy, as of git
            shutil.copy2(finished / "after" / name, project / name)
        assert not rondo(project, command).code
        lost = differences(without_report(hashes_of(project)), expected)
    outcome = Outcome(damage.__name__, name, ended, differ, lost, unread)
    report(f"damaged: {kind}", [outcome], ("restored", "refused", "unread"))
    shutil.rmtree(project)


@pytest.mark.skipif(not FULL, reason="minutes: make test-faults")
def test_a_dvc_lock_that_was_deleted_is_made_again(finished: Path, tmp_path: Path) -> None:
    """This is the next step that the error names."""
    project = copy(finished / "after", tmp_path / "project")
    (project / "dvc.lock").unlink()
    assert not rondo(project, RUN).code
    after, expected = (without_report(hashes_of(at)) for at in (project, finished / "after"))
    assert not differences(after, expected)

"""Lineage in the report: which run made each result."""

from pathlib import Path

import yaml

from flows.core.locks import read_locks
from flows.core.services import Servers
from flows.core.tables import short_hash
from flows.execution.meter import Meter
from flows.report import page
from flows.tracking import provenance
from stages.lib.core.files import write_text
from tests.flows.report.reading import Page


def test_each_stage_names_its_run_and_links_to_its_pages(project: Path) -> None:
    outs = {
        "assets": "assets/model",
        "sft@r0": "rounds/r0/sft/model",
        "reward@r0": "rounds/r0/reward/scores.jsonl",
    }
    stages = {
        address: {"outs": [{"path": path, "md5": f"md5 of {path}"}]}
        for address, path in outs.items()
    }
    write_text(Path("dvc.lock"), yaml.safe_dump({"stages": stages}))
    mlflow = f"{Servers().mlflow}/#/experiments/1/runs/fedcba9876543210"
    with Meter() as meter:
        pass
    provenance.record_provenance(
        "sft@r0", provenance.RunRef("20270102-030405-abc", "0123456789abcdef-dirty"), mlflow, meter
    )
    note = provenance.provenance_path("sft@r0")
    # within a flow the record has the flow run's id
    write_text(note, note.read_text().replace('"flow_run": null', '"flow_run": "11111111-2222"'))
    html = Page(page.write(["r0"], read_locks()).read_text())
    assert html.open_tags == []
    starts = [html.words.index(address) for address in ("assets", "sft@r0", "reward@r0")]
    assets, sft, reward = (
        " ".join(html.words[start:end])
        for start, end in zip(starts, [*starts[1:], None], strict=True)
    )
    assert "made in another folder" in assets and "assets/model md5 of assets/model" in assets
    assert "20270102-030405-abc" in sft and "01234567-dirty" in sft and "fedcba98" in sft
    assert "rounds/r0/sft/model md5 of rounds/r0/sft/model" in sft
    assert "made in another folder" in reward and "scores.jsonl" not in reward
    assert f"{Servers().prefect}/runs/flow-run/11111111-2222" in html.links
    assert mlflow in html.links
    assert "prepare@r0" not in html.words  # has not run


def test_a_short_hash_keeps_its_dirty_mark() -> None:
    assert short_hash("0123456789abc") == "01234567"
    assert short_hash("0123456789abc-dirty") == "01234567-dirty"
    assert short_hash("none") == "none"

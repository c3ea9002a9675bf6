"""Files of a stage that is not in `locks` are those of an earlier run: no page shows them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from flows.report import badcases, diagnosis, page, samples, summary
from flows.report.round_files import STAGES
from stages.lib.core.files import stage_dir, write_json, write_jsonl, write_text
from tests.flows.report.reading import all_ran
from tests.paths import ROOT

FOREIGN = 777.25
TEXT = "a text of another run"


def foreign(value: Any) -> Any:
    """A value of JSON with another number in place of each."""
    if isinstance(value, dict):
        return {key: foreign(entry) for key, entry in value.items()}
    return FOREIGN if isinstance(value, int | float) and not isinstance(value, bool) else value


def plant(stage: str) -> None:
    """Make the files of a stage of r0 those of another run."""
    folder = stage_dir("r0", stage)
    metrics = json.loads((ROOT / f"rounds/r1/{stage}/metrics.json").read_text())
    if stage == "capability":
        metrics = {"worst": TEXT, "worst_fall": 0.5}
    write_json(folder / "metrics.json", foreign(metrics))
    if stage == "ppo":
        write_text(folder / "curves.csv", f"step,kl\n1,{FOREIGN}\n2,{FOREIGN}\n")
        finding = {"sign": TEXT, "verdict": "warn", "update": 1, "metric": "kl", "value": FOREIGN}
        words = {"threshold": "1", "cause": TEXT, "first_fix": TEXT}
        write_json(folder / "health.json", {"findings": [finding | words]})
    if stage in ("sft", "evaluate"):
        row = {"id": "q", "sample": 0, "prompt": TEXT, "base": TEXT, "sft": TEXT, "ppo": TEXT}
        write_jsonl(folder / "samples.jsonl", [row])
    if stage == "prepare":
        counts = {"rows_read": {"a": 777}, "rows_kept": 777, "by_cause": {}, "replayed": {}}
        write_json(Path("reports/r0/data.json"), counts)


def shown(locks: dict[str, dict[str, Any]]) -> str:
    """All that the pages and the terminal show of r0; of the report's scripts only the charts."""
    for name in ("r0/samples.html", "badcases.html"):
        Path("reports", name).unlink(missing_ok=True)
    samples.write("r0", locks)
    badcases.write(["r0"], locks)
    texts = [path.read_text() for path in Path("reports").rglob("*.html")]
    report = page.render(["r0"], locks)
    start, end = report.find("<script>"), report.rfind("</script>")
    charts = re.findall(r'id="chart-data">(.*?)</script>', report, re.DOTALL)
    texts += [report[:start], *charts, report[end:], summary.text(["r0"], locks)]
    return "\n".join([*texts, diagnosis.headline(["r0"], locks)])


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_this_run_did_not_reach_has_no_number(project: Path, stage: str) -> None:
    for name in STAGES:
        write_json(stage_dir("r0", name) / "metrics.json", {})
    plant(stage)
    all_but_one = {key: lock for key, lock in all_ran("r0").items() if key != f"{stage}@r0"}
    text = shown(all_but_one)
    assert "777" not in text and TEXT not in text
    text = shown(all_ran("r0"))
    # nothing is shown of the labels and the battery but what gates and charts have
    assert ("777" in text or TEXT in text) == (stage != "annotate")

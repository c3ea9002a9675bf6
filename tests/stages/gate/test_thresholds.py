"""The table of docs/gates.md; tests/test_configs.py compares it with the page."""

from stages.gate.thresholds import markdown
from stages.lib.core.params.gates import GatesParams
from stages.lib.thresholds import THRESHOLDS


def test_the_table_of_a_gate_has_a_line_per_threshold() -> None:
    lines = markdown("reward", GatesParams()).split("\n")
    assert lines[:2] == ["| metric | threshold | why | if it fails |", "|---|---|---|---|"]
    assert len(lines) == 2 + len(THRESHOLDS["reward"])
    [centre] = [one for one in THRESHOLDS["reward"] if one.metric == "battery.centre"]
    cells = f"within +-0.5<br>`gates.reward.centre` | {centre.why} | {centre.fix}"
    assert f"| `battery.centre` | {cells} |" in lines

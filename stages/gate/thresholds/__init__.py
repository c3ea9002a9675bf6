"""Every metric that a gate checks: its threshold, the reason for it, and what to do if it fails.

`python -m stages.gate.thresholds` prints the tables of docs/gates.md. A metric is a name in the
metrics.json of a stage, or the difference of two; a stage has to compute anything else.
"""

from stages.gate.thresholds.form import Threshold, format_threshold
from stages.gate.thresholds.promote import PROMOTE
from stages.gate.thresholds.reward import REWARD
from stages.gate.thresholds.sft import SFT
from stages.lib.core.params.gates import GatesParams

THRESHOLDS: dict[str, tuple[Threshold, ...]] = {"sft": SFT, "reward": REWARD, "promote": PROMOTE}


def markdown(gate: str, gates: GatesParams) -> str:
    """The thresholds of a gate as a Markdown table."""
    rows = ["| metric | threshold | why | if it fails |", "|---|---|---|---|"]
    for threshold in THRESHOLDS[gate]:
        metric, key, why, fix = threshold.metric, threshold.bound, threshold.why, threshold.fix
        wanted = format_threshold(threshold, getattr(getattr(gates, gate), key))
        rows.append(f"| `{metric}` | {wanted}<br>`gates.{gate}.{key}` | {why} | {fix} |")
    return "\n".join(rows)

"""Prints the tables of docs/gates.md. Run: `python -m stages.gate.thresholds`."""

from stages.gate.thresholds import THRESHOLDS, markdown
from stages.lib.core.params.gates import GatesParams

for name in THRESHOLDS:
    print(f"## {name}\n\n{markdown(name, GatesParams())}\n")

"""A quality gate. Run: `python -m stages.gate --gate sft|reward|promote --round r0`."""

from stages.gate.verdict import main

main()

"""`python -m stages.prepare --round r0`: writes rounds/<round>/prepare/."""

from stages.prepare.build import build
from stages.program import run_stage

run_stage("prepare", build)

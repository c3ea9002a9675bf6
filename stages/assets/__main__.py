"""`python -m stages.assets`: writes assets/model, assets/data and assets/start."""

from stages.assets.build import build
from stages.program import run_stage

run_stage("assets", build)

"""The policy's first sample of every prompt once more: `python -m stages.evaluate.reproduce ROUND
PARAMS.json` prints a JSON list.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from stages.evaluate.evaluator import Evaluator
from stages.lib.core.files import read_json
from stages.lib.core.params import check_params
from stages.lib.lm.loading import setup_torch


def main(round_: str, settings: Path) -> None:
    params = check_params(read_json(settings, f"dvc repro evaluate@{round_}"), str(settings))
    setup_torch(params)
    evaluator = Evaluator(params, round_)
    print(json.dumps([asdict(sample) for sample in evaluator.answer(evaluator.load_ppo(), 0)]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

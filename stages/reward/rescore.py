"""Score token sequences with a saved reward model: `python -m stages.reward.rescore MODEL
SEQUENCES.json` prints a JSON list.
"""

import json
import sys
from pathlib import Path

from stages.lib.core.params import load_params
from stages.lib.lm.loading import load_reward_model, setup_torch
from stages.lib.lm.scoring import reward_scores


def main(model: Path, sequences: Path) -> None:
    params = load_params()
    setup_torch(params)
    scores = reward_scores(
        load_reward_model(model, params.model), json.loads(sequences.read_text())
    )
    print(json.dumps(scores.tolist()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

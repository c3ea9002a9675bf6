"""Score token sequences with a saved reward model, in a process of its own.

Prints a JSON list of scores. Run: `python -m stages.reward.rescore MODEL SEQUENCES.json`.
"""

import json
import sys
from pathlib import Path

from stages.lib.core.params import load_params
from stages.lib.lm.loading import load_reward_model, setup_torch
from stages.lib.lm.scoring import reward_scores


def main(model: Path, sequences: Path) -> None:
    """Print the scores of the sequences in a JSON file, with the model settings of params.yaml."""
    params = load_params()
    setup_torch(params)
    reward_model = load_reward_model(model, params.model)
    scores = reward_scores(reward_model, json.loads(sequences.read_text()))
    print(json.dumps(scores.tolist()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

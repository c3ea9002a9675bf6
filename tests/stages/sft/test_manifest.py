"""What the SFT stage records for later stages."""

import shutil
from pathlib import Path
from typing import Any

from stages.lib.core.files import read_json
from stages.lib.lm.saving import saved_weights_hash
from stages.ppo.common.reference import check_reference_files
from stages.sft.__main__ import main


def test_the_manifest_has_the_hash_of_the_weights(make_round: Any) -> None:
    params = make_round("r0", 1.0)
    sft = Path("rounds/r0/sft")
    shutil.rmtree(sft)
    params.sft = params.sft.model_copy(update={"max_steps": 1, "samples_per_prompt": 1})
    main(params, "r0")
    assert read_json(sft / "manifest.json", "")["weights"] == saved_weights_hash(sft / "model")
    check_reference_files(sft)

"""What the SFT stage records for later stages."""

import shutil
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from stages.lib.core.files import read_json
from stages.lib.lm.saving import saved_weights_hash
from stages.ppo.common.reference import check_reference_files
from stages.sft.__main__ import main


def test_the_manifest_has_the_hash_of_the_weights_and_the_model_its_end_tokens(
    make_round: Any,
) -> None:
    params = make_round("r0", 1.0)
    sft, base = Path("rounds/r0/sft"), Path("assets/model")
    shutil.rmtree(sft)
    shutil.copytree(base.resolve(), copy := Path("copy"))
    base.unlink()
    copy.rename(base)
    eos = AutoTokenizer.from_pretrained(base).eos_token_id
    GenerationConfig(eos_token_id=[eos, 9]).save_pretrained(base)
    params.sft = params.sft.model_copy(update={"max_steps": 1, "samples_per_prompt": 1})
    main(params, "r0")
    assert read_json(sft / "manifest.json", "")["weights"] == saved_weights_hash(sft / "model")
    check_reference_files(sft)
    ends = GenerationConfig.from_pretrained(sft / "model").eos_token_id
    assert set(ends) == {eos, 9}  # type: ignore[arg-type]

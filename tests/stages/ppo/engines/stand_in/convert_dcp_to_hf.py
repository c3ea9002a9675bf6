"""NeMo RL's converter: the real one if NEMO_RL names a checkout, else a stand-in for it."""

import argparse
import os
import runpy
import sys
from pathlib import Path

import torch
import yaml
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoConfig, AutoTokenizer


def convert(config: Path, weights: Path, target: Path) -> None:
    """
    Raises:
        FileExistsError: the folder `target` exists.
        FileNotFoundError: the weights are not in the format of `torch_save`.
    """
    target.mkdir(parents=True)
    if not (weights / "model/.metadata").exists():
        raise FileNotFoundError(f"No metadata file found in {weights}")
    dcp_to_torch_save(weights / "model", target / "pytorch_model.bin")
    state = torch.load(target / "pytorch_model.bin")
    assert "model" not in state
    model = yaml.safe_load(config.read_text())["policy"]["model_name"]
    AutoConfig.from_pretrained(model).save_pretrained(target)
    AutoTokenizer.from_pretrained(weights.parent / "tokenizer").save_pretrained(target)


if __name__ == "__main__":
    if checkout := os.environ.get("NEMO_RL"):
        sys.path.insert(0, checkout)
        real = Path(checkout) / "examples/converters/convert_dcp_to_hf.py"
        runpy.run_path(str(real), run_name="__main__")
    else:
        parser = argparse.ArgumentParser()
        for name in ("config", "dcp-ckpt-path", "hf-ckpt-path"):
            parser.add_argument(f"--{name}", type=Path, required=True)
        paths = parser.parse_args()
        convert(paths.config, paths.dcp_ckpt_path, paths.hf_ckpt_path)

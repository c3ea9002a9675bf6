"""Runs NeMo RL's PPO, and makes each of its checkpoints a policy in Hugging Face's format.

A copy is in the job's folder, with overrides in a JSON file beside it. It runs in NeMo RL's
environment, so that no part of Rondo is imported. A conversion that fails ends the job.
"""

import json
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent
STATES, POLICIES = FOLDER / "states", FOLDER / "policies"
RECIPE = "configs/ppo_math_1B.yaml"
SECONDS = 1.0  # between two looks


def examples() -> Path:
    """The folder with NeMo RL's commands, which are in its repository alone."""
    package = find_spec("nemo_rl")
    if package is not None and package.origin is not None:
        folder = Path(package.origin).parents[1] / "examples"
        if (folder / RECIPE).exists():
            return folder
    sys.exit(
        "python3 of the Ray cluster has no checkout of NeMo RL: start Ray in the environment of one"
    )


def train(commands: Path, overrides: list[str]) -> int:
    """Train, and convert meanwhile, so that a job that is stopped leaves its policies."""
    words = [sys.executable, str(commands / "run_ppo.py"), "--config", str(commands / RECIPE)]
    training = subprocess.Popen([*words, *overrides])
    try:
        while True:
            code = training.poll()
            convert_new(commands)  # after the look: the last checkpoint is among them
            if code is not None:
                return code
            time.sleep(SECONDS)
    finally:
        training.terminate()
        training.wait()


def convert_new(commands: Path) -> None:
    """Convert the complete checkpoints, which NeMo RL has renamed from `tmp_step_<n>`, the first
    one first, and delete them: no job continues from them.
    """
    for state in sorted(STATES.glob("step_*"), key=lambda path: int(path.name[len("step_") :])):
        policy, part = POLICIES / state.name, POLICIES / f"part-{state.name}"
        POLICIES.mkdir(exist_ok=True)
        subprocess.run(
            [
                *(sys.executable, str(commands / "converters/convert_dcp_to_hf.py")),
                *("--config", str(state / "config.yaml")),
                *("--dcp-ckpt-path", str(state / "policy/weights")),
                *("--hf-ckpt-path", str(part)),
            ],
            check=True,
        )
        write_safetensors(part)
        part.rename(policy)
        shutil.rmtree(state)


def write_safetensors(policy: Path) -> None:
    """Replace the pickled weights of the converter, which Rondo does not load."""
    import torch
    from safetensors.torch import save_file

    pickled = policy / "pytorch_model.bin"
    weights = torch.load(pickled, map_location="cpu", weights_only=True)
    tensors = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(tensors, policy / "model.safetensors", metadata={"format": "pt"})
    pickled.unlink()


if __name__ == "__main__":
    from_files = json.loads(Path(__file__).with_suffix(".json").read_text())
    sys.exit(train(examples(), [*sys.argv[1:], *from_files]))

"""Installs the stand-ins: `python install.py FOLDER` makes a folder for PYTHONPATH in which
`openrlhf.cli.train_ppo_ray`, `verl.trainer.main_ppo` and the commands in NeMo RL's `examples` are
the stand-ins, and whose metadata name the recorded versions.
"""

import json
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
RECORDED = HERE.parents[4] / "stages/lib/core/params"
PROGRAMS = {
    "openrlhf": "openrlhf/cli/train_ppo_ray.py",
    "verl": "verl/trainer/main_ppo.py",
    "nemo_rl": "examples/run_ppo.py",
}
MODULES = ("openrlhf_parser.py", "verl_config.py", "nemo_rl_config.py", "stand_in/training.py")
BASES = {
    "reward_manager.py": "verl/experimental/reward_loop/reward_manager/base.py",
    "checkpoint_callback.py": "verl/trainer/ppo/checkpoint_callback.py",
    "convert_dcp_to_hf.py": "examples/converters/convert_dcp_to_hf.py",
}
RECIPE = "examples/configs/ppo_math_1B.yaml"  # NeMo RL's checkout is known by it


def install(folder: Path, versions: dict[str, str]) -> None:
    for module in MODULES:
        put(HERE.parent / module, folder / Path(module).name)
    for engine, program in PROGRAMS.items():
        put(HERE / Path(program).name, folder / program)
        put(RECORDED / f"{engine}.json", folder / f"{engine}.json")
        metadata = folder / f"{engine}-{versions[engine]}.dist-info/METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {engine}\nVersion: {versions[engine]}\n")
    for name, path in BASES.items():
        put(HERE / name, folder / path)
    for path in ("nemo_rl/__init__.py", RECIPE):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()


def put(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def recorded_versions() -> dict[str, str]:
    return {
        engine: json.loads((RECORDED / f"{engine}.json").read_text())["version"]
        for engine in PROGRAMS
    }


if __name__ == "__main__":
    install(Path(sys.argv[1]), recorded_versions())

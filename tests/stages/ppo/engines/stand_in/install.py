"""Installs the stand-in: `python install.py FOLDER` makes a folder for PYTHONPATH in which
`openrlhf.cli.train_ppo_ray` is the stand-in, and whose metadata name the recorded version.
"""

import json
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
OPTIONS = HERE.parents[4] / "stages/lib/core/params/openrlhf.json"


def install(folder: Path, version: str) -> None:
    command = folder / "openrlhf/cli"
    command.mkdir(parents=True)
    shutil.copy(HERE / "train_ppo_ray.py", command)
    shutil.copy(HERE.parent / "openrlhf_parser.py", folder)
    shutil.copy(OPTIONS, folder)
    metadata = folder / f"openrlhf-{version}.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: openrlhf\nVersion: {version}\n")


if __name__ == "__main__":
    install(Path(sys.argv[1]), json.loads(OPTIONS.read_text())["version"])

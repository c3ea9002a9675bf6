"""The files of a model, found by their md5 in DVC's cache, and what MLflow's model of it needs.

Files are sent after their stage, maybe much later and by another run, when the folder may hold
another model. DVC's cache still has them then, and a file is used only if its md5 is right.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from flows.core.locks import read_locks
from flows.execution.dvc_stages import open_repo
from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_jsonl, stage_dir
from stages.lib.core.params import Params
from stages.lib.core.types import Row

SCORED = 8  # responses in the example of a reward model
# What the code of the models reads of params.yaml (flows/tracking/pyfunc_model.py)
SECTIONS: dict[str, Any] = {
    "seed": True,
    "model": True,
    "prepare": {"prompt_format"},
    "ppo": {"response_length", "temperature"},
    "reward": {"max_length"},
    "evaluate": {"batch_size"},
}


class ModelFile(BaseModel):
    """A file: its name in the model's folder, its md5, and where it may be (absolute paths)."""

    name: str
    md5: str
    sources: list[str]

    def find(self) -> Path:
        """The first source that has the file.

        Raises:
            BadInput: none has it.
        """
        for source in map(Path, self.sources):
            if source.is_file() and md5_of(source) == self.md5:
                return source
        raise BadInput(
            f"{self.sources[-1]} with md5 {self.md5} is gone from its folder and from DVC's cache, "
            "so MLflow does not get the model's files: run its stage again"
        )


class ModelFiles(BaseModel):
    """The content of an MLflow model.

    task: what it does. digest: a hash of its files. adapts: the digest of the model that an adapter
    adapts, else empty. settings: the sections of params.yaml that its code reads. examples: rows of
    its input.
    """

    task: Literal["generate", "score"]
    files: list[ModelFile]
    adapts: str = ""
    settings: dict[str, Any]
    examples: list[Row]

    @property
    def digest(self) -> str:
        return digest(self.files)


def md5_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "md5").hexdigest()


def digest(files: list[ModelFile]) -> str:
    """A hash of the names and contents of a model's files."""
    pairs = sorted((file.name, file.md5) for file in files)
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:16]


class TrackedFiles:
    """The outputs in dvc.lock with their files in DVC's cache; opened once per stage."""

    def __init__(self) -> None:
        self.locks = read_locks()
        with open_repo() as repo:
            self.cache = repo.cache.local

    def read(self, path: Path, address: str) -> list[ModelFile]:
        """The files of a folder, by name: those of the stage's entry in dvc.lock.

        Args:
            path: an output of the stage, or a folder in one; relative to the working directory.
            address: the stage in DVC, e.g. `ppo@r0`.

        Raises:
            BadInput: the folder is no output of the stage, or DVC's cache lacks the list of its
                files.
        """
        outs = {
            Path(out["path"]): out["md5"] for out in self.locks.get(address, {}).get("outs", [])
        }
        out = next((parent for parent in (path, *path.parents) if parent in outs), None)
        if out is None:
            raise BadInput(f"{path} is not in dvc.lock: run `dvc repro {address}`")
        listing = Path(self.cache.oid_to_path(outs[out]))
        if not listing.exists():
            raise BadInput(f"{listing} is missing: `dvc gc` removed {out} from DVC's cache")
        return [
            self._file(path, out / entry["relpath"], entry["md5"])
            for entry in sorted(json.loads(listing.read_bytes()), key=lambda row: row["relpath"])
            if path in (out / entry["relpath"]).parents
        ]

    def _file(self, folder: Path, path: Path, md5: str) -> ModelFile:
        cached = Path(self.cache.oid_to_path(md5))
        return ModelFile(
            name=str(path.relative_to(folder)),
            md5=md5,
            sources=[str(cached.resolve()), str(path.resolve())],
        )


def read_model_files(
    files: list[ModelFile], stage: str, round_: str, params: Params, tracked: TrackedFiles
) -> ModelFiles:
    """What MLflow's model of a model in the working directory needs.

    Args:
        files: of the model.
        stage: which stage produced it (sft, reward or ppo).
        round_: its round, e.g. `r0`.
        params: all params.
        tracked: outputs of DVC.

    Raises:
        BadInput: the round's data is missing, or the SFT model that an adapter needs.
    """
    data, made_by = stage_dir(round_, "prepare") / "data", f"dvc repro prepare@{round_}"
    adapts = ""
    if any(file.name == "adapter_config.json" for file in files):
        adapts = digest(tracked.read(stage_dir(round_, "sft") / "model", f"sft@{round_}"))
    if stage == "reward":
        pairs = read_jsonl(data / "pairs_eval.jsonl", made_by)[:SCORED]
        examples = [{"prompt": row["prompt"], "response": row["chosen"]} for row in pairs]
    else:
        rows = read_jsonl(data / "eval_prompts.jsonl", made_by)
        # The first batch of the evaluation: in another batch, products may round otherwise.
        examples = [{"prompt": row["prompt"]} for row in rows[: params.evaluate.batch_size]]
    return ModelFiles(
        task="score" if stage == "reward" else "generate",
        files=files,
        adapts=adapts,
        settings=params.model_dump(mode="json", include=SECTIONS),
        examples=examples,
    )


def files_now(path: Path) -> list[ModelFile]:
    """The files of a folder that DVC does not track, with the md5s that they have now."""
    return [
        ModelFile(name=str(file.relative_to(path)), md5=md5_of(file), sources=[str(file.resolve())])
        for file in sorted(path.rglob("*"))
        if file.is_file()
    ]

"""The files of a model, found by their md5 in DVC's cache, and what MLflow's model of it needs.

Files are sent after their stage, maybe much later and by another run, when the folder may hold
another model. DVC's cache still has them then, and a file is used only if its md5 is right.
"""

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from flows.core.locks import read_lock
from flows.execution.dvc_stages import open_repo
from stages.lib.core.ended_rounds import params_of
from stages.lib.core.errors import BadInput
from stages.lib.core.files import read_jsonl, stage_dir
from stages.lib.core.types import Row

SCORED = 8  # responses in the example of a reward model
# What the code of the models reads of params.yaml (flows/tracking/pyfunc_model.py)
SECTIONS: dict[str, Any] = {
    "seed": True,
    "model": True,
    "prepare": {"prompt_format"},
    "ppo": {"response_length", "temperature"},
    "reward": {"max_length"},
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

    task: what it does. digest: a hash of its files. sft_digest: that of the SFT model that an
    adapter adapts, else empty. settings: the sections of params.yaml that its code reads. examples:
    rows of its input.
    """

    task: Literal["generate", "score"]
    files: list[ModelFile]
    sft_digest: str = ""
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


class ModelContents:
    """Reads what MLflow's models of a stage need: files, settings, examples of their input."""

    def __init__(self, stage: str, round_: str) -> None:
        """
        Args:
            stage: sft, reward or ppo.
            round_: its round, e.g. `r0`.
        """
        self.stage, self.round, self.params = stage, round_, params_of(round_)
        with open_repo() as repo:
            self.cache = repo.cache.local

    def tracked(self, path: Path) -> list[ModelFile]:
        """The files of an output of the stage, or of a folder in one, as dvc.lock has them.

        Args:
            path: relative to the working directory.

        Raises:
            BadInput: the folder is no output of the stage, or DVC's cache lacks the list of its
                files.
        """
        return self._tracked(path, f"{self.stage}@{self.round}")

    def of(self, files: list[ModelFile]) -> ModelFiles:
        """The content of the MLflow model with these files.

        Raises:
            BadInput: the round's data is missing, or the SFT model that an adapter needs.
        """
        is_adapter = any(file.name == "adapter_config.json" for file in files)
        return ModelFiles(
            task="score" if self.stage == "reward" else "generate",
            files=files,
            sft_digest=self._sft_digest if is_adapter else "",
            settings=self.params.model_dump(mode="json", include=SECTIONS),
            examples=self._examples,
        )

    @cached_property
    def _sft_digest(self) -> str:
        folder = stage_dir(self.round, "sft") / "model"
        return digest(self._tracked(folder, f"sft@{self.round}"))

    @cached_property
    def _examples(self) -> list[Row]:
        data = stage_dir(self.round, "prepare") / "data"
        made_by = f"dvc repro prepare@{self.round}"
        if self.stage == "reward":
            pairs = read_jsonl(data / "pairs_eval.jsonl", made_by)[:SCORED]
            return [{"prompt": row["prompt"], "response": row["chosen"]} for row in pairs]
        rows = read_jsonl(data / "eval_prompts.jsonl", made_by)
        # All prompts of the evaluation: in other batches, products may round otherwise.
        return [{"prompt": row["prompt"]} for row in rows]

    def _tracked(self, path: Path, address: str) -> list[ModelFile]:
        outs = {Path(out["path"]): out["md5"] for out in read_lock(address).get("outs", [])}
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


def files_now(path: Path) -> list[ModelFile]:
    """The files of a folder that DVC does not track, with the md5s that they have now."""
    return [
        ModelFile(name=str(file.relative_to(path)), md5=md5_of(file), sources=[str(file.resolve())])
        for file in sorted(path.rglob("*"))
        if file.is_file()
    ]

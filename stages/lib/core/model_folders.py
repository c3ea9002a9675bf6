"""Damaged files of a model's folder: the error names the file, whatever a library raised."""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from stages.lib.core.errors import PRINTED_NO_MEMORY, BadInput, RondoError
from stages.lib.core.files import read_object

FIX = "restore the file: copy the model again, or run the stage that made it"
CONFIG = "config.json"
# Keys of config.json by which memory is allocated before the weights are read
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "head_dim"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)
MAX_SIZE, MAX_LAYERS = 10**7, 1000
LAYER = re.compile(r"\.(?:layers|h|blocks)\.\d+\.")


@contextmanager
def damage_named(folder: Path) -> Iterator[None]:
    """Within this context, an error of a library about the folder's files is a BadInput."""
    try:
        yield
    except (RondoError, MemoryError):
        raise
    except ImportError as error:
        reason = " ".join(str(error).split())[:300]
        raise BadInput(
            f"{folder}: transformers cannot load it without another package: {reason}"
        ) from error
    except Exception as error:  # transformers, peft and tokenizers have no common type
        if PRINTED_NO_MEMORY.search(str(error)):  # of a GPU or of RAM
            raise
        if "trust_remote_code" in str(error):
            raise BadInput(
                f"{folder}: it needs code of its own (auto_map in its JSON files), which Rondo "
                "never runs; choose a model whose architecture is in transformers"
            ) from error
        for path in sorted(folder.glob("*.json")):
            read_object(path, FIX)
        for path in sorted(folder.glob("*.safetensors")):
            tensor_names(path)
        reason = " ".join(str(error).split())[:300]
        raise BadInput(
            f"{folder}: its config, tokenizer or weights cannot be used "
            f"({type(error).__name__}: {reason}); {FIX}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json.

    Raises:
        BadInput: it is no JSON object, or one of its sizes is no possible number.
    """
    path = folder / CONFIG
    config = read_object(path, FIX)
    text = config.get("text_config")
    for section in (config, text if isinstance(text, dict) else {}):
        for key in SIZES:
            value, limit = section.get(key), MAX_LAYERS if "layers" in key else MAX_SIZE
            # Gemma 3n has one size per layer
            sizes = value if isinstance(value, list) and value else [value]
            possible = all(type(size) is int and 0 < size <= limit for size in sizes)
            if value is not None and not possible:
                raise BadInput(f"{path}: {key} is {value!r:.60}, expected 1 to {limit:,}; {FIX}")
    return config


def check_calibration(folder: Path, config: Any) -> None:
    """Check the numbers of a reward model's calibration, if it has one.

    Raises:
        BadInput: one of them is not finite, a standard deviation is not above 0, or only one of
            mean and standard deviation is there.
    """
    if hasattr(config, "mean") != hasattr(config, "std"):
        lost = "std" if hasattr(config, "mean") else "mean"
        raise BadInput(f"{folder / CONFIG}: it has no {lost}, expected mean and std; {FIX}")
    for key in ("mean", "std", "ensemble_mean", "ensemble_std"):
        value = getattr(config, key, 0.0 if "mean" in key else 1.0)
        is_number = isinstance(value, int | float) and abs(value) < 1e30  # false for NaN
        if not is_number or ("std" in key and value <= 0):
            expected = "above 0" if "std" in key else "that is finite"
            raise BadInput(
                f"{folder / CONFIG}: {key} is {value!r:.60}, expected a number {expected}; {FIX}"
            )


def check_weights(folder: Path, missing: Collection[str], unexpected: Collection[str]) -> None:
    """Check that the weights are those of the config: a library would only warn of a difference.

    Args:
        folder: of the model.
        missing: weights that the model needs and the files lack.
        unexpected: weights of the files that the model does not have.

    Raises:
        BadInput: a weight is missing, or the config has fewer layers than the files.
    """
    if missing:
        raise BadInput(
            f"{folder}: {', '.join(sorted(missing)[:3])} is missing in its weights "
            f"({len(missing)} in all), lost when it was saved or never there, as in another kind "
            "of model: run its stage again, or name another folder"
        )
    if layers := sorted(name for name in unexpected if LAYER.search(f".{name}.")):
        raise BadInput(
            f"{folder}: the weights have {layers[0]}, which is in no layer of {CONFIG}; {FIX}"
        )


def tensor_names(path: Path) -> set[str]:
    """The names of the tensors in a safetensors file.

    Raises:
        BadInput: the file is damaged.
    """
    try:
        with safe_open(path, framework="np") as file:
            return set(file.keys())
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path}: no safetensors file ({error}); {FIX}") from None

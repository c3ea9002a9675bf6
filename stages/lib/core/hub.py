"""Models and data of the Hugging Face hub, and its errors: those that a retry may solve, and those
the user must fix.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.lib.core.errors import BadInput, Unreachable
from stages.lib.core.progress import progress

TOO_MANY_REQUESTS, SERVER_ERROR = 429, 500
MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "LICENSE*"]


@contextmanager
def hub_errors(what: str, refused: str) -> Iterator[None]:
    """Translate errors of a call of huggingface_hub or datasets.

    Args:
        what: the key of params.yaml and its value, for messages.
        refused: what it means if the hub was reached and returned an error.

    Raises:
        Unreachable: the network or the hub is down; the name may be right.
        BadInput: the hub was reached and refused, or HF_HUB_OFFLINE forbids the request.
    """
    from datasets.exceptions import DatasetsError
    from huggingface_hub import constants

    # httpx as huggingface_hub imports it, which it keeps there for other libraries
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    try:
        yield
    except (httpx.HTTPError, OSError, ValueError, DatasetsError) as error:
        if constants.HF_HUB_OFFLINE:
            raise BadInput(
                f"{what}: the hub is not contacted because HF_HUB_OFFLINE is set ({error}); "
                "unset it, or name a local folder"
            ) from error
        if is_hub_unreachable(error):
            raise Unreachable(
                f"{what}: the hub cannot be reached ({error}); "
                "check the network and run the same again"
            ) from error
        raise BadInput(f"{what}: {refused} ({error})") from error


def name_and_revision(named: str, key: str) -> tuple[str, str]:
    """Split `org/name@revision`, the name of a model or data set of the hub.

    Without a revision, the hub may give other files tomorrow, and the misspelt name of a local
    folder could be the name of a stranger's model.

    Args:
        named: as params.yaml has it; it is no local file or folder.
        key: of params.yaml, for the error message.

    Raises:
        BadInput: there is no revision.

    Example:
        >>> name_and_revision("gpt2@main", "assets.model")
        ('gpt2', 'main')
    """
    name, _, revision = named.partition("@")
    if not revision:
        raise BadInput(
            f"{key} {named}: no such file or folder here; for the hub, add the commit: "
            f"{named}@COMMIT (or {named}@main, the newest, which may change)"
        )
    return name, revision


def is_of_hub(named: str) -> bool:
    """Whether a name is `org/name@revision` and no file or folder here."""
    return "@" in named and not Path(named).expanduser().exists()


def model_folder(named: str, key: str) -> Path:
    """A folder of a model: one here, or that of a model of the hub, of which safetensors,
    configuration and tokenizer are downloaded, no code and no pickles.

    Args:
        named: a folder, or `org/name@revision`.
        key: of params.yaml or the option that names it, for messages.

    Returns:
        Of the hub, a folder with the name of the commit.

    Raises:
        BadInput: there is no such model.
        Unreachable: it is on the hub, which cannot be reached.
    """
    from huggingface_hub import snapshot_download

    folder = Path(named).expanduser()
    if folder.exists():
        return folder
    repository, revision = name_and_revision(named, key)
    refused = "the hub gives no such model; check name and revision"
    with progress(f"downloading {named}"), hub_errors(f"{key} {named}", refused):
        return Path(snapshot_download(repository, revision=revision, allow_patterns=MODEL_FILES))


def load_data_set(named: str, key: str, refused: str, **options: Any) -> Any:
    """A data set of the hub, or of a local folder, by `datasets`.

    Args:
        named: as params.yaml has it: `org/name@revision`, or a folder.
        key: of params.yaml, for messages.
        refused: see `hub_errors`.
        options: of datasets.load_dataset.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    if Path(named).exists():
        try:
            return datasets.load_dataset(named, **options)
        except (OSError, ValueError, DatasetsError) as error:
            raise BadInput(f"{key} {named}: {refused} ({error})") from error
    repository, revision = name_and_revision(named, key)
    with progress(f"downloading {named}"), hub_errors(f"{key} {named}", refused):
        return datasets.load_dataset(repository, revision=revision, **options)


def is_hub_unreachable(error: BaseException | None) -> bool:
    """Whether the hub did not answer, or answered that it is overloaded or broken.

    Both libraries wrap such an error in a FileNotFoundError, the same as for a wrong name, and
    hide its cause (`from None`). The exception chain still contains it.
    """
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    while error:
        if isinstance(error, HfHubHTTPError):
            status = error.response.status_code
            return status == TOO_MANY_REQUESTS or status >= SERVER_ERROR
        if isinstance(error, httpx.TransportError | ConnectionError | TimeoutError):
            return True
        error = error.__cause__ or error.__context__
    return False

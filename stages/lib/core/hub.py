"""Asking the model hub: what to make of the answer that it does not give."""

from collections.abc import Iterator
from contextlib import contextmanager

from stages.lib.core.errors import BadInput, Unreachable

TOO_MANY_REQUESTS, SERVER_ERROR = 429, 500


@contextmanager
def hub_errors(what: str, refused: str) -> Iterator[None]:
    """Around a call of huggingface_hub or datasets. what: the key of params.yaml and its value;
    refused: what a no of the hub says.

    Raises:
        Unreachable: the network is down, or the hub is: the name may be right.
        BadInput: the hub was reached, and does not give it; or it was not asked.
    """
    from datasets.exceptions import DatasetsError
    from huggingface_hub import constants
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # its own one, kept there for other libraries

    try:
        yield
    except (httpx.HTTPError, OSError, ValueError, DatasetsError) as error:
        if constants.HF_HUB_OFFLINE:
            raise BadInput(
                f"{what}: the hub is not asked, since HF_HUB_OFFLINE is set ({error}); unset it, or name a folder"
            ) from error
        if is_hub_unreachable(error):
            raise Unreachable(
                f"{what}: the hub cannot be reached ({error}); check the network and run the same again"
            ) from error
        raise BadInput(f"{what}: {refused} ({error})") from error


def is_hub_unreachable(error: BaseException | None) -> bool:
    """Whether the hub did not answer, or not for now. Both libraries wrap that in a
    FileNotFoundError, the same as for a wrong name, and hide what it came from (`from None`); the
    chain still has it."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    while error:
        if isinstance(error, HfHubHTTPError):
            return (
                error.response.status_code == TOO_MANY_REQUESTS
                or error.response.status_code >= SERVER_ERROR
            )
        if isinstance(error, httpx.TransportError | ConnectionError | TimeoutError):
            return True
        error = error.__cause__ or error.__context__
    return False

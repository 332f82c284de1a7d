"""Push a model's folder to the Hugging Face Hub, or to a server with its API (HF_ENDPOINT)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TOKEN_HELP = (
    "create one with write access at https://huggingface.co/settings/tokens, and set HF_TOKEN"
)


class HubError(Exception):
    """The Hub does not take the model. The message says why, and what to do."""


def create_repository(name: str, *, private: bool) -> None:
    """Create a model repository unless it exists. Raises `HubError`.

    Args:
        name: `owner/name`.
        private: for a new repository.
    """
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise HubError(f"there is no token for the Hub: {TOKEN_HELP}")
    with _named_errors(name):
        HfApi().create_repo(name, private=private, exist_ok=True)


def push(folder: Path, name: str, message: str) -> str:
    """Upload a folder in one commit. Return its address. Raises `HubError`."""
    from huggingface_hub import HfApi

    with _named_errors(name):
        return str(HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message=message))


@contextmanager
def _named_errors(name: str) -> Iterator[None]:
    from huggingface_hub import constants
    from huggingface_hub.errors import (  # type: ignore[attr-defined] # HTTPError: of its library
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
    )

    remedies = {
        401: f"the token is not valid: {TOKEN_HELP}",
        403: f"the token may not write there: {TOKEN_HELP}, or name a repository of your own",
        404: "the repository or its owner does not exist, or the token cannot see it",
        429: "too many requests: wait, and try again",
    }
    try:
        yield
    except HFValidationError as error:
        raise HubError(f"{name} is not a name of the Hub, write owner/name: {error}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        remedy = remedies.get(status, "try again later, or ask the operator of the server")
        said = error.server_message or str(error).splitlines()[0]
        raise HubError(
            f"{constants.ENDPOINT} answers {status} for {name}: {said}: {remedy}"
        ) from error
    except (HTTPError, OSError) as error:  # without a network, or with HF_HUB_OFFLINE
        raise HubError(
            f"{constants.ENDPOINT} cannot be reached: {error}: check the network, HF_ENDPOINT and "
            "HF_HUB_OFFLINE"
        ) from error

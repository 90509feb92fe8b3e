"""A model's name to its folder: a local folder as it is, a hub id through huggingface_hub."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ..errors import CheckpointError, InputError, must
from ..resources import is_folder, user_path

FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.tiktoken", "*.txt"]
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")


def resolve(name: str | Path) -> Path:
    """The folder of a model: `name` itself where it is one, else the hub's snapshot, downloaded if need be.

    Raises:
        InputError: the name is neither a folder nor a hub id.
        CheckpointError: the hub cannot be reached and the cache does not hold the model, or it is not there.
    """
    path = user_path(name)
    if is_folder(path) and name != "":  # the path of an empty name is the folder at hand
        return path
    if isinstance(name, Path) or not HUB_ID.match(name):
        todo = "Check the spelling of the path."
        raise InputError(must("load", "the model", "an existing folder or a hub id (org/name)", repr(str(name)), todo))
    return _download(name)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
    from huggingface_hub.utils import tqdm

    class TerminalProgress(tqdm):
        """huggingface_hub's own bars on a terminal, nothing in a pipe."""

        def __init__(self, *args: object, **kwargs: object):
            super().__init__(*args, **{**kwargs, "disable": not sys.stderr.isatty()})

    try:
        return Path(snapshot_download(name, allow_patterns=FILES, tqdm_class=TerminalProgress))
    except Exception as error:  # connections break in many ways, each with a kind of error of its own
        if isinstance(error, HfHubHTTPError):
            found, todo = str(error).strip().splitlines()[0], "Check the id, and 'hf auth login' for a gated model."
        elif isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled)):
            found = "no copy in the cache and no connection"
            todo = "Connect once to download it, or give a local folder."
        else:
            found = f"a download that broke off ({type(error).__name__}: {error})"
            todo = "Run it again: it goes on where it stopped."
        raise CheckpointError(must("load", name, "on the hub or in its local cache", found, todo)) from error

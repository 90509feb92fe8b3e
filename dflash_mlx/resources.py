"""Finds the files that come with the package: ``metal/`` and ``models/pocket``.

A wheel carries them inside the package, under ``data/``; a checkout and an editable install have them at the
top of the tree, beside ``pyproject.toml``.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from .errors import DFlashError, must

DISTRIBUTION = "dflash-mlx-muse"
PACKAGE_FOLDER = Path(__file__).resolve().parent


def find(name: str) -> Path:
    """Give the path of a file or folder that is shipped with the package.

    Args:
        name: path with forward slashes below the top of the tree: ``"metal"``, ``"models/pocket"``.
    Raises:
        DFlashError: it is in none of the places, which are listed in the message.
    """
    places = [folder / name for folder in _folders()]
    for place in places:
        if place.exists():
            return place
    looked = " or ".join(str(place) for place in places)
    raise DFlashError(
        must(
            "resources",
            name,
            "a file or folder that comes with the package",
            f"nothing at {looked}",
            f"Install {DISTRIBUTION} again, or run from a complete clone.",
        )
    )


def user_path(name: str | Path) -> Path:
    """A path as people write it, ``~`` included; a user that does not exist is left as it was written."""
    try:
        return Path(name).expanduser()
    except RuntimeError:  # no home folder is known for it
        return Path(name)


def is_folder(path: Path) -> bool:
    """Whether there is a folder; a name that the system does not take names none."""
    try:
        return path.is_dir()
    except OSError:
        return False


def version() -> str:
    """Give the installed version of this distribution, or say that it is not installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "not installed (running from a folder)"


def _folders() -> list[Path]:
    """List where shipped files may be, the wheel's place first."""
    folders = [PACKAGE_FOLDER / "data"]
    # In site-packages the folder above holds other people's packages: only a checkout is searched there.
    if (PACKAGE_FOLDER.parent / "pyproject.toml").is_file():
        folders.append(PACKAGE_FOLDER.parent)
    return folders

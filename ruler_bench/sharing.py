"""What a file that is shared may say: paths relative to the working folder, no secrets."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any


def portable_path(text: str) -> str:
    """Return an absolute path relative to the working directory; anything else as it is.

    Manifests are shared: they should not tell where somebody's home folder lies. A path is what
    lies in a folder that is there, whether or not it has been made yet itself.
    """
    path = Path(text)
    if path.is_absolute() and any(_is_there(one) for one in (path, *path.parents[:-1])):
        return os.path.relpath(text)
    return text


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # too long for a name
        return False


_SECRET_KEY = re.compile(r"api_?key|secret|password|passphrase|credential|bearer", re.IGNORECASE)


def is_secret_key(key: str) -> bool:
    """Tell whether a setting's name says that its value must not be written down.

    What ends in _env names an environment variable, and not what it holds.
    """
    return bool(_SECRET_KEY.search(key)) and not key.endswith("_env")


def shareable(value: Any) -> Any:
    """Return settings as a manifest may hold them: paths relative, secrets not written down."""
    if isinstance(value, dict):
        return {
            key: "(not written down)"
            if is_secret_key(key) and inner is not None
            else shareable(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [shareable(inner) for inner in value]
    return portable_path(value) if isinstance(value, str) else value

"""Which code an engine is: a hash of the package or file that its `_target_` lives in."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ruler_bench.errors import UsageError

CODE_SUFFIXES = frozenset({".py", ".pyx", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".so"})
OURS, OUR_DISTRIBUTION = "backends", "ruler-bench"
SHOWN_DIGITS = 12

Sources = dict[str, dict[str, str]]
"""By the name of a top-level package or module: sha256 of its code, of ours the version, too."""


def sources(targets: Iterable[str]) -> Sources:
    """Return the code that classes live in; what has no file is left out.

    Of a package that is every file of code below its folders, of a module its file. What that
    imports from elsewhere is not part of it.

    Args:
        targets: dotted names, as in `_target_`.
    """
    found: Sources = {}
    for name in sorted({one.partition(".")[0] for one in targets}):
        files = list(_files(name))
        if files:
            found[name] = _version(name) | {"sha256": _digest(files)}
    return found


def check_unchanged(folder: Path, there: Mapping[str, Mapping[str, str]], here: Sources) -> None:
    """Refuse a folder whose answers other code gave.

    Raises:
        UsageError: names the package.
    """
    for name, code in here.items():
        before = there.get(name)
        if before is not None and before != code:
            raise UsageError(
                f"{folder}: the code of {name} was changed since its samples were recorded "
                f"({_shown(before)} there, {_shown(code)} here), and their answers must not be "
                "mixed with those of other code. Start anew with overwrite=true, choose another "
                "folder with out=DIR, or take the change back."
            )


def _files(name: str) -> Iterator[tuple[str, Path]]:
    """Yield the files of a top-level package or module, each with its name within it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # ValueError: a module without a spec
        return
    if spec is None:
        return
    if spec.submodule_search_locations is None:
        if spec.has_location and spec.origin is not None:
            yield Path(spec.origin).name, Path(spec.origin)
        return
    for root in spec.submodule_search_locations:
        for folder, inner, names in os.walk(root):
            inner[:] = [one for one in inner if one != "__pycache__" and not one.startswith(".")]
            for one in names:
                path = Path(folder, one)
                if path.suffix in CODE_SUFFIXES and path.is_file():
                    yield str(path.relative_to(root)), path


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, path in sorted(files):
        code = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{name}\0{code}\n".encode("utf-8", "backslashreplace"))
    return digest.hexdigest()


def _version(name: str) -> dict[str, str]:
    if name != OURS:
        return {}
    try:
        return {"version": importlib.metadata.version(OUR_DISTRIBUTION)}
    except importlib.metadata.PackageNotFoundError:
        return {}


def _shown(code: Mapping[str, str]) -> str:
    version = f"version {code['version']}, " if "version" in code else ""
    return f"{version}sha256 {code.get('sha256', '')[:SHOWN_DIGITS]}"

"""Configurations that installed packages bring, so that `pip install theirs` is all it takes.

A package names a folder of its own in the entry point group `ruler_bench.configs`:

    [project.entry-points."ruler_bench.configs"]
    my_engine = "my_engine.configs"

That folder is laid out as configs/ is: `backend/my_engine.yaml` is then `backend=my_engine`, and
experiments, models and tasks work likewise. It is found without importing the package, whose module
may do anything. docs/add_a_backend.md builds one.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from ruler_bench.errors import UsageError

GROUP = "ruler_bench.configs"
OURS = "ruler_bench"


@dataclass(frozen=True, slots=True)
class ConfigPackage:
    """A folder of configurations, and the installed package that brings it."""

    name: str
    folder: Path


def config_packages() -> list[ConfigPackage]:
    """Return the folders that installed packages name, by name of the package.

    One that is not there is told on stderr and left out: it must not keep others from working.
    """
    return _found(tuple(sys.path))


@functools.lru_cache
def _found(path: tuple[str, ...]) -> list[ConfigPackage]:
    """Look once for each sys.path, since it reads what every installed package says of itself."""
    found = []
    for name, target in sorted(_entry_points()):
        folder = _folder(target)
        if folder is None:
            print(
                f"warning: the package {name} names its configurations {target!r} "
                f"({GROUP} in its pyproject.toml), and there is no such folder; its backends are "
                "left out.",
                file=sys.stderr,
            )
            continue
        found.append(ConfigPackage(name, folder))
    return found


def _entry_points() -> set[tuple[str, str]]:
    """Return name and target of each; one that is found twice on the path counts once."""
    points = importlib.metadata.entry_points(group=GROUP)
    return {(one.dist.name if one.dist else one.name, one.value) for one in points}


def _folder(target: str) -> Path | None:
    package, *inner = target.split(".")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # ValueError: no name, or a module without a spec
        return None
    if spec is None or not inner:
        return None
    roots = spec.submodule_search_locations or []
    folders = (Path(root, *inner) for root in roots)
    return next((one for one in folders if one.is_dir()), None)


def config_names(group: str, own: Path) -> list[str]:
    """Return the names of a group, such as "backend": ours and those of packages.

    Args:
        group: name of a folder of configs/.
        own: the folder configs/ itself.
    """
    return sorted({path.stem for _, path in _files(group, own)})


def check_one_provider(group: str, name: str, own: Path) -> None:
    """Refuse a name that several have: Hydra would take the first in silence.

    Raises:
        UsageError: names them.
    """
    providers = [provider for provider, path in _files(group, own) if path.stem == name]
    if len(providers) > 1:
        raise UsageError(
            f"{group}={name}: {' and '.join(providers)} both have a {group} of this name; rename "
            f"{group}/{name}.yaml in {providers[-1]}, or uninstall that package."
        )


def _files(group: str, own: Path) -> Iterator[tuple[str, Path]]:
    for provider, folder in [(OURS, own), *((one.name, one.folder) for one in config_packages())]:
        for path in sorted((folder / group).glob("*.yaml")):
            yield provider, path


class _SearchPath(SearchPathPlugin):  # type: ignore[misc]
    """Tells Hydra the folders of installed packages."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for one in config_packages():
            search_path.append(one.name, f"file://{one.folder}")


def register_config_packages() -> None:
    """Let Hydra find what installed packages bring, from the next composition on."""
    Plugins.instance().register(_SearchPath)

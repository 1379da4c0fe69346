"""Which launchers there are, and the packages that they need."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import NamedTuple

from ruler_bench.errors import UsageError

GROUP = "hydra/launcher"
SETTINGS = "hydra.launcher."
BASIC = "basic"
N_JOBS = f"{SETTINGS}n_jobs"
ONLY_PRINTS = ("--cfg", "-c", "--info", "-i", "--help", "-h")


class Package(NamedTuple):
    """What a launcher needs: our extra that brings it, and its module."""

    extra: str
    module: str


_JOBLIB = Package("joblib", "hydra_plugins.hydra_joblib_launcher")
_SUBMITIT = Package("slurm", "hydra_plugins.hydra_submitit_launcher")
_RAY = Package("ray", "hydra_plugins.hydra_ray_launcher")
PACKAGES = {
    "gpus": _JOBLIB,
    "joblib": _JOBLIB,
    "slurm": _SUBMITIT,
    "submitit_slurm": _SUBMITIT,
    "submitit_local": _SUBMITIT,
    "ray_gpus": _RAY,
    "ray": _RAY,
    "ray_aws": _RAY,
}
"""By the name of a launcher: ours, and those of the packages."""


def check_launcher(arguments: Sequence[str], is_sweep: bool) -> None:
    """Refuse a launcher that cannot start anything, and settings that a sweep cannot take.

    Args:
        arguments: of the command line.
        is_sweep: whether they ask for one.

    Raises:
        UsageError: its package is missing, there is no sweep to launch, it has no settings, or
            one is out of range.
    """
    name = launcher_name(arguments)
    given = [one.lstrip("+").partition("=") for one in arguments]
    if is_sweep:
        for key, _, value in given:
            _check_setting(name or BASIC, key, value)
    if name is None:
        return
    if not is_sweep and not any(one.startswith(ONLY_PRINTS) for one in arguments):
        raise UsageError(f"{GROUP}={name}: is for sweeps; add -m, or leave it out.")
    package = PACKAGES.get(name)
    if package is not None and not _is_installed(package.module):
        raise UsageError(
            f"{GROUP}={name}: its package is not installed; "
            f'pip install "ruler-bench[{package.extra}]"'
        )


def _check_setting(launcher: str, key: str, value: str) -> None:
    """Refuse a setting of Hydra's that would be dropped, or that a launcher cannot mean."""
    if key.startswith("hydra.sweep."):
        raise UsageError(
            f"{key}={value}: a sweep keeps what its jobs leave in results/.sweeps; leave it out. "
            "out=DIR says where results go, a folder in it for each job."
        )
    if key.startswith(SETTINGS) and launcher == BASIC:
        raise UsageError(
            f"{key}: {GROUP}={BASIC} runs one job after the other and has no settings; add "
            f"{GROUP}=gpus, which runs several at a time (or joblib, slurm, ray_gpus), or leave "
            f"{key} out."
        )
    if key == N_JOBS and value == "0" and PACKAGES.get(launcher) == _JOBLIB:
        raise UsageError(
            f"{key}={value}: out of range; must be a number of jobs at a time from 1, or -1 for "
            "as many as there are cores."
        )


def launcher_name(arguments: Sequence[str]) -> str | None:
    """Return the launcher that the command line names."""
    names = [one.partition("=")[2] for one in arguments if one.startswith(f"{GROUP}=")]
    return names[-1] if names else None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # hydra_plugins itself
        return False

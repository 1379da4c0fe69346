"""Where a job stands in its sweep, as far as displays have to know."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

IN_PROCESS = "BasicLauncher"
NAMED = frozenset({"task", "suite", "length", "backend"})
"""Keys whose values stand in every title."""


@dataclass(frozen=True)
class Job:
    """One job of a multirun.

    Attributes:
        number: from 0.
        total: jobs of the sweep; None where only the sweeper knows.
        is_alone: whether no other job runs at the same time, so that bars do not collide.
        label: its swept settings that no title has, as typed.
    """

    number: int
    total: int | None
    is_alone: bool
    label: str


def current_job() -> Job | None:
    """Return the job of a multirun that this process runs; None where it runs a single command."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    from ruler_bench.cli import SWEPT_KEYS  # noqa: PLC0415 (it imports the configuration)
    from ruler_bench.sweep import planned_jobs  # noqa: PLC0415 (likewise)

    config = HydraConfig.get()
    swept = set(os.environ.get(SWEPT_KEYS, "").split(",")) - NAMED
    label = [one for one in config.overrides.task if one.lstrip("+~").partition("=")[0] in swept]
    total = len(planned_jobs(sys.argv[1:]))
    number = int(config.job.num)
    is_alone = str(config.launcher["_target_"]).rpartition(".")[2] == IN_PROCESS
    return Job(number, total if number < total else None, is_alone, " ".join(label))

"""Which tasks a suite has (configs/suite/*.yaml), and what a task is as its own file says."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ruler_bench.errors import UsageError, unknown_name
from ruler_bench.leak.arms import kind_of
from ruler_bench.tasks import TaskSpec, make_task

PER_TASK, PER_SUITE = "task", "suite"
ENGINE_PER = (PER_TASK, PER_SUITE)


@dataclass(frozen=True)
class Suite:
    """What a cell must know of the suite that it is one of.

    Attributes:
        name: of its configuration.
        tasks: all of them, in the order in which they are asked.
        folder: where the folders of tasks, or of lengths with those, are.
        engine_per: "task", or "suite": one engine answers all tasks of a length, arm by arm.
    """

    name: str
    tasks: tuple[str, ...]
    folder: Path
    engine_per: str = PER_TASK

    def settings(self) -> dict[str, Any]:
        """Return what decides the results of a task: nothing, or what its engine served before."""
        if self.engine_per == PER_TASK:
            return {}
        return {"suite": {"engine_per": self.engine_per, "tasks": list(self.tasks)}}


def task_names(config_dir: Path) -> list[str]:
    """Return the tasks that have a file."""
    return sorted(one.stem for one in (config_dir / "task").glob("*.yaml"))


def task_from_file(config_dir: Path, name: str) -> TaskSpec:
    """Return a task as its file describes it.

    Raises:
        UsageError: there is no such task; names the nearest.
    """
    names = task_names(config_dir)
    if name not in names:
        raise unknown_name("task", name, names)
    values: Any = OmegaConf.to_container(OmegaConf.load(config_dir / "task" / f"{name}.yaml"))
    return make_task(values)


def suite_tasks(
    values: Mapping[str, Any], given: Collection[str], config_dir: Path
) -> tuple[TaskSpec, ...]:
    """Return the tasks of a suite, in order.

    Args:
        values: its configuration.
        given: keys that the user set.
        config_dir: where the files of tasks are.

    Raises:
        UsageError: a task is unknown or named twice, or one was set beside the suite.
    """
    for key in sorted(given):
        if key == "task" or key.startswith("task."):
            raise UsageError(
                f"{key}: a suite names its tasks itself; leave out {key} or the suite "
                "(suite.tasks=[vt,cwe] chooses some)."
            )
    for key in values:
        if key != "tasks":
            raise unknown_name("key", f"suite.{key}", ["suite.tasks"])
    names = values.get("tasks")
    if not isinstance(names, list) or not names:
        raise UsageError(
            f"suite.tasks={names}: must be a list of tasks, for instance suite.tasks=[vt,cwe]."
        )
    tasks = tuple(task_from_file(config_dir, str(name)) for name in names)
    doubled = next((one for one in names if names.count(one) > 1), None)
    if doubled is not None:
        raise UsageError(f"suite.tasks: names {doubled} twice.")
    return tasks


def check_engine_per(
    engine_per: str, *, has_suite: bool, arms: Sequence[str], minimise: bool, is_diagnosis: bool
) -> None:
    """Check for how many tasks an engine is kept.

    Raises:
        UsageError: the value is unknown, would do nothing, or does not go with another setting.
    """
    if engine_per not in ENGINE_PER:
        raise unknown_name("engine_per", engine_per, ENGINE_PER)
    if engine_per == PER_TASK:
        return
    if not has_suite:
        raise UsageError(
            "engine_per=suite: without a suite there is one task, so that it would do nothing; add "
            "suite=niah or suite=ruler13, or leave it out."
        )
    if all(kind_of(arm).is_fresh for arm in arms):
        raise UsageError(
            f"engine_per=suite: arms=[{','.join(arms)}] has an engine for each sample, so that it "
            "would do nothing; add persistent, or leave it out."
        )
    if minimise or is_diagnosis:
        what = "minimise=true" if minimise else "experiment=diagnose"
        raise UsageError(
            f"engine_per=suite: {what} looks at the requests of one task; use engine_per=task."
        )

"""The cells of the comparison: a policy's runs of every task and length, one folder each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ruler_bench.bench import least_context_tokens, load_tokenizers
from ruler_bench.cell import Cell
from ruler_bench.journal import read_run
from ruler_bench.kept import Kept
from ruler_bench.lives import LocalLife
from ruler_bench.model_files import model_folder
from ruler_bench.report import Run
from ruler_bench.run import INTERRUPTED, run_cell
from scripts.accuracy.policies import FULL, PolicySpec
from scripts.detector.runner import cell_of

RUNS = "runs"
NOTE = (
    "one engine answers all cells of a policy, one after the other; positions count from the start "
    "of each cell"
)


@dataclass(frozen=True)
class Plan:
    """What is compared.

    Attributes:
        folder: of the comparison.
        tasks, lengths, samples: asked of every policy.
        overrides: of every run: model, device and what else a user sets.
    """

    folder: Path
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int
    overrides: tuple[str, ...]

    def places(self) -> Iterator[tuple[int, str]]:
        """Yield length and task of each cell of a policy."""
        for length in self.lengths:
            for task in self.tasks:
                yield length, task

    def folder_of(self, policy: PolicySpec, length: int, task: str) -> Path:
        """Return the run folder of a cell."""
        return self.folder / RUNS / policy.folder / str(length) / task

    def cell(self, policy: PolicySpec, length: int, task: str) -> Cell:
        """Compose a cell with the context of the longest, so that one engine suits all.

        Raises:
            UsageError: an override is wrong.
        """
        more = [f"backend.max_model_len={self._context_tokens}"]
        return self._compose(policy, length, task, more)

    def _compose(self, policy: PolicySpec, length: int, task: str, more: Sequence[str]) -> Cell:
        overrides = [
            f"task={task}",
            f"length={length}",
            f"num_samples={self.samples}",
            "fresh=inprocess",
            f"note='{NOTE}'",
            *policy.overrides(),
            *self.overrides,
            *more,
        ]
        return cell_of(overrides, self.folder_of(policy, length, task))

    @cached_property
    def _context_tokens(self) -> int:
        """What the longest cell needs; the model decides, not the policy."""
        cell = self._compose(PolicySpec(FULL, ()), max(self.lengths), self.tasks[0], [])
        model = model_folder(cell.model_path)
        return least_context_tokens(cell, model, load_tokenizers(cell, model)[1])


def run_policy(plan: Plan, policy: PolicySpec) -> None:
    """Run every cell of a policy, or what is missing of it, on one engine.

    Raises:
        ConfigurationError: a setting is wrong.
        KeyboardInterrupt: a run was interrupted; the same call goes on.
    """
    engines = Kept(LocalLife)
    try:
        for length, task in plan.places():
            if run_cell(plan.cell(policy, length, task), keep=engines).status == INTERRUPTED:
                raise KeyboardInterrupt
    finally:
        engines.close()


def run_of(plan: Plan, policy: PolicySpec, length: int, task: str) -> Run | None:
    """Return what a cell's folder holds; None where it was not run."""
    return read_run(plan.folder_of(policy, length, task))

"""Sound engines of the project and transformers: whatever the judge says against them is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ruler_bench.leak.join import FRESH, FRESH_AGAIN, PERSISTENT, PERSISTENT_AGAIN, REFERENCE
from scripts.detector.faults import Plan
from scripts.detector.judging import ALARMS, counts, judged
from scripts.detector.runner import Finished, run

TASKS = ("niah_single_1", "niah_multikey_1", "niah_single_2", "niah_multikey_2", "niah_multivalue")
HF = "hf"
ENGINES: Mapping[str, Sequence[str]] = {
    "gpu_only": ["backend=gpu_only"],
    "offload_2_slots": ["backend=offload", "backend.num_gpu_blocks=2"],
    "offload_4_slots": ["backend=offload", "backend.num_gpu_blocks=4"],
    "offload_layerwise": ["backend=offload_layerwise"],
    HF: ["backend=hf", "fresh=inprocess"],
}
"""Overrides of each. Building transformers' engine in a process of its own takes seconds, so that
its fresh engines are built in one process."""
REFERENCES = {HF: "gpu_only"}
"""Whose persistent arm is the reference, where it is not the plan's."""
ARMS = (PERSISTENT, PERSISTENT_AGAIN, FRESH, FRESH_AGAIN)
OTHER_THREADS = 2
OTHER = f"hf, {OTHER_THREADS} threads,"


class Clean:
    """Runs of sound engines, each made once.

    Args:
        plan: of the proof.
        arms: of each run, the reference apart.
    """

    def __init__(self, plan: Plan, arms: Sequence[str] = ARMS) -> None:
        self._plan = plan
        self._arms = tuple(arms)
        self._runs: dict[tuple[str, str], Finished] = {}

    def of(self, engine: str, task: str) -> Finished:
        """Return the arms of an engine, run where they are missing."""
        if (engine, task) not in self._runs:
            self._runs[engine, task] = run(
                [
                    *self._plan.common(task),
                    *ENGINES[engine],
                    *self._plan.overrides_of(engine),
                    f"arms=[{','.join(self._arms)}]",
                ],
                self._plan.folder / "clean" / engine / task,
            )
        return self._runs[engine, task]

    def _other_threads(self, task: str) -> Finished:
        """Return transformers' persistent answers with another number of threads."""
        overrides = [
            *self._plan.common(task),
            f"threads={OTHER_THREADS}",
            "backend=hf",
            *self._plan.overrides_of(HF),
            f"arms=[{PERSISTENT}]",
        ]
        return run(overrides, self._plan.folder / "clean" / f"hf_{OTHER_THREADS}_threads" / task)

    def measure(self, engine: str, task: str) -> dict[str, Any]:
        """Judge a sound engine against its fresh selves and another engine."""
        own = self.of(engine, task)
        theirs = self.of(REFERENCES.get(engine, self._plan.reference), task).as_reference()
        return figures(own.beside(theirs), self._plan.samples, own.seconds)

    def measure_threads(self, task: str, as_arm: str) -> dict[str, Any]:
        """Judge transformers against itself with another number of threads.

        Args:
            task: whose samples.
            as_arm: what its answers stand for: persistent or reference.
        """
        other = self._other_threads(task)
        own = self.of(HF, task)
        if as_arm == REFERENCE:
            return figures(own.beside(other.as_reference()), self._plan.samples, other.seconds)
        kept = own.only(*(one for one in own.facts if one not in (PERSISTENT, PERSISTENT_AGAIN)))
        return figures(kept.beside(other), self._plan.samples, other.seconds)


def figures(finished: Finished, samples: int, seconds: float) -> dict[str, Any]:
    """Return the verdict on a sound engine as a row has it.

    Args:
        finished: the run.
        samples: how many it was to ask.
        seconds: that were spent on it.
    """
    verdict = judged(finished)
    return {
        "verdict": verdict.verdict,
        "false_alarm": verdict.verdict in ALARMS or any(one in ALARMS for one in counts(verdict)),
        "samples": samples,
        "comparisons": verdict.compared,
        "indices": counts(verdict),
        "sentence": verdict.sentence,
        "errors": sum(one.error is not None for one in finished.records),
        "arms": sorted(finished.facts),
        "requests": len(finished.records),
        "seconds": round(seconds, 1),
    }

"""Seeded faults: is each found, in its class, and with how many samples?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends.engine.faults import FAULTS, Fault
from scripts.detector.judging import counts, found
from scripts.detector.kinds import wrong_outputs
from scripts.detector.runner import Finished, run, shown

ARMS = ("persistent", "persistent_again", "shuffled", "fresh", "fresh_again")
"""Those of experiment=leakcheck; its reference is asked once for all faults."""


@dataclass(frozen=True)
class Plan:
    """What every run of a proof has in common.

    Attributes:
        folder: where run folders go.
        length: tokens of a sample.
        samples: of each run.
        threads: CPU threads of an engine.
        device: of an engine.
        seed: of the samples.
        overrides: for every run besides; those of the backend for the project's engines alone.
        reference: backend of the arm reference.
    """

    folder: Path
    length: int = 2048
    samples: int = 20
    threads: int = 1
    device: str = "cpu"
    seed: int = 42
    overrides: Sequence[str] = field(default=())
    reference: str = "hf"

    def common(self, task: str, samples: int | None = None) -> list[str]:
        """Return the overrides that every run shares."""
        return [
            f"length={self.length}",
            f"device={self.device}",
            f"threads={self.threads}",
            f"seed={self.seed}",
            f"task={task}",
            f"num_samples={self.samples if samples is None else samples}",
        ]

    def overrides_of(self, engine: str) -> Sequence[str]:
        """Return the further overrides of an engine by name; none for one that is not ours."""
        blocks = ("backend.kvcache_block_size", "backend.num_gpu_blocks")
        unknown = {"hf": ("backend.",), "gpu_only": blocks}.get(engine, ())
        if engine == "offload_layerwise":
            unknown = (*blocks, "backend.chunk_tokens", "backend.attend_tokens")
        return [one for one in self.overrides if not one.startswith(unknown or ("\0",))]


TASK = "niah_single_1"
MOST_SAMPLES = 20


def reference(plan: Plan) -> Finished:
    """Ask the reference the samples of all faults, or read what it answered."""
    name = plan.reference
    overrides = [*plan.common(TASK), f"backend={name}", *plan.overrides_of(name)]
    return run([*overrides, "arms=[persistent]"], plan.folder / "reference").as_reference()


def arms_of(fault: Fault) -> tuple[str, ...]:
    """Return the arms that find a fault, the reference apart."""
    return (*ARMS, fault.arm) if fault.arm else ARMS


def settings_of(name: str, plan: Plan) -> list[str]:
    """Return the overrides under which a fault shows."""
    return [*FAULTS[name].settings, *plan.overrides, f"backend.fault={name}"]


def measure(name: str, plan: Plan, theirs: Finished) -> dict[str, Any]:
    """Run an engine with a fault, and return what the judge found.

    Args:
        name: of the fault.
        plan: of the proof.
        theirs: the reference's answers.

    Raises:
        ConfigurationError: the fault cannot show under these settings.
        KeyboardInterrupt: the run was interrupted; the same call goes on.
    """
    fault, settings = FAULTS[name], settings_of(name, plan)
    arms = arms_of(fault)
    overrides = [*plan.common(TASK), *settings, f"arms=[{','.join(arms)}]"]
    finished = run(overrides, plan.folder / "faults" / name)
    whole = finished.beside(theirs)
    seen = found(whole, plan.samples, fault.expected)
    return {
        "expected": fault.expected,
        "verdict": seen.verdict.verdict,
        "right_class": seen.verdict.verdict == fault.expected,
        "samples": plan.samples,
        "class_at": seen.class_at,
        "alarm_at": seen.alarm_at,
        "evidence": seen.evidence,
        "sentence": seen.verdict.sentence,
        "verdicts": list(seen.verdicts),
        "indices": counts(seen.verdict),
        "errors": sum(one.error is not None for one in finished.records),
        "requests": len(finished.records),
        "seconds": round(finished.seconds, 1),
        "settings": shown(settings),
        "arms": [*arms, "reference"],
        "wrong_outputs": wrong_outputs(whole),
    }

"""Where training stands: stages, sequence lengths and learning rate as a function of progress.

Progress runs from 0 to 1. A step that took `d` seconds advances it by `d / left` of what is left
of it, where `left` is the training time the budget still holds. So the schedule ends when the
budget does, whatever starting up, compiling and stopping cost, and never goes back.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Stage:
    """One stage of the curriculum.

    Attributes:
        length: the sequence length in tokens that is new in this stage.
        share: of the whole progress.
        learning_rate: peak.
        batches_per_step: micro-batches a step.
        mix: sequence length to its share of the micro-batches; earlier lengths stay in it, so
            that nothing is forgotten.
        other_weight: weight of the loss away from the answers.
        waits_until: progress until which the next stage waits for retrieval to appear in every
            family; 0 for no waiting.
    """

    length: int
    share: float
    learning_rate: float
    batches_per_step: int
    mix: dict[int, float]
    other_weight: float
    waits_until: float = 0.0


STAGES = (
    Stage(512, 0.10, 3e-3, 2, {512: 1.0}, 0.5, waits_until=0.25),
    Stage(2048, 0.20, 2e-3, 4, {2048: 0.75, 1024: 0.15, 512: 0.10}, 0.3),
    Stage(8192, 0.25, 1.5e-3, 4, {8192: 0.7, 4096: 0.14, 2048: 0.08, 1024: 0.08}, 0.15),
    Stage(
        32768,
        0.45,
        1e-3,
        4,
        {32768: 0.62, 16384: 0.16, 8192: 0.08, 4096: 0.06, 2048: 0.04, 1024: 0.04},
        0.05,
    ),
)

# From weights that can retrieve: a new family is learnt on short sequences, with lower rates than
# from nothing, and the longest ones come back in time to lose nothing at their length.
FINE_TUNING = (
    Stage(1024, 0.22, 1.5e-3, 2, {1024: 0.75, 512: 0.25}, 0.15, waits_until=0.4),
    Stage(4096, 0.22, 1.2e-3, 4, {4096: 0.66, 2048: 0.17, 1024: 0.17}, 0.1),
    Stage(8192, 0.20, 1e-3, 4, {8192: 0.66, 4096: 0.16, 2048: 0.08, 1024: 0.1}, 0.1),
    Stage(
        32768,
        0.36,
        8e-4,
        4,
        {32768: 0.60, 16384: 0.15, 8192: 0.08, 4096: 0.07, 2048: 0.05, 1024: 0.05},
        0.05,
    ),
)

WARMUP_STEPS = 100
RETRIEVAL_ACCURACY = 0.9  # of the answer tokens of a family: retrieval has appeared in it
DECAY_FROM = 0.6  # of the last stage: there the learning rate starts to fall
FINAL_FACTOR = 0.02  # of the last stage's learning rate, at the end


@dataclass
class Position:
    """Where training stands; all of it goes into the checkpoint.

    Attributes:
        progress: 0 to 1 over the whole training.
        stage: index into the stages.
        stage_start: progress at which this stage began.
        stage_end: progress at which it ends.
        steps: optimiser steps so far.
    """

    progress: float = 0.0
    stage: int = 0
    stage_start: float = 0.0
    stage_end: float = 0.0
    steps: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for a checkpoint."""
        return asdict(self)


class Schedule:
    """Moves a Position along the stages.

    Args:
        stages: the curriculum.
        position: where to go on; a new one starts at 0.
    """

    def __init__(self, stages: tuple[Stage, ...], position: Position) -> None:
        self.stages = stages
        self.position = position
        if position.stage_end == 0:
            position.stage_end = stages[0].share / sum(stage.share for stage in stages)

    @property
    def stage(self) -> Stage:
        """The stage in force."""
        return self.stages[self.position.stage]

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train."""
        return self.position.progress >= 1

    def advance(self, step_seconds: float, seconds_left: float, answer_accuracy: float) -> bool:
        """Count one step.

        Args:
            step_seconds: what it took.
            seconds_left: training time left in the budget after it.
            answer_accuracy: recent share of answer tokens right in the worst family, 0 to 1.

        Returns:
            Whether a new stage begins.
        """
        at = self.position
        at.steps += 1
        left = max(0.0, seconds_left)
        at.progress += (1 - at.progress) * step_seconds / (step_seconds + left)
        if left == 0:
            at.progress = 1.0
        last = at.stage == len(self.stages) - 1
        if last or at.progress < at.stage_end:
            return False
        waiting = answer_accuracy < RETRIEVAL_ACCURACY
        if waiting and at.progress < self.stage.waits_until:
            return False
        self._next_stage()
        return True

    def _next_stage(self) -> None:
        """Begin the next stage; the stages to come share what is left by their shares."""
        at = self.position
        at.stage += 1
        at.stage_start = at.progress
        to_come = sum(stage.share for stage in self.stages[at.stage :])
        at.stage_end = at.progress + (1 - at.progress) * self.stage.share / to_come

    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        at = self.position
        rate = self.stage.learning_rate * min(1.0, (at.steps + 1) / WARMUP_STEPS)
        if at.stage < len(self.stages) - 1:
            return rate
        within = (at.progress - at.stage_start) / max(1e-9, 1 - at.stage_start)
        fallen = max(0.0, within - DECAY_FROM) / (1 - DECAY_FROM)
        return rate * (1 - (1 - FINAL_FACTOR) * min(1.0, fallen))

    def draw_length(self, rng: np.random.Generator) -> int:
        """Draw the sequence length of a micro-batch."""
        lengths, shares = zip(*self.stage.mix.items(), strict=True)
        return int(rng.choice(lengths, p=np.array(shares) / sum(shares)))

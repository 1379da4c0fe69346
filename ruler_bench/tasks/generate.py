"""`generate`: the samples of a task; pure, nothing is kept."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from ruler_bench.tasks.fit import iterate
from ruler_bench.tasks.sample import Sample
from ruler_bench.tasks.spec import DataSpec


def generate(
    spec: DataSpec, num_samples: int, progress: Callable[[str], None] | None = None
) -> list[Sample]:
    """Return the first `num_samples` samples; more samples never change the earlier ones."""
    return list(islice(iterate(spec), num_samples))

"""`generate`: the samples of a task, or the least length that has room for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from ruler_bench.errors import UsageError
from ruler_bench.tasks.fit import DoesNotFitError, iterate
from ruler_bench.tasks.sample import Sample
from ruler_bench.tasks.spec import DataSpec


def generate(
    spec: DataSpec, num_samples: int, progress: Callable[[str], None] | None = None
) -> list[Sample]:
    """Return the first `num_samples` samples; asking for more never changes the earlier ones.

    Nothing is kept between calls.

    Args:
        spec: what decides the data.
        num_samples: how many.
        progress: called with a short line before the first sample and after each.

    Raises:
        UsageError: a sample does not fit; names the least length at which all of them do. Also
            for missing word lists or essays.
    """
    try:
        return list(_reporting(spec, num_samples, progress or (lambda line: None)))
    except DoesNotFitError as error:
        least = _least_length(spec, num_samples, error.totals)
        raise UsageError(
            f"length={spec.length} is too small for {spec.task.name}: the least length for"
            f" num_samples={num_samples} with seed={spec.seed}, template={spec.template} and this"
            f" tokenizer is {least} (of which {spec.task.tokens_to_generate} are kept for the"
            " answer)."
        ) from error


def _reporting(
    spec: DataSpec, num_samples: int, progress: Callable[[str], None]
) -> Iterator[Sample]:
    progress(f"{spec.task.name}: fitting the haystack to {spec.length} tokens")
    for sample in islice(iterate(spec), num_samples):
        yield sample
        progress(f"{spec.task.name}: sample {sample.ordinal + 1} of {num_samples}")


def _least_length(spec: DataSpec, num_samples: int, totals: Sequence[int]) -> int:
    """Return a length that has room for every sample while one token less has not.

    Another length draws other samples, so nothing short of generating them tells.

    Args:
        spec: whose length is too small.
        num_samples: samples that must fit.
        totals: tokens that the draws of the sample which did not fit took, ascending. A length
            at which one draw in ten fits is about enough, and is tried first.
    """
    too_small, step = spec.length, 1
    length = max(too_small + 1, totals[len(totals) // 10])
    while not _fits(spec, length, num_samples):
        too_small, length, step = length, length + step, step * 2
    least, step = length, 1
    while least - too_small > 1:
        length = max(least - step, (too_small + least) // 2)
        if _fits(spec, length, num_samples):
            least, step = length, step * 2
        else:
            too_small = length
    return least


def _fits(spec: DataSpec, length: int, num_samples: int) -> bool:
    samples = iterate(dataclasses.replace(spec, length=length))
    try:
        for _ in islice(samples, num_samples):
            pass
    except DoesNotFitError:
        return False
    return True

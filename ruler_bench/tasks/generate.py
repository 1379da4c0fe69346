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

    Another length draws other samples, so nothing short of generating them tells. A length that is
    too small shows early, one with room only at the last sample; so the search comes from below.

    Args:
        spec: whose length is too small.
        num_samples: samples that must fit.
        totals: tokens that the draws of the sample which did not fit took, ascending.
    """
    too_small = spec.length
    failed: Sequence[int] | None = totals
    while failed is not None:
        length = max(too_small + 1, failed[0])
        failed = _failed(spec, length, num_samples)
        if failed is not None:
            too_small = length
    while length - 1 > too_small and _failed(spec, length - 1, num_samples) is None:
        length -= 1
    return length


def _failed(spec: DataSpec, length: int, num_samples: int) -> Sequence[int] | None:
    """Return the tokens that the sample which does not fit took, ascending; None if all fit."""
    samples = iterate(dataclasses.replace(spec, length=length))
    try:
        for _ in islice(samples, num_samples):
            pass
    except DoesNotFitError as error:
        return error.totals
    return None

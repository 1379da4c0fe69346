"""`generate`: the samples of a task, or the least length that has room for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice

from ruler_bench.errors import UsageError
from ruler_bench.tasks.common_words import CommonWords
from ruler_bench.tasks.counting import PartCounter
from ruler_bench.tasks.documents import load_documents
from ruler_bench.tasks.draw import Draw, Drawer
from ruler_bench.tasks.fit import DoesNotFitError, Fitting, NoTokensError
from ruler_bench.tasks.frequent_words import FrequentWords
from ruler_bench.tasks.niah import Niah
from ruler_bench.tasks.qa import Qa, check_questions
from ruler_bench.tasks.ready_made import read_samples
from ruler_bench.tasks.sample import Sample
from ruler_bench.tasks.spec import (
    CommonWordsTask,
    DataSpec,
    FrequentWordsTask,
    NiahTask,
    QaTask,
    VariableTrackingTask,
)
from ruler_bench.tasks.variable_tracking import VariableTracking


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
            for missing or damaged word lists, essays, questions or ready-made samples, and for
            fewer questions than samples.
    """
    if spec.data is not None:
        return read_samples(spec.data, spec.task, spec.length, num_samples)
    if isinstance(spec.task, QaTask):
        check_questions(load_documents(spec.task.dataset, spec.qa_data), num_samples)
    counter = PartCounter(spec.tokenizer)
    try:
        return list(_reporting(spec, counter, num_samples, progress or (lambda line: None)))
    except NoTokensError as error:
        raise UsageError(
            f"tokenizer {spec.tokenizer.name!r} gives no tokens for the text of {spec.task.name}:"
            " its vocabulary is empty or lacks it; name another tokenizer."
        ) from error
    except DoesNotFitError as error:
        least = _least_length(spec, counter, num_samples, error.totals)
        raise UsageError(
            f"length={spec.length} is too small for {spec.task.name}: the least length for"
            f" num_samples={num_samples} with seed={spec.seed}, template={spec.template} and this"
            f" tokenizer is {least} (of which {spec.task.tokens_to_generate} are kept for the"
            " answer)."
        ) from error


def _samples(spec: DataSpec, counter: PartCounter) -> Iterator[Sample]:
    """Yield the samples of a task without end.

    Raises:
        DoesNotFitError: the next sample does not fit.
        NoTokensError: the tokenizer gives none.
        UsageError: what the samples are made from is missing.
    """
    for ordinal, (draw, length) in enumerate(_draws(spec, counter)):
        yield _sample(spec, counter, ordinal, draw, length)


def _draws(spec: DataSpec, counter: PartCounter) -> Iterator[tuple[Draw, int]]:
    """Yield the prompts that fit, with the tokens that each takes with its generation."""
    if isinstance(spec.task, FrequentWordsTask):
        words = FrequentWords(spec, spec.task, counter)
        size = words.find_size()
        while True:
            yield words.next_draw(size)
    drawer = _drawer(spec, counter)
    fitting = Fitting(drawer, counter, spec.length, spec.task.tokens_to_generate)
    size = fitting.find_size()
    for ordinal in count():
        yield fitting.next_draw(size, ordinal)


def _drawer(spec: DataSpec, counter: PartCounter) -> Drawer:
    match spec.task:
        case NiahTask():
            return Niah(spec, spec.task)
        case VariableTrackingTask():
            return VariableTracking(spec, spec.task, counter)
        case CommonWordsTask():
            return CommonWords(spec, spec.task)
        case QaTask():
            return Qa(spec, spec.task)
    raise AssertionError(f"no generator for {spec.task.kind}")


def _sample(spec: DataSpec, counter: PartCounter, ordinal: int, draw: Draw, length: int) -> Sample:
    prompt = "".join(draw.parts)
    text = prompt.removesuffix(draw.answer_prefix)
    answer = None if draw.depth is None else text.find(draw.answers[0])
    return Sample(
        task=spec.task.name,
        ordinal=ordinal,
        input=text,
        answer_prefix=draw.answer_prefix,
        outputs=draw.answers,
        length=length,
        tokens_to_generate=spec.task.tokens_to_generate,
        depth=draw.depth,
        answer_offset=answer,
        answer_token_position=(
            None if answer is None else counter.count_before(draw.parts, answer)
        ),
    )


def _reporting(
    spec: DataSpec, counter: PartCounter, num_samples: int, progress: Callable[[str], None]
) -> Iterator[Sample]:
    progress(f"{spec.task.name}: fitting the prompts to {spec.length} tokens")
    for sample in islice(_samples(spec, counter), num_samples):
        yield sample
        progress(f"{spec.task.name}: sample {sample.ordinal + 1} of {num_samples}")


def _least_length(
    spec: DataSpec, counter: PartCounter, num_samples: int, totals: Sequence[int]
) -> int:
    """Return a length that has room for every sample while one token less has not.

    Another length draws other samples, so nothing short of drawing them tells. A length that is
    too small shows early, one with room only at the last sample; so the search comes from below.

    Args:
        spec: whose length is too small.
        counter: counts for every length, since they draw much of the same text.
        num_samples: samples that must fit.
        totals: tokens that the draws of the sample which did not fit took, ascending.
    """
    too_small = spec.length
    failed: Sequence[int] | None = totals
    while failed is not None:
        length = max(too_small + 1, failed[0])
        failed = _failed(spec, counter, length, num_samples)
        if failed is not None:
            too_small = length
    while length - 1 > too_small and _failed(spec, counter, length - 1, num_samples) is None:
        length -= 1
    return length


def _failed(
    spec: DataSpec, counter: PartCounter, length: int, num_samples: int
) -> Sequence[int] | None:
    """Return the tokens that the sample which does not fit took, ascending; None if all fit."""
    draws = _draws(dataclasses.replace(spec, length=length), counter)
    try:
        for _ in islice(draws, num_samples):
            pass
    except DoesNotFitError as error:
        return error.totals
    return None

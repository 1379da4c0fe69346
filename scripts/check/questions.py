"""Real samples for the checks, whole or cut to any number of tokens, from the prepared data."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from ruler_bench.config import config_dir, task_spec
from ruler_bench.errors import UsageError, unknown_name
from ruler_bench.folders import cache_dir
from ruler_bench.tasks import DataSpec, Question, Sample, TaskSpec, load_questions
from ruler_bench.tokenizer import Tokenizer, load_tokenizer

TASKS = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
)
CUT_TASKS = ("niah_single_1", "niah_multikey_2", "niah_single_2")
"""What prompts of any length are cut from: one repeated line, lines of needles, essays."""
CUT_SAMPLES = 4
LEAST_CUT_LENGTH = 1024
"""At which each of them has room for its needles."""


@dataclass(frozen=True)
class Batch:
    """The first samples of a task at one length."""

    task: str
    length: int
    samples: int


@dataclass(frozen=True)
class Source:
    """Where samples come from, apart from task, length and number."""

    model: Path
    seed: int


def load_task(name: str) -> TaskSpec:
    """Return a task of configs/task.

    Raises:
        UsageError: there is none of that name.
    """
    folder = config_dir() / "task"
    names = [path.stem for path in folder.glob("*.yaml")]
    if name not in names:
        raise unknown_name("task", name, names)
    return task_spec(OmegaConf.create({"task": OmegaConf.load(folder / f"{name}.yaml")}))


def load_batch(source: Source, batch: Batch) -> list[Question]:
    """Return the samples of one batch, prepared now or before.

    Raises:
        UsageError: they cannot be made at that length.
    """
    tokenizer = load_tokenizer(str(source.model))
    spec = DataSpec(load_task(batch.task), batch.length, source.seed, "base", tokenizer)
    return load_questions(spec, tokenizer, batch.samples, cache_dir())


def prepare(source: Source, batches: Sequence[Batch], processes: int) -> None:
    """Prepare batches beforehand, so many at a time."""
    if processes == 1 or len(batches) <= 1:
        for batch in batches:
            load_batch(source, batch)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for done in [pool.submit(load_batch, source, batch) for batch in batches]:
            done.result()


def cut_batches(longest_tokens: int) -> list[Batch]:
    """Return what prompts of up to so many tokens are cut from."""
    length = max(longest_tokens, LEAST_CUT_LENGTH)
    return [Batch(task, length, CUT_SAMPLES) for task in CUT_TASKS]


class Cutter:
    """Cuts prompts of any length from real ones.

    Those of one task follow each other, so that a cut may be longer than one prompt.

    Args:
        source: where samples come from.
        longest_tokens: the longest cut.

    Raises:
        UsageError: the samples cannot be made.
    """

    def __init__(self, source: Source, longest_tokens: int) -> None:
        self._tokenizer: Tokenizer = load_tokenizer(str(source.model))
        self._texts: list[tuple[str, tuple[int, ...]]] = []
        for batch in cut_batches(longest_tokens):
            questions = load_batch(source, batch)
            ids = tuple(one for question in questions for one in question.prompt_token_ids)
            if len(ids) < longest_tokens:
                raise UsageError(
                    f"{batch.task} at {batch.length} tokens: {len(questions)} prompts have "
                    f"{len(ids)} tokens, too few to cut {longest_tokens} from."
                )
            self._texts.append((batch.task, ids))

    def cut(self, ordinal: int, tokens: int, new_tokens: int, place: float) -> Question:
        """Return a prompt of so many tokens, from the task that its number gives.

        Args:
            ordinal: number of the request.
            tokens: of the prompt.
            new_tokens: that are generated.
            place: 0 cuts from the start, 1 up to the end.
        """
        task, ids = self._texts[ordinal % len(self._texts)]
        start = round(place * (len(ids) - tokens))
        cut = ids[start : start + tokens]
        sample = Sample(
            task=task,
            ordinal=ordinal,
            input=self._tokenizer.decode(list(cut)),
            answer_prefix="",
            outputs=(),
            length=tokens + new_tokens,
            tokens_to_generate=new_tokens,
        )
        return Question(sample, cut)

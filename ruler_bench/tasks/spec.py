"""What decides the data of a task: a TaskSpec (its parameters) and DataSpec (all the rest)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ruler_bench.errors import UsageError, unknown_name
from ruler_bench.tasks import documents, long_words, ready_made
from ruler_bench.tasks.essays import essays_fingerprint
from ruler_bench.tasks.template import ModelTemplate, load_template
from ruler_bench.tasks.words import pool_fingerprint, words_fingerprint
from ruler_bench.tokenizer import Tokenizer

GENERATOR_VERSION = 1
"""Raised with every change that gives other samples for the same settings."""

MAX_SEED = 2**32 - 1

HAYSTACKS = ("noise", "essay", "needle")
NEEDLE_TYPES = ("words", "numbers", "uuids")
METRICS = ("all", "part")
NUM_DEPTHS = 40
"""Places for needles in an essay (RULER's DEPTHS); no two needles share one."""
MAX_LINE_NEEDLES = 5
"""Needles, or links of a chain, that the smallest haystack of lines has distinct places for."""
LETTERS = 26


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """The parameters of a task, one file of configs/task. Each kind has a class of its own.

    Attributes:
        name: of the task, such as niah_single_1.
        kind: which generator makes it; what RULER calls the task.
        tokens_to_generate: tokens kept free for the answer, and the generation limit.
        metric: "all" scores the share of the answers found, "part" whether any was.

    Raises:
        UsageError: a value is not allowed.
    """

    name: str
    kind: str
    tokens_to_generate: int
    metric: str

    KIND: ClassVar[str]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UsageError(f"task.name={self.name}: must be a name.")
        _check_choice("kind", self.kind, [self.KIND])
        _check_choice("metric", self.metric, METRICS)
        self._check_counts("tokens_to_generate")

    def _check_counts(self, *keys: str) -> None:
        for key in keys:
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"task.{key}={value}: must be an integer of at least 1.")

    def sources(self) -> dict[str, Any]:
        """Return what else decides the samples: the word lists and essays they are made from.

        Raises:
            UsageError: one is missing, or of another version.
        """
        return {}


@dataclass(frozen=True, kw_only=True)
class NiahTask(TaskSpec):
    """Needles in a haystack.

    Attributes:
        haystack: "noise" (one repeated line), "essay" or "needle" (other needles).
        key_type, value_type: "words", "numbers" or "uuids".
        num_keys: keys hidden.
        num_values: values for each key.
        num_queries: keys asked for.
    """

    KIND = "niah"

    haystack: str
    key_type: str
    value_type: str
    num_keys: int
    num_values: int
    num_queries: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choice("haystack", self.haystack, HAYSTACKS)
        _check_choice("key_type", self.key_type, NEEDLE_TYPES)
        _check_choice("value_type", self.value_type, NEEDLE_TYPES)
        self._check_counts("num_keys", "num_values", "num_queries")
        if self.num_queries > self.num_keys:
            raise UsageError(
                f"task.num_queries={self.num_queries}: at most task.num_keys={self.num_keys} keys"
                " can be asked for; raise task.num_keys."
            )
        places = NUM_DEPTHS if self.haystack == "essay" else MAX_LINE_NEEDLES
        if self.num_keys * self.num_values > places:
            raise UsageError(
                f"task.num_keys={self.num_keys} times task.num_values={self.num_values}:"
                f" a haystack of {self.haystack} has places for at most {places} needles."
            )

    def sources(self) -> dict[str, Any]:
        """Return the version of the words and of the essays, as far as they are used."""
        found: dict[str, Any] = {}
        if "words" in (self.key_type, self.value_type):
            found["words"] = words_fingerprint()
        if self.haystack == "essay":
            found["essays"] = essays_fingerprint()
        return found


@dataclass(frozen=True, kw_only=True)
class VariableTrackingTask(TaskSpec):
    """Chains of assignments among repeated lines; all variables of the first are asked for.

    Attributes:
        num_chains: chains hidden.
        num_hops: assignments of each after its first.
    """

    KIND = "variable_tracking"

    num_chains: int
    num_hops: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_counts("num_chains", "num_hops")
        if self.num_hops >= MAX_LINE_NEEDLES:
            raise UsageError(
                f"task.num_hops={self.num_hops}: the smallest haystack has places for at most"
                f" {MAX_LINE_NEEDLES - 1} hops."
            )


@dataclass(frozen=True, kw_only=True)
class CommonWordsTask(TaskSpec):
    """A numbered list of words, some of which stand more often.

    Attributes:
        freq_cw, freq_ucw: how often the common and the other words stand, at a length of 4096 or
            more; below it RULER takes 6 and 1.
        num_cw: common words.
    """

    KIND = "common_words_extraction"

    freq_cw: int
    freq_ucw: int
    num_cw: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_counts("freq_cw", "freq_ucw", "num_cw")

    def sources(self) -> dict[str, Any]:
        """Return the version of both lists of words. The second is known without being there."""
        return {"words": pool_fingerprint(), "more_words": long_words.fingerprint()}


@dataclass(frozen=True, kw_only=True)
class FrequentWordsTask(TaskSpec):
    """Made-up words whose counts follow a zeta distribution.

    Attributes:
        alpha: of the distribution, above 1.
        coded_wordlen: letters of a word.
        vocab_size: words to draw from; -1 for one in 50 tokens.
    """

    KIND = "freq_words_extraction"

    alpha: float
    coded_wordlen: int
    vocab_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float):
            raise UsageError(f"task.alpha={self.alpha}: must be a number above 1.")
        if not 1 < self.alpha < float("inf"):
            raise UsageError(f"task.alpha={self.alpha}: out of range; must be above 1.")
        self._check_counts("coded_wordlen")
        if self.vocab_size == -1 and not isinstance(self.vocab_size, bool):
            return
        self._check_counts("vocab_size")
        if self.vocab_size > LETTERS**self.coded_wordlen:
            raise UsageError(
                f"task.vocab_size={self.vocab_size}: there are only"
                f" {LETTERS**self.coded_wordlen} words of task.coded_wordlen={self.coded_wordlen}"
                " letters."
            )


@dataclass(frozen=True, kw_only=True)
class QaTask(TaskSpec):
    """Questions over documents.

    Attributes:
        dataset: "squad" or "hotpotqa".
    """

    KIND = "qa"

    dataset: str

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choice("dataset", self.dataset, documents.DATASETS)


TASK_KINDS: dict[str, type[TaskSpec]] = {
    one.KIND: one
    for one in (NiahTask, VariableTrackingTask, CommonWordsTask, FrequentWordsTask, QaTask)
}


def make_task(values: Mapping[str, Any]) -> TaskSpec:
    """Return the task that a file of configs/task describes.

    Raises:
        UsageError: a key is unknown or missing, or a value is not allowed.
    """
    if "kind" not in values:
        raise UsageError("task.kind is missing: a task needs it.")
    kind = values["kind"]
    _check_choice("kind", kind, TASK_KINDS)
    names = [one.name for one in dataclasses.fields(TASK_KINDS[kind])]
    for key in values:
        if key not in names:
            raise unknown_name("key", f"task.{key}", [f"task.{name}" for name in names])
    for name in names:
        if name not in values:
            raise UsageError(f"task.{name} is missing: a task needs it.")
    return TASK_KINDS[kind](**values)


def _check_choice(key: str, value: Any, allowed: Iterable[str]) -> None:
    allowed = list(allowed)
    if not isinstance(value, str) or value not in allowed:
        raise unknown_name(f"task.{key}", str(value), allowed)


@dataclass(frozen=True)
class DataSpec:
    """Everything that decides the samples of a task, their number apart.

    Attributes:
        task: parameters of the task.
        length: tokens of prompt and generation together, as RULER counts.
        seed: of the random stream, 0 to 4294967295.
        template: "base", "chat", or a name of the reference's model templates.
        tokenizer: what counts the tokens.
        qa_data: folder with squad.json and hotpotqa.json; None for the one that
            scripts/fetch_data.py fills.
        data: folder of ready-made samples, `<task>/validation.jsonl`; None to make them. With it
            seed, template and tokenizer decide nothing.

    Raises:
        UsageError: length, seed or template is not allowed.
    """

    task: TaskSpec
    length: int
    seed: int
    template: str
    tokenizer: Tokenizer
    qa_data: Path | None = None
    data: Path | None = None

    def __post_init__(self) -> None:
        if isinstance(self.length, bool) or not isinstance(self.length, int) or self.length < 1:
            raise UsageError(f"length={self.length}: must be an integer of at least 1.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise UsageError(f"seed={self.seed}: must be an integer.")
        if not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"seed={self.seed}: out of range; must be 0 to {MAX_SEED}.")
        self.model_template()

    def model_template(self) -> ModelTemplate:
        """Return the text around the task's own template."""
        return load_template(self.template, self.tokenizer)

    def describe(self) -> dict[str, Any]:
        """Return what decides the data as plain JSON values, without paths.

        Raises:
            UsageError: the word lists, essays or files that the task needs are missing or of
                another version.
        """
        task = dataclasses.asdict(self.task)
        if self.data is not None:
            file_hash = ready_made.fingerprint(self.data, self.task.name)
            return {"task": task, "length": self.length, "ready_made_sha256": file_hash}
        parts: dict[str, Any] = {
            "generator_version": GENERATOR_VERSION,
            "task": task,
            "length": self.length,
            "seed": self.seed,
            "template": {"name": self.template, "text": self.model_template().text},
            "tokenizer_sha256": self.tokenizer.fingerprint,
            **self.task.sources(),
        }
        if isinstance(self.task, QaTask):
            parts["documents"] = documents.fingerprint(self.task.dataset, self.qa_data)
        return parts

    def fingerprint(self) -> str:
        """Return the hash of `describe()`."""
        text = json.dumps(self.describe(), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

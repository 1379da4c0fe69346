"""What decides the data of a task: TaskSpec (its parameters) and DataSpec (all the rest)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ruler_bench.errors import UsageError, unknown_name
from ruler_bench.tasks.essays import essays_fingerprint
from ruler_bench.tasks.template import ModelTemplate, load_template
from ruler_bench.tasks.words import words_fingerprint
from ruler_bench.tokenizer import Tokenizer

GENERATOR_VERSION = 1
"""Raised with every change that gives other samples for the same settings."""

MAX_SEED = 2**32 - 1

KINDS = ("niah",)
HAYSTACKS = ("noise", "essay", "needle")
NEEDLE_TYPES = ("words", "numbers", "uuids")
METRICS = ("all", "part")
NUM_DEPTHS = 40
"""Places for needles in an essay (RULER's DEPTHS); no two needles share one."""
MAX_LINE_NEEDLES = 5
"""Needles that the smallest haystack of lines has distinct places for."""


@dataclass(frozen=True)
class TaskSpec:
    """The parameters of a task, one file of configs/task.

    Attributes:
        name: of the task, such as niah_single_1.
        kind: which generator makes it; "niah" hides needles in a haystack.
        haystack: "noise" (one repeated line), "essay" or "needle" (other needles).
        key_type, value_type: "words", "numbers" or "uuids".
        num_keys: keys hidden.
        num_values: values for each key.
        num_queries: keys asked for.
        tokens_to_generate: tokens kept free for the answer, and the generation limit.
        metric: "all" scores the share of the answers found, "part" whether any was.

    Raises:
        UsageError: a value is not allowed.
    """

    name: str
    kind: str
    haystack: str
    key_type: str
    value_type: str
    num_keys: int
    num_values: int
    num_queries: int
    tokens_to_generate: int
    metric: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UsageError(f"task.name={self.name}: must be a name.")
        _check_choice("kind", self.kind, KINDS)
        _check_choice("haystack", self.haystack, HAYSTACKS)
        _check_choice("key_type", self.key_type, NEEDLE_TYPES)
        _check_choice("value_type", self.value_type, NEEDLE_TYPES)
        _check_choice("metric", self.metric, METRICS)
        for key in ("num_keys", "num_values", "num_queries", "tokens_to_generate"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"task.{key}={value}: must be an integer of at least 1.")
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


def _check_choice(key: str, value: Any, allowed: Iterable[str]) -> None:
    if value not in allowed:
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

    Raises:
        UsageError: length, seed or template is not allowed.
    """

    task: TaskSpec
    length: int
    seed: int
    template: str
    tokenizer: Tokenizer

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
            UsageError: the word lists or essays that the task needs are missing or of another
                version.
        """
        parts: dict[str, Any] = {
            "generator_version": GENERATOR_VERSION,
            "task": dataclasses.asdict(self.task),
            "length": self.length,
            "seed": self.seed,
            "template": {"name": self.template, "text": self.model_template().text},
            "tokenizer_sha256": self.tokenizer.fingerprint,
        }
        if "words" in (self.task.key_type, self.task.value_type):
            parts["words"] = words_fingerprint()
        if self.task.haystack == "essay":
            parts["essays"] = essays_fingerprint()
        return parts

    def fingerprint(self) -> str:
        """Return the hash of `describe()`."""
        text = json.dumps(self.describe(), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

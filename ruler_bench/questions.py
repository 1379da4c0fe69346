"""Questions of a run by step: the samples, and the prompts that only some arms ask."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ruler_bench.errors import UsageError
from ruler_bench.other_question import other_question
from ruler_bench.streams import AGING, AGING_ORDINALS, CUT, HALF, OTHER, QUARTER, SAMPLE, Step
from ruler_bench.tasks import DataSpec, Question, Sample, load_questions
from ruler_bench.tasks.spec import MAX_SEED
from ruler_bench.tokenizer import Tokenizer

CUT_PLACES = (0.5, 0.3, 0.7, 0.15, 0.85, 0.05)
DERIVED = (CUT, OTHER)
"""Sources whose prompts are made from the run's own samples."""
PARTS = {HALF: (2,), QUARTER: (4, 2)}
"""What the length is divided by; a task that a quarter has no room for is asked at half."""
KEPT_AROUND_ANSWER = 120
"""Characters on each side of an answer that must survive a cut for it to be asked for."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question as one step asks it.

    Attributes:
        question: sample and tokens.
        length: tokens of prompt and generation together that its prompt was made for.
        scored: whether the expected answers are known and the answer is held against them.
    """

    question: Question
    length: int
    scored: bool


class Questions:
    """Makes and keeps the questions that steps name."""

    def __init__(self, data: DataSpec, encoder: Tokenizer, cache: Path) -> None:
        self._data = data
        self._encoder = encoder
        self._cache = cache
        self._loaded: dict[str, list[Question]] = {}
        self._lengths: dict[str, int] = {}
        self._derived: dict[Step, Asked] = {}

    def load(self, steps: Iterable[Step]) -> None:
        """Make everything that these steps ask.

        Raises:
            UsageError: a length or the task does not allow it.
        """
        needed: dict[str, int] = {}
        for step in steps:
            source, number = _place(step)
            needed[source] = max(needed.get(source, 0), number + 1)
        for source, count in needed.items():
            if len(self._loaded.get(source, ())) < count:
                self._loaded[source] = self._make(source, count)

    def _make(self, source: str, count: int) -> list[Question]:
        data = self._data
        if data.data is not None and source != SAMPLE:
            raise UsageError(
                f"data={data.data}: the arms aged and length_mix ask prompts of another seed or "
                "length, and ready-made samples have none; leave them out."
            )
        if source == AGING:
            data = replace(data, seed=(data.seed + 1) % (MAX_SEED + 1))
        for part in PARTS.get(source, (1,)):
            data = replace(data, length=self._data.length // part)
            self._lengths[source] = data.length
            try:
                return load_questions(data, self._encoder, count, self._cache)
            except UsageError as error:
                if part == 1:
                    raise
                refused = error
        raise UsageError(
            f"arm length_mix: length={self._data.length} leaves no room for prompts of half of it "
            f"({refused}); use a larger length, or leave the arm out."
        ) from refused

    def fits(self, length: int) -> bool:
        """Tell whether the task has room for a sample of another length."""
        data = replace(self._data, length=length)
        try:
            load_questions(data, self._encoder, 1, self._cache)
        except UsageError:
            return False
        return True

    def samples(self) -> list[Sample]:
        """Return the samples of the run, from ordinal 0."""
        return [one.sample for one in self._loaded.get(SAMPLE, [])]

    def knows(self, step: Step) -> bool:
        """Tell whether a step's question was made."""
        source, number = _place(step)
        return number < len(self._loaded.get(source, ()))

    def asked(self, step: Step) -> Asked:
        """Return the question of a step."""
        source, number = _place(step)
        question = self._loaded[source][number]
        if step.source not in DERIVED:
            return Asked(question, self._lengths[source], step.scored)
        if step not in self._derived:
            self._derived[step] = self._derive(question, step)
        return self._derived[step]

    def _derive(self, question: Question, step: Step) -> Asked:
        """Return what a step makes of a sample of the run."""
        if step.source == OTHER:
            other = other_question(question, self._encoder)
            return Asked(other, self._lengths[SAMPLE], step.scored)
        tokens = cut_tokens(len(question.prompt_token_ids), step)
        shorter, is_whole = cut(question, tokens, self._encoder)
        return Asked(shorter, shorter.tokens, step.scored and is_whole)


def _place(step: Step) -> tuple[str, int]:
    if step.source == AGING:
        return AGING, step.ordinal - AGING_ORDINALS
    return SAMPLE if step.source in DERIVED else step.source, step.ordinal


def cut_tokens(prompt_tokens: int, step: Step) -> int:
    """Return the prompt length that a CUT step asks for.

    Raises:
        UsageError: the prompt is not longer than one unit.
    """
    whole = (prompt_tokens - 1) // step.unit_tokens * step.unit_tokens
    if whole < max(2, step.unit_tokens):
        raise UsageError(
            f"arm boundary: the prompt of ordinal {step.ordinal} has {prompt_tokens} tokens, which "
            f"is not longer than one block or chunk of {step.unit_tokens}; use a larger length, "
            "smaller ones, or leave the arm out."
        )
    avoided = step.avoided_tokens
    if avoided and whole % avoided == 0 and whole > max(2, step.unit_tokens):
        whole -= step.unit_tokens
    return whole + step.beyond_tokens


def cut(question: Question, tokens: int, encoder: Tokenizer) -> tuple[Question, bool]:
    """Return a question cut to so many prompt tokens, and whether its answers are still in it.

    The cut is made inside the context, so that what comes before and after it stays. Of several
    places the first is taken that leaves the surroundings of every answer whole; where none does,
    the expected answers are not known any more. Engines that take text get the tokens' text.
    """
    ids, sample = question.prompt_token_ids, question.sample
    surroundings = _surroundings(sample)
    made: list[tuple[Question, bool]] = []
    for share in CUT_PLACES:
        start = int(share * tokens)
        kept = (*ids[:start], *ids[start + len(ids) - tokens :])
        text = encoder.decode(list(kept))
        whole = bool(surroundings) and all(one in text for one in surroundings)
        shorter = replace(
            sample,
            input=text,
            answer_prefix="",
            length=tokens + sample.tokens_to_generate,
            depth=None,
            answer_offset=None,
            answer_token_position=None,
        )
        made.append((Question(shorter, kept), whole))
        if whole:
            break
    return next((one for one in made if one[1]), made[0])


def _surroundings(sample: Sample) -> list[str]:
    """Return the text around each answer where it stands in the context, and the question."""
    found = [sample.prompt[-KEPT_AROUND_ANSWER:]]
    for answer in sample.outputs:
        place = sample.input.find(answer)
        if place < 0:
            return []
        found.append(sample.input[max(0, place - KEPT_AROUND_ANSWER) : place + len(answer) + 1])
    return found

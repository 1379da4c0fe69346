"""Another question on the same context: what the arm two_questions asks first.

Both prompts are alike up to the question, so that an engine with a prefix cache answers the second
from what the first left.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace

from ruler_bench.errors import UsageError
from ruler_bench.tasks import Question, Sample
from ruler_bench.tasks.wording import NEEDLE
from ruler_bench.tokenizer import Tokenizer

_FIELDS = {"type_needle_v": r"\w+", "key": r"(?P<key>[^:\n]+?)", "value": r"(?P<value>[^.\n]+)"}
_NEEDLE = re.compile(
    re.sub(r"\\{(\w+)\\}", lambda match: _FIELDS[match[1]], re.escape(NEEDLE)),
)
_ASKED = re.compile(r" for (?P<key>\S+) mentioned in the provided text is$")


def other_question(question: Question, encoder: Tokenizer) -> Question:
    """Return the question for a needle of the context that the sample does not ask for.

    Which one is drawn, by a hash of the prompt: a model that errs may well prefer the first, and
    what a cache left behind is told from an error by how often one hits the other
    (`ruler_bench.leak.stale_question`).

    Raises:
        UsageError: the task asks for several needles at a time, or its context has but one.
    """
    sample = question.sample
    asked = _ASKED.search(sample.answer_prefix)
    if asked is None:
        raise _cannot(sample, "does not ask for one needle")
    key = asked["key"]
    others = [one for one in _NEEDLE.finditer(sample.input) if one["key"] != key]
    if not others:
        raise _cannot(sample, "hides one needle alone")
    digest = hashlib.sha256(sample.prompt.encode()).digest()
    other = others[int.from_bytes(digest) % len(others)]
    before, _, after = sample.input.rpartition(f" for {key} mentioned")
    made = replace(
        sample,
        input=f"{before} for {other['key']} mentioned{after}",
        answer_prefix=sample.answer_prefix.replace(f" for {key} ", f" for {other['key']} "),
        outputs=(other["value"],),
        depth=None,
        answer_offset=None,
        answer_token_position=None,
    )
    ids = tuple(encoder.encode_prompt(made.prompt))
    more = len(ids) - len(question.prompt_token_ids)
    return Question(replace(made, length=sample.length + more), ids)


def _cannot(sample: Sample, why: str) -> UsageError:
    return UsageError(
        f"arm two_questions: the task {sample.task} {why}; use niah_multikey_1 to "
        "niah_multikey_3, or leave the arm out."
    )

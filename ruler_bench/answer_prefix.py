"""Whether prompts end with the words that the answer continues, once.

RULER's scores are those of a model that continues `input + answer_prefix`. Tools that leave the
prefix out, or send it twice, get other scores without an error
(https://github.com/NVIDIA/RULER/pull/108). Samples that we make end with it; ready-made ones may
have it in `input` or beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from string import Formatter

from ruler_bench.errors import UsageError
from ruler_bench.tasks import Sample, TaskSpec, wording
from ruler_bench.tasks.template import singular

PREFIXES = {
    "niah": (wording.NIAH_ANSWER_PREFIX, singular(wording.NIAH_ANSWER_PREFIX)),
    "variable_tracking": (wording.VARIABLE_TRACKING_ANSWER_PREFIX,),
    "common_words_extraction": (wording.COMMON_WORDS_ANSWER_PREFIX,),
    "freq_words_extraction": (wording.FREQUENT_WORDS_ANSWER_PREFIX,),
    "qa": (wording.QA_ANSWER_PREFIX,),
}
LONGEST_PREFIX = 1000
"""Characters; keys and values stand in some."""
SHOWN = 40


def check_answer_prefix(samples: Iterable[Sample], task: TaskSpec) -> None:
    """Check that each prompt ends with the answer prefix, once.

    Raises:
        UsageError: names the ordinal, what the prompt ends with, and what is wanted.
    """
    wanted = re.compile("|".join(f"(?:{_pattern(one)})" for one in PREFIXES[task.kind]), re.DOTALL)
    for sample in samples:
        prefix = sample.answer_prefix
        where = f"{sample.task}, ordinal {sample.ordinal}"
        if prefix.strip() and sample.input.rstrip().endswith(prefix.strip()):
            raise UsageError(
                f"{where}: the answer prefix stands at the end of input, too, and would be sent "
                f'twice ({prefix[-SHOWN:]!r}); where input has it, write "answer_prefix": "".'
            )
        if not prefix and not wanted.search(sample.prompt[-LONGEST_PREFIX:]):
            raise UsageError(
                f"{where}: the prompt does not end with the answer prefix (it ends with "
                f"{sample.prompt[-SHOWN:]!r}); add it as answer_prefix, such as "
                f"{PREFIXES[task.kind][0]!r}."
            )


def _pattern(prefix: str) -> str:
    parts = Formatter().parse(prefix)
    return "".join(re.escape(text) + (".+?" if name else "") for text, name, _, _ in parts) + r"\Z"

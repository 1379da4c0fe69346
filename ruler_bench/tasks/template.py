"""Prompt templates: the task's words within a model's, around a context and a question."""

from __future__ import annotations

from dataclasses import dataclass

from ruler_bench.errors import UsageError, unknown_name
from ruler_bench.tasks import wording
from ruler_bench.tokenizer import Tokenizer

CHAT = "chat"
TEMPLATES = (CHAT, *wording.MODEL_TEMPLATES)

_USER = "USER MESSAGE"
"""Stands for the user's message while a chat template is rendered."""


@dataclass(frozen=True)
class ModelTemplate:
    """What a model's template puts before and after the task's own words.

    Attributes:
        before, after: literal text.
        is_task_wording: whether RULER's singular forms apply to it too. They do to its own
            templates ("You is a helpful assistant"), and not to a tokenizer's chat template.
    """

    before: str
    after: str
    is_task_wording: bool

    @property
    def text(self) -> str:
        """The whole template, with a placeholder for the task's."""
        return self.before + wording.TASK + self.after


def load_template(name: str, tokenizer: Tokenizer) -> ModelTemplate:
    """Return a model template by name.

    Raises:
        UsageError: no such name; or "chat" with a tokenizer without a usable chat template.
    """
    if name == CHAT:
        text = tokenizer.chat_prompt(_USER)
        if text.count(_USER) != 1:
            raise UsageError(
                f"template=chat: the chat template of {tokenizer.name!r} does not print the user's"
                " message exactly once; use template=base."
            )
        before, _, after = text.partition(_USER)
        return ModelTemplate(before, after, is_task_wording=False)
    if name not in wording.MODEL_TEMPLATES:
        raise unknown_name("template", name, TEMPLATES)
    before, _, after = wording.MODEL_TEMPLATES[name].partition(wording.TASK)
    return ModelTemplate(before, after, is_task_wording=True)


def singular(text: str) -> str:
    """Return RULER's wording for one value; also turns other words that hold "are"."""
    for plural, single in wording.SINGULAR:
        text = text.replace(plural, single)
    return text

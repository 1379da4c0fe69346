"""Rendering a tokenizer's own chat template, without transformers."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ruler_bench.errors import UsageError, one_line

TEMPLATE_DATE = datetime(2024, 7, 26)
"""What a template gets that asks for today: prompts must not change from day to day. The date is
the one that Llama 3.1's template falls back to."""


class _GenerationBlocks(Extension):
    """Accepts `{% generation %}`, which marks the answer for training and prints its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render_chat(name: str, template: str, user: str, special_tokens: dict[str, str]) -> str:
    """Return one user turn in a chat template, with the header of the answer.

    Args:
        name: of the tokenizer, for messages.
        template: Jinja source, as Hugging Face tokenizers carry it.
        user: the user's message.
        special_tokens: text of bos_token, eos_token and so on.

    Raises:
        UsageError: the template is wrong, fails, or refuses the message.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlocks],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
    try:
        return environment.from_string(template).render(
            messages=[{"role": "user", "content": user}],
            add_generation_prompt=True,
            tools=None,
            documents=None,
            **special_tokens,
        )
    except Exception as error:  # a template is a program, which may fail like any other
        kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        raise UsageError(
            f"template=chat: the chat template of {name!r} cannot be used: "
            f"{kind}{one_line(error)}; correct it, or use template=base."
        ) from error


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which a prompt must not be."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )

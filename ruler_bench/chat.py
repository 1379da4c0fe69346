"""Rendering a tokenizer's own chat template, without transformers."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ruler_bench.errors import UsageError, one_line
from ruler_bench.tokenizer import PLAIN, Chat

TEMPLATE_DATE = datetime(2024, 7, 26)
"""What a template gets that asks for today: prompts must not change from day to day. The date is
the one that Llama 3.1's template falls back to."""


THINKING = "enable_thinking"
"""How templates of models that can think call the switch for it."""


class _GenerationBlocks(Extension):
    """Accepts `{% generation %}`, which marks the answer for training and prints its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render_chat(
    name: str, template: str, user: str, special_tokens: dict[str, str], chat: Chat = PLAIN
) -> str:
    """Return one user turn in a chat template, with the header of the answer.

    Args:
        name: of the tokenizer, for messages.
        template: Jinja source, as Hugging Face tokenizers carry it.
        user: the user's message.
        special_tokens: text of bos_token, eos_token and so on.
        chat: a system message and the switch for thinking, as far as they are given.

    Raises:
        UsageError: the template is wrong, fails, refuses or drops a message, or has no switch for
            thinking.
    """
    _check_thinking(name, template, chat)
    turn = [{"role": "user", "content": user}]
    if chat.system is None:
        return _checked(name, template, turn, special_tokens, chat)
    if user in chat.system:
        raise UsageError(f"system: must not hold {user!r}, which is the user's message.")
    try:
        text = _render(
            template, [{"role": "system", "content": chat.system}, *turn], special_tokens, chat
        )
    except Exception as error:  # see _checked
        _checked(name, template, turn, special_tokens, chat)  # it may be wrong altogether
        raise UsageError(
            f"system: the chat template of {name!r} takes no system message ({_reason(error)}); "
            "leave system out."
        ) from error
    if chat.system.strip() not in text:
        raise UsageError(
            f"system: the chat template of {name!r} does not print the system message; leave "
            "system out."
        )
    return text


def _check_thinking(name: str, template: str, chat: Chat) -> None:
    """Refuse a switch that the template does not read: it would be dropped in silence.

    Raises:
        UsageError: it does not.
    """
    if chat.thinking is None:
        return
    try:
        names = meta.find_undeclared_variables(_environment().parse(template))
    except jinja2.TemplateError:
        return  # rendering says what is wrong
    if THINKING not in names:
        raise UsageError(
            f"thinking={str(chat.thinking).lower()}: the chat template of {name!r} has no "
            f"{THINKING} to set; leave thinking out."
        )


def _checked(
    name: str,
    template: str,
    messages: list[dict[str, str]],
    special_tokens: dict[str, str],
    chat: Chat,
) -> str:
    try:
        return _render(template, messages, special_tokens, chat)
    except Exception as error:  # a template is a program, which may fail like any other
        raise UsageError(
            f"template=chat: the chat template of {name!r} cannot be used: {_reason(error)}; "
            "correct it, or use template=base."
        ) from error


def _render(
    template: str, messages: list[dict[str, str]], special_tokens: dict[str, str], chat: Chat
) -> str:
    switches = {} if chat.thinking is None else {THINKING: chat.thinking}
    return (
        _environment()
        .from_string(template)
        .render(
            messages=messages,
            add_generation_prompt=True,
            tools=None,
            documents=None,
            **special_tokens,
            **switches,
        )
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlocks],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
    return environment


def _reason(error: Exception) -> str:
    kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
    return f"{kind}{one_line(error)}"


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

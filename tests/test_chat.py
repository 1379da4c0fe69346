"""Chat templates as they come, rendered as transformers renders them."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from ruler_bench.chat import render_chat
from ruler_bench.errors import UsageError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message.content"
        " + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "bos and whitespace control": (
        "{{- bos_token }}\n{%- for message in messages %}\n"
        "    {%- if message.role == 'user' %}\n        {{- '[INST] ' + message.content | trim"
        " + ' [/INST]' }}\n    {%- else %}\n        {{- message.content + eos_token }}\n"
        "    {%- endif %}\n{%- endfor %}"
    ),
    "lines": "{% if tools %}\nx\n{% endif %}\n  {% for m in messages %}\n{{ m.content }}\n"
    "  {% endfor %}\nend",
    "generation blocks": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m | tojson }}{% endif %}{% endfor %}"
    ),
    "loop control and namespaces": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{{ m.content }}{{ ns.n }}{% break %}{% endfor %}{{ messages[0] | tojson(indent=2) }}"
    ),
    "undefined names": "{{ date_string is defined }} {{ unknown }} {{ documents }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("user", ["hello", "A <b> & é 'x'\n{{ 1 }}"])
def test_rendered_as_transformers_does(name: str, user: str) -> None:
    rendered, _ = render_jinja_template(
        conversations=[[{"role": "user", "content": user}]],
        chat_template=TEMPLATES[name],
        add_generation_prompt=True,
        **TOKENS,
    )
    assert render_chat("mine", TEMPLATES[name], user, TOKENS) == rendered[0]


def test_a_template_that_asks_for_today_gets_the_same_day_always() -> None:
    assert render_chat("mine", "{{ strftime_now('%d %b %Y') }}", "hi", {}) == "26 Jul 2024"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no users') }}",
        "{% for %}",
        "{{ 1 + 'a' }}",
        "{{ messages[3].content }}",
        "{{ 1 / 0 }}",
        "{% for one in range(10 ** 9) %}{% endfor %}",
        "{{ 10.0 ** 999 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ messages.nothing.at_all }}",
        "{{ messages | tojson(indent='x', sort_keys=nothing.more) }}",
        "{{ bos_token.append }}{{ messages.append(1) }}",
        "{{ raise_exception('two\\nlines') }}",
    ],
)
def test_a_template_that_fails_is_a_usage_error(template: str) -> None:
    with pytest.raises(UsageError, match="chat template of 'mine' cannot be used") as caught:
        render_chat("mine", template, "hi", {})
    assert str(caught.value).endswith("; correct it, or use template=base.")
    assert "\n" not in str(caught.value)


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    with pytest.raises(UsageError):
        render_chat("mine", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "hi", {})

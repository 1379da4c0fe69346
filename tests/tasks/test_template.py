"""Chat templates that cannot be used."""

import pytest

from ruler_bench.errors import UsageError
from ruler_bench.tasks.template import load_template


@pytest.mark.parametrize("printed", ["nothing", "{0} and {0}"])
def test_a_chat_template_must_print_the_message_once(
    word_tokenizer: object, monkeypatch: pytest.MonkeyPatch, printed: str
) -> None:
    monkeypatch.setattr(
        type(word_tokenizer), "chat_prompt", lambda self, user: printed.format(user)
    )
    with pytest.raises(UsageError, match="exactly once"):
        load_template("chat", word_tokenizer)


def test_text_of_a_template_has_the_tasks_place(word_tokenizer: object) -> None:
    assert load_template("meta-chat", word_tokenizer).text == "[INST] {task_template} [/INST]"

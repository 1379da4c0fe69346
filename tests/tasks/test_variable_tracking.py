"""vt: the chain can be followed, the example is another one, and odd draws end well."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from ruler_bench.errors import UsageError
from ruler_bench.tasks import DataSpec, TaskSpec, generate, variable_tracking

MakeSpec = Callable[..., DataSpec]

QUESTION = "Question: Find all variables that are assigned the value "


def follow(text: str, value: str) -> list[str]:
    """Return the variables of a value by reading the assignments, in the order written."""
    links = re.findall(r"^VAR (\w+) = (?:VAR )?(\w+) ?$", text, re.MULTILINE)
    found = [name for name, source in links if source == value]
    for name, source in links:
        if source in found:
            found.append(name)
    return found


@pytest.mark.parametrize("template", ["base", "meta-llama3", "chat"])
def test_the_chain_leads_to_the_answers(spec: MakeSpec, template: str) -> None:
    data = spec("vt", 1800, template=template)
    for ordinal, sample in enumerate(generate(data, 4)):
        assert sample.ordinal == ordinal
        _, example, text = sample.prompt.split("Memorize and track")
        example = example.rstrip("\n")
        value = text.split(QUESTION)[1].split(" ")[0]
        assert follow(text, value) == list(sample.outputs)
        assert len(set(sample.outputs)) == 5
        assert sample.answer_prefix.endswith(f" are assigned the value {value}, they are: ")
        old_value = example.split(QUESTION)[1].split(" ")[0]
        assert example.endswith(f"they are:  {' '.join(follow(example, old_value))}")
        assert old_value != "12345"
        assert sample.depth is sample.answer_offset is sample.answer_token_position is None
        assert sample.length == data.tokenizer.count(sample.prompt) + 30 <= 1800


def test_the_example_stands_within_the_users_turn(spec: MakeSpec) -> None:
    sample = generate(spec("vt", 1800, template="meta-llama3"), 1)[0]
    assert sample.prompt.count("<|begin_of_text|>") == 1
    assert sample.prompt.startswith(
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nMemorize and track"
    )


def test_examples_differ_in_names_alone(spec: MakeSpec) -> None:
    examples = {
        re.sub(r"\b[A-Z]{3}\b(?! [A-Z]{3} =)|\d{5}", "?", sample.input.split("\n\nMemorize")[0])
        for sample in generate(spec("vt", 1800), 3)
    }
    assert len({len(one) for one in examples}) == 1


def test_several_chains(spec: MakeSpec, changed_task: Callable[..., TaskSpec]) -> None:
    task = changed_task("vt", num_chains=3, num_hops=2)
    sample = generate(spec(task, 2400), 1)[0]
    text = sample.input.split("\n\nMemorize and track")[1]
    assert len(re.findall(r"^VAR \w+ = \d+$", text, re.MULTILINE)) == 3
    assert follow(text, text.split(QUESTION)[1].split(" ")[0]) == list(sample.outputs)


def test_names_drawn_twice_do_no_harm(spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """With names of one letter most draws come to nothing; RULER ends with an IndexError."""
    monkeypatch.setattr(variable_tracking, "NAME_LETTERS", 1)
    monkeypatch.setattr(variable_tracking, "EXAMPLE_NAME_LETTERS", 1)
    for sample in generate(spec("vt", 1800), 8):
        assert len(set(sample.outputs)) == 5


def test_an_example_that_never_fits_names_the_tokenizer(
    spec: MakeSpec, make_word_tokenizer: Callable[..., Any]
) -> None:
    class Letters(make_word_tokenizer):
        def counts(self, texts):
            return [len(text) for text in texts]

    with pytest.raises(UsageError, match=r"has room for 500 at any length.*tokenizer=NAME"):
        generate(spec("vt", 9000, tokenizer=Letters(cuts=None)), 1)

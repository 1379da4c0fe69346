"""Prompts of an exact length, of a task's own text."""

import pytest
from tokenizers import Tokenizer

from scripts.bench.prompt import ROOT, prompt_maker
from scripts.bench.shapes import SHAPES


@pytest.fixture(scope="module")
def make_prompt():
    return prompt_maker()


def test_the_text_is_a_needle_task(make_prompt):
    tokenizer = Tokenizer.from_file(str(ROOT / "ruler_bench" / "assets" / "probe/tokenizer.json"))
    text = tokenizer.decode(list(make_prompt(4000)))
    assert text.count("One of the special magic uuids for") > 40


@pytest.mark.parametrize("tokens", [1, 96, 8191, 100_000])
def test_length_is_exact_and_ids_are_valid_in_every_shape(make_prompt, tokens):
    prompt = make_prompt(tokens)
    assert len(prompt) == tokens
    assert prompt == make_prompt(100_000)[:tokens]
    assert 0 <= min(prompt) <= max(prompt) < min(shape.vocabulary for shape in SHAPES.values())

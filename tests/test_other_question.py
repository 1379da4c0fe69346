"""Another question on the same context, against the context itself."""

import re

import pytest
from omegaconf import OmegaConf

from ruler_bench.config import config_dir
from ruler_bench.errors import UsageError
from ruler_bench.model_files import model_folder
from ruler_bench.other_question import other_question
from ruler_bench.tasks import DataSpec, load_questions, make_task
from ruler_bench.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def encoder():
    return load_tokenizer(str(model_folder("package:probe")))


@pytest.fixture(scope="module")
def questions(encoder, data_cache):
    def call(task, template="base"):
        values = OmegaConf.to_container(OmegaConf.load(config_dir() / "task" / f"{task}.yaml"))
        data = DataSpec(make_task(values), 2048, 42, template, encoder)
        return load_questions(data, encoder, 3, data_cache)

    return call


@pytest.mark.parametrize(
    ("task", "template"),
    [
        ("niah_multikey_1", "base"),
        ("niah_multikey_1", "meta-llama3"),
        ("niah_multikey_2", "base"),
        ("niah_multikey_3", "base"),
    ],
)
def test_it_asks_for_a_needle_that_is_there(questions, encoder, task, template):
    for question in questions(task, template):
        other = other_question(question, encoder)
        mine, theirs = question.sample, other.sample
        (key,) = re.findall(r" for (\S+) mentioned", theirs.answer_prefix)
        (value,) = theirs.outputs
        assert f"for {key} is: {value}." in mine.input
        assert value != mine.outputs[0]
        # The question is all that differs.
        (asked,) = re.findall(r" for (\S+) mentioned", mine.answer_prefix)
        assert (
            theirs.prompt.replace(f"for {key} mentioned", f"for {asked} mentioned") == mine.prompt
        )
        assert other.prompt_token_ids == tuple(encoder.encode_prompt(theirs.prompt))
        alike = sum(
            a == b for a, b in zip(other.prompt_token_ids, question.prompt_token_ids, strict=False)
        )
        assert alike > 0.9 * len(question.prompt_token_ids)


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ("niah_single_1", "hides one needle alone"),
        ("niah_multiquery", "does not ask for one needle"),
        ("niah_multivalue", "does not ask for one needle"),
    ],
)
def test_where_there_is_no_other_needle_it_is_said(questions, encoder, task, why):
    with pytest.raises(UsageError, match=rf"arm two_questions: the task {task} {why}; use niah"):
        other_question(questions(task)[0], encoder)

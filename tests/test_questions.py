"""Prompts that only some arms ask: cut, shorter, of another seed."""

import re

import pytest

from ruler_bench.config import config_dir
from ruler_bench.errors import UsageError
from ruler_bench.model_files import model_folder
from ruler_bench.questions import Questions, cut
from ruler_bench.streams import CUT, Step, streams
from ruler_bench.tasks import DataSpec, load_questions, make_task
from ruler_bench.tokenizer import load_tokenizer

LENGTH = 1024


@pytest.fixture(scope="module")
def encoder():
    return load_tokenizer(str(model_folder("package:probe")))


@pytest.fixture(scope="module")
def make(encoder, data_cache):
    def call(task="niah_single_1", length=LENGTH):
        from omegaconf import OmegaConf

        values = OmegaConf.to_container(OmegaConf.load(config_dir() / "task" / f"{task}.yaml"))
        data = DataSpec(make_task(values), length, 42, "base", encoder)
        return data, Questions(data, encoder, data_cache)

    return call


def test_aging_asks_the_same_task_with_another_seed(make):
    _, questions = make()
    (stream,) = streams(["aged"], [0, 1])
    questions.load(stream.steps)
    asked = [questions.asked(one) for one in stream.steps]
    prompts = {one.question.sample.prompt for one in asked}
    assert len(prompts) == len(stream.steps)
    assert {one.question.sample.task for one in asked} == {"niah_single_1"}
    assert all(one.length == LENGTH for one in asked)


def test_length_mix_asks_half_and_a_quarter(make):
    _, questions = make(length=2048)
    (stream,) = streams(["length_mix"], [0, 1])
    questions.load(stream.steps)
    assert [questions.asked(one).length for one in stream.steps] == [
        *(2048, 1024, 2048),
        *(2048, 512, 2048),
    ]
    for step in stream.steps:
        asked = questions.asked(step)
        assert asked.question.sample.length <= asked.length
        assert all(one in asked.question.sample.prompt for one in asked.question.sample.outputs)


def test_where_a_quarter_has_no_room_half_is_asked(make):
    _, questions = make()
    (stream,) = streams(["length_mix"], [1])
    questions.load(stream.steps)
    assert [questions.asked(one).length for one in stream.steps] == [1024, 512, 1024]


def test_a_length_without_room_for_half_is_said(make):
    _, questions = make(length=600)
    (stream,) = streams(["length_mix"], [0])
    with pytest.raises(UsageError, match="arm length_mix: length=600 leaves no room") as error:
        questions.load(stream.steps)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_2", "niah_multivalue"])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_cut_prompts_have_the_length_asked_for_and_keep_their_answer(make, encoder, task, beyond):
    _, questions = make(task)
    unit = 128
    for ordinal in range(4):
        step = Step(0, ordinal, source=CUT, unit_tokens=unit, beyond_tokens=beyond)
        questions.load([step])
        whole = questions.asked(Step(0, ordinal)).question
        asked = questions.asked(step)
        kept = asked.question.prompt_token_ids
        assert len(kept) == (len(whole.prompt_token_ids) - 1) // unit * unit + beyond
        assert asked.length == len(kept) + whole.sample.tokens_to_generate
        # What is left are the first and the last tokens of the whole.
        start = next(
            (place for place, one in enumerate(kept) if one != whole.prompt_token_ids[place]),
            len(kept),
        )
        assert (
            kept[start:]
            == whole.prompt_token_ids[len(whole.prompt_token_ids) + start - len(kept) :]
        )
        assert asked.question.sample.prompt == encoder.decode(list(kept))
        if asked.scored:
            question = re.findall(r"What .*", whole.sample.prompt)[-1]
            assert question in asked.question.sample.prompt
            assert all(one in asked.question.sample.prompt for one in whole.sample.outputs)


def test_an_answer_that_was_cut_out_is_not_scored(make, encoder, data_cache):
    data, _ = make("niah_multivalue")
    (question,) = load_questions(data, encoder, 1, data_cache)
    shorter, is_whole = cut(question, len(question.prompt_token_ids) // 4, encoder)
    gone = [one for one in question.sample.outputs if one not in shorter.sample.prompt]
    assert is_whole == (not gone)
    tiny, is_whole = cut(question, 20, encoder)
    assert len(tiny.prompt_token_ids) == 20
    assert not is_whole


def test_a_block_is_not_asked_around_where_a_chunk_is(make):
    _, questions = make()
    steps = [
        Step(0, 0, source=CUT, unit_tokens=128, avoided_tokens=256),
        Step(1, 0, source=CUT, unit_tokens=256),
    ]
    questions.load(steps)
    lengths = [len(questions.asked(one).question.prompt_token_ids) for one in steps]
    assert lengths[0] % 128 == 0
    assert lengths[0] % 256 != 0
    assert lengths[1] % 256 == 0


def test_a_prompt_shorter_than_a_block_is_said(make):
    _, questions = make()
    step = Step(0, 0, source=CUT, unit_tokens=2048)
    questions.load([step])
    with pytest.raises(UsageError, match=r"arm boundary: the prompt of ordinal 0 has .* 2048"):
        questions.asked(step)

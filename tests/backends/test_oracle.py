import json
import math
import time

import pytest

from backends.base import Backend, ConfigurationError, Request, RequestError
from backends.oracle import WRONG_ANSWER, Oracle


def needle(key, value, kind="numbers"):
    return f"One of the special magic {kind} for {key} is: {value}."


def prompt(needles, keys, kind="numbers", wrapper="{}"):
    """A prompt as RULER's needle tasks word it, for one key and value or for several."""
    one = kind.removesuffix("s")
    several = len(keys) > 1 or len(needles) > len(keys)
    asked = keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + ", and " + keys[-1]
    question = (
        f"What are all the special magic {kind} for {asked} mentioned in the provided text?"
        if several
        else f"What is the special magic {one} for {asked} mentioned in the provided text?"
    )
    prefix = (
        f" The special magic {kind if several else one} for {asked} "
        f"mentioned in the provided text {'are' if several else 'is'}"
    )
    head = (
        f"Some special magic {kind} are hidden within the following text. Make sure to memorize "
        f"it. I will quiz you about the {kind} afterwards.\n"
    )
    noise = "The grass is green. The sky is blue."
    context = "\n".join(f"{noise}\n{text}" for text in needles)
    return wrapper.format(f"{head}{context}\n{question}") + prefix


def ask(oracle, text, position=0):
    return oracle.generate(Request(position, text, (), 128)).text


@pytest.mark.parametrize(
    "wrapper", ["{}", "<|user|>\n{}<|end|>\n<|assistant|>\n", "[INST] {} [/INST]"]
)
def test_one_needle(wrapper):
    text = prompt([needle("blue-cat", "1234567")], ["blue-cat"], wrapper=wrapper)
    assert ask(Oracle(), text) == " 1234567"


def test_the_needle_asked_for_among_others():
    needles = [needle("a-b", "1111111"), needle("c-d", "2222222"), needle("e-f", "3333333")]
    assert ask(Oracle(), prompt(needles, ["c-d"]).replace("\n", " ")) == " 2222222"


def test_uuids_as_keys_and_values():
    key = "500b8a75-0000-4000-8000-1234567890ab"
    value = "9f1c6a52-1111-4111-9111-abcdefabcdef"
    needles = [needle(value, key, "uuids"), needle(key, value, "uuids")]
    assert ask(Oracle(), prompt(needles, [key], "uuids")) == f" {value}"


def test_all_values_of_a_key():
    values = ["1111111", "2222222", "3333333", "4444444"]
    text = prompt([needle("a-b", value) for value in values], ["a-b"])
    assert ask(Oracle(), text) == " 1111111, 2222222, 3333333, 4444444"


def test_several_keys_in_the_order_asked():
    needles = [needle("a-b", "1"), needle("c-d", "2"), needle("e-f", "3"), needle("g-h", "4")]
    text = prompt(needles, ["g-h", "a-b", "e-f", "c-d"])
    assert ask(Oracle(), text) == " 4, 1, 3, 2"


def test_a_prompt_without_question_or_needle_is_refused():
    with pytest.raises(RequestError, match=r"script is missing: .* asks for none"):
        ask(Oracle(), "Question: who?")
    with pytest.raises(ConfigurationError, match=r"script is missing: .* asks for none"):
        Oracle.refuse_early("Question: who?")
    with pytest.raises(RequestError, match="the prompt is empty"):
        ask(Oracle(), " ")
    with pytest.raises(RequestError, match="no needle for 'c-d'"):
        ask(Oracle(), prompt([needle("a-b", "1")], ["c-d"]))


def write_script(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_script_answers_by_exact_prompt(tmp_path):
    script = write_script(
        tmp_path / "script.jsonl",
        {"ordinal": 0, "input": "2+2", "answer_prefix": " =", "outputs": ["4", "four"]},
        {"ordinal": 1, "input": "3+3 =", "outputs": ["6"], "answer": "seven"},
    )
    oracle = Oracle(script=script)
    assert ask(oracle, "2+2 =") == " 4, four"
    assert ask(oracle, "3+3 =") == "seven"
    with pytest.raises(RequestError, match=r"no answer to the prompt that ends in '2\+2'"):
        ask(oracle, "2+2")


def test_wrong_and_fail_count_every_request_of_the_engine():
    oracle = Oracle(wrong=[1, 4], fail=[2])
    text = prompt([needle("a-b", "1234567")], ["a-b"])
    answers = []
    for position in range(5):
        try:
            answers.append(ask(oracle, text, position))
        except RequestError as error:
            answers.append(str(error))
    assert answers == [
        " 1234567",
        WRONG_ANSWER,
        "request 2 fails, as backend.fail asks",
        " 1234567",
        WRONG_ANSWER,
    ]
    assert ask(Oracle(wrong=[1, 4], fail=[2]), text) == " 1234567"


def test_the_delay_is_waited_and_reported():
    text = prompt([needle("a-b", "1")], ["a-b"])
    start = time.perf_counter()
    answer = Oracle(delay_seconds=0.05).generate(Request(0, text, (), 8))
    assert 0.05 <= answer.ttft_seconds <= time.perf_counter() - start


def test_describe_holds_every_setting(tmp_path):
    script = write_script(tmp_path / "s.jsonl", {"input": "a", "outputs": ["b"]})
    oracle = Oracle(script=script, wrong=[3, 1], fail=[0], delay_seconds=0.5)
    assert isinstance(oracle, Backend)
    assert oracle.describe() == {
        "script": script,
        "wrong": [1, 3],
        "fail": [0],
        "delay_seconds": 0.5,
    }
    oracle.close()
    oracle.close()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"wrong": [-1]}, "backend.wrong: -1 is no position"),
        ({"fail": ["2"]}, "backend.fail: '2' is no position"),
        ({"fail": [True]}, "backend.fail: True is no position"),
        *(
            ({key: value}, f"backend.{key}={value!r}: must be a list of positions")
            for key in ("wrong", "fail")
            for value in (0, None, True, "0", 1.5)
        ),
        *(
            ({key: [value]}, "is no position; they are integers from 0")
            for key in ("wrong", "fail")
            for value in (None, 1.0, "a", [1], {})
        ),
        *(
            ({"delay_seconds": value}, "delay_seconds=.*: must be a number of seconds in 0 to")
            for value in (-1, -0.1, "abc", None, [1], True, {}, 1e18, math.nan, math.inf)
        ),
        *(({"script": value}, "script=.*: must be the path of") for value in (1, ["a"], True, {})),
        ({"script": "."}, r"script=\.: cannot be read \(Is a directory\)"),
        ({"script": ""}, r"script=\.: cannot be read"),
        ({"script": "no/such/file.jsonl"}, r"script=no/such/file\.jsonl: cannot be read"),
    ],
)
def test_bad_settings(setting, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        Oracle(**setting)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        '{"input": "a"}',
        '{"input": 3, "outputs": ["b"]}',
        '{"input": "a", "outputs": [1]}',
        '{"input": "a", "answer": null}',
        '{"input": "a", "outputs": "b"}',
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_a_bad_line_of_a_script_is_named(tmp_path, line):
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps({"input": "a", "outputs": ["b"]}) + f"\n{line}\n")
    with pytest.raises(ConfigurationError, match=r"script\.jsonl line 2") as caught:
        Oracle(script=str(script))
    assert "\n" not in str(caught.value)


def test_two_answers_to_one_prompt_are_refused(tmp_path):
    rows = [{"input": "a", "outputs": ["b"]}, {"input": "a", "outputs": ["c"]}]
    with pytest.raises(ConfigurationError, match="line 2: the same prompt has another answer"):
        Oracle(script=write_script(tmp_path / "s.jsonl", *rows))


def test_a_script_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "s.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        Oracle(script=str(tmp_path / "s.jsonl"))

"""What a server sends: taken in piece by piece, and never taken for what it should be."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import NonFiniteLogits, RequestError
from backends.openai_server.answers import Answer, message_of, parsed, shown


def choice(**fields):
    return {"choices": [{"index": 0, **fields}]}


def test_completions_piece_by_piece():
    answer = Answer("completions")
    rows = [{"a": -0.5, "b": -2.0}]
    answer.add(choice(text=" 12", token_ids=[4], logprobs={"top_logprobs": rows}), 1.0)
    answer.add(choice(text="", finish_reason=None), 2.0)
    answer.add(choice(text="34", token_ids=[5], logprobs={"top_logprobs": rows}), 3.0)
    answer.add(choice(text="", finish_reason="stop"), 4.0)
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": None}
    answer.add({"choices": [], "usage": usage}, 5.0)
    assert answer.text == " 1234"
    assert answer.token_ids == [4, 5]
    assert answer.top2_margin() == (1.5, 1.5)
    assert answer.finish_reason == "stop"
    assert answer.prompt_tokens == 9
    assert (answer.first_seconds, answer.last_seconds) == (1.0, 3.0)


def test_chat_streamed_and_whole():
    top = [{"token": "x", "logprob": -3.0}, {"token": "y", "logprob": -1.0}]
    logprobs = {"content": [{"token": "y", "logprob": -1.0, "top_logprobs": top}]}
    for name in ("delta", "message"):
        answer = Answer("chat")
        answer.add(choice(**{name: {"role": "assistant", "content": None}}), 1.0)
        more = {"content": "7", "tool_calls": None}
        ends = {"token_ids": [7], "logprobs": logprobs, "finish_reason": "length"}
        answer.add(choice(**{name: more}, **ends), 2.0)
        cached = {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
        answer.add({"usage": cached}, 3.0)
        assert answer.text == "7"
        assert answer.top2_margin() == (2.0,)
        assert answer.finish_reason == "length"
        assert answer.cached_tokens == 4


def beside(*tokens):
    """Log-probabilities of llama.cpp's server: id, best and second best of each token."""
    return {
        "content": [
            {"id": one, "logprob": best, "top_logprobs": [{"logprob": best}, {"logprob": next_}]}
            for one, best, next_ in tokens
        ]
    }


@pytest.mark.parametrize(
    ("told", "second", "ids", "margins"),
    [
        (2, -2.5, [4, 5], (1.5, 2.25)),
        (None, -2.5, [4, 5], (1.5, 2.25)),
        (3, -2.5, None, None),  # a token whose bytes were held back
        (2, -3.4028234663852886e38, [4, 5], None),  # a probability of 0
    ],
)
def test_ids_beside_log_probabilities_count_where_they_are_all_there(told, second, ids, margins):
    answer = Answer("completions")
    answer.add(choice(text=" 1", logprobs=beside((4, -0.5, -2.0))), 1.0)
    answer.add(choice(text="2", logprobs=beside((5, -0.25, second))), 2.0)
    answer.add(choice(text="", logprobs=None, finish_reason="stop"), 3.0)
    answer.add({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": told}}, 4.0)
    answer.end(lambda text: text)
    assert answer.token_ids == ids
    assert answer.top2_margin() == margins


def test_a_margin_that_is_missing_takes_all_away():
    two, one = {"a": -1, "b": -2}, {"a": -1.0}
    for ids, rows, margins in (
        ([4, 5], [two, two], (1.0, 1.0)),
        ([4, 5], [one, two], None),
        ([4], [two, two], None),
        (None, [two, two], None),
        ([4, 5], [], None),
    ):
        answer = Answer("completions")
        answer.add(choice(text="a", token_ids=ids, logprobs={"top_logprobs": rows}), 0)
        assert answer.top2_margin() == margins


BAD = {
    "choices": {"choices": 5},
    "no object": {"choices": [5]},
    "another choice": {"choices": [{"index": 1, "text": "x"}]},
    "text": choice(text=5),
    "ids": choice(text="x", token_ids=[1, "2"]),
    "negative ids": choice(text="x", token_ids=[-1]),
    "logprobs": choice(text="x", logprobs=[1]),
    "rows": choice(text="x", logprobs={"top_logprobs": 3}),
    "reason": choice(text="x", finish_reason="content_filter"),
    "odd reason": choice(text="x", finish_reason=["stop"]),
    "usage": {"usage": 4},
    "count": {"usage": {"prompt_tokens": "4"}},
    "negative count": {"usage": {"prompt_tokens": -4}},
}


@pytest.mark.parametrize("name", BAD)
def test_what_should_not_be_is_an_error_that_shows_it(name):
    with pytest.raises(RequestError, match=r"the server (sent|ended)"):
        Answer("completions").add(BAD[name], 0.0)


def test_a_log_probability_that_is_none_is_told():
    rows = {"top_logprobs": [{"a": None, "b": -1.0}]}
    with pytest.raises(NonFiniteLogits):
        Answer("completions").add(choice(text="x", logprobs=rows), 0.0)
    with pytest.raises(NonFiniteLogits, match="-Infinity"):
        parsed('{"a": -Infinity}')


KEYS = st.sampled_from(
    ["choices", "index", "text", "delta", "message", "content", "logprobs", "top_logprobs"]
) | st.sampled_from(["logprob", "usage", "token_ids", "finish_reason", "prompt_tokens", "error"])
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60)
@given(st.dictionaries(KEYS, JSON, max_size=5), st.sampled_from(["completions", "chat"]))
def test_anything_is_taken_in_or_an_error_of_the_request(found, api):
    answer = Answer(api)
    with contextlib.suppress(RequestError):
        answer.add(parsed(json.dumps(found, allow_nan=False)), 0.0)
    assert isinstance(answer.text, str)
    assert all(one >= 0 for one in answer.top2_margin() or ())


@pytest.mark.parametrize("text", ["[1]", "5", "", "{", "[" * 100_000, "1" * 5000])
def test_what_is_no_object_is_an_error(text):
    with pytest.raises(RequestError, match="no JSON"):
        parsed(text)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"error": {"message": "too long", "code": 400}}, "too long"),
        ({"error": "too long"}, "too long"),
        ({"detail": "too long"}, "too long"),
        ({"detail": [{"loc": ["body"], "msg": "too long"}]}, "too long"),
        ({"error": {"code": 5}}, None),
        (["x"], None),
    ],
)
def test_words_of_an_error_are_found(found, words):
    assert message_of(found) == words


def test_what_is_shown_is_one_short_line_without_control_signs():
    assert shown("a\n b\x1b[31m" + "c" * 1000) == "a b?[31m" + "c" * 292 + "..."

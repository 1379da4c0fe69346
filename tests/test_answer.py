import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base import Generation, Request, RequestError
from ruler_bench.answer import check_answer, checked_generation

GOOD = Generation(
    token_ids=(1, 2),
    text="x",
    finish_reason="stop",
    logits_digest=("a", "b"),
    top2_margin=(0.5, 1.0),
    prompt_tokens=3,
    ttft_seconds=0.1,
    bytes_up=5,
    kernel="flash",
    density=0.5,
    dense_share=0.25,
    estimation_seconds=0.5,
    attention_seconds=2.0,
    copy_hidden_share=0.75,
)


def test_a_good_answer_stays_as_it_is():
    assert checked_generation(GOOD) == GOOD


def test_numpy_numbers_become_plain_ones():
    found = checked_generation(
        Generation(
            token_ids=(np.int64(1), np.int32(2)),
            top2_margin=[np.float32(0.5), 1],
            ttft_seconds=np.float64(0.25),
            bytes_up=np.int64(7),
        )
    )
    assert json.dumps(dataclasses.asdict(found))
    assert found.token_ids == (1, 2)
    assert found.top2_margin == (0.5, 1.0)
    assert found.bytes_up == 7


@pytest.mark.parametrize("found", [None, 5, "text", {"text": "x"}, Generation()])
def test_what_is_no_answer_is_an_error(found):
    with pytest.raises(RequestError):
        checked_generation(found)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("text", b"x"),
        ("finish_reason", "weird"),
        ("finish_reason", None),
        ("token_ids", "12"),
        ("token_ids", (1.5,)),
        ("token_ids", (-1,)),
        ("token_ids", (True,)),
        ("logits_digest", "abcd"),
        ("logits_digest", (1, 2)),
        ("top2_margin", (math.nan,)),
        ("top2_margin", (-1.0,)),
        ("ttft_seconds", "fast"),
        ("ttft_seconds", math.inf),
        ("decode_seconds", -1.0),
        ("bytes_up", "12"),
        ("bytes_down", -5),
        ("prompt_tokens", "many"),
        ("kernel", object()),
        ("density", "x"),
        ("density", 1.5),
        ("dense_share", -0.5),
        ("estimation_seconds", math.nan),
        ("attention_seconds", "long"),
        ("copy_hidden_share", 1.5),
        ("reused_tokens", 0.5),
        ("copy_hidden_share", math.nan),
    ],
)
def test_a_field_of_the_wrong_kind_is_an_error_that_names_it(field, value):
    with pytest.raises(RequestError, match=field):
        checked_generation(dataclasses.replace(GOOD, **{field: value}))


ASKED = Request(0, "prompt", (1, 2, 3), 4)


def fits(**fields):
    try:
        check_answer(Generation(**fields), ASKED, 100)
    except RequestError as error:
        return str(error)
    return None


@given(ids=st.lists(st.integers(0, 120), max_size=6))
def test_tokens_are_at_most_what_was_asked_for_and_of_the_vocabulary(ids):
    good = len(ids) <= 4 and all(one < 100 for one in ids)
    said = fits(token_ids=tuple(ids))
    assert (said is None) == good
    assert good or "token_ids" in said
    # A vocabulary that is not known limits nothing.
    check_answer(Generation(token_ids=(10**9,)), ASKED, None)


@pytest.mark.parametrize(("field", "entry"), [("logits_digest", "ab"), ("top2_margin", 1.0)])
@given(tokens=st.none() | st.integers(0, 4), entries=st.none() | st.integers(0, 6))
def test_what_is_told_of_tokens_is_told_of_each(field, entry, tokens, entries):
    ids = None if tokens is None else (1,) * tokens
    values = None if entries is None else (entry,) * entries
    said = fits(text="a", token_ids=ids, **{field: values})
    assert (said is None) == (entries is None or entries == tokens)
    assert said is None or field in said


def test_no_more_is_reused_than_the_prompt_has():
    assert fits(text="a", reused_tokens=3) is None
    assert fits(text="a", reused_tokens=4) == (
        "the engine returned reused_tokens=4; must be at most the prompt's 3"
    )
    assert fits(text="a", reused_tokens=4, prompt_tokens=5) is None

"""Answers with others in flight against answers alone: rounding is no leak."""

import pytest

from ruler_bench.leak.verdict import judge

BATCHED = "concurrent_8"
SETTINGS = {"concurrency": 1}
COUNT = 20


def judged(made, batched, **changes):
    records = [
        one
        for name in ("persistent", "fresh", "fresh_again")
        for one in made.stream(name, COUNT, bits=None, **changes)
    ]
    arms = made.arms(
        *("persistent", BATCHED, "fresh", "fresh_again"),
        **dict.fromkeys(("persistent", "fresh", "fresh_again"), SETTINGS),
        **{BATCHED: {"concurrency": 8}},
    )
    return judge([*records, *batched], arms, prompts=made.prompts(COUNT))


@pytest.mark.parametrize("flipped", [1, 6, 8, 12, COUNT])
@pytest.mark.parametrize("tokens", [True, False])
def test_another_ending_of_a_right_answer_is_no_leak(made, flipped, tokens):
    batched = []
    for one in range(COUNT):
        text = f" {made.number(one)}{'!' if one < flipped else '.'}"
        batched.append(made.answer(BATCHED, one, text, bits=None, tokens=tokens, margin=None))
    found = judged(made, batched, tokens=tokens, margin=None)
    assert (found.verdict, found.status) == ("ok", 0)


def test_a_near_tie_is_told_by_its_margins(made):
    batched = []
    for one in range(COUNT):
        text = f" {made.number(one)}{'!' if one < 12 else '.'}"
        margin = (10.0,) * (len(text) - 1) + (0.05,)
        batched.append(made.answer(BATCHED, one, text, bits=None, margin=margin))
    margin = (10.0,) * 8 + (0.05,)
    found = judged(made, batched, margin=margin)
    assert (found.verdict, found.status) == ("ok", 0)


@pytest.mark.parametrize(("wrong", "verdict"), [(1, "unstable"), (9, "leak"), (COUNT, "leak")])
def test_an_answer_that_turns_wrong_counts(made, wrong, verdict):
    batched = [
        made.answer(BATCHED, one, " 77" if one < wrong else None, bits=None, tokens=False)
        for one in range(COUNT)
    ]
    assert judged(made, batched, tokens=False).verdict == verdict


def test_another_requests_answer_is_a_proof(made):
    batched = [made.answer(BATCHED, one, bits=None, tokens=False) for one in range(COUNT)]
    batched[7] = made.answer(BATCHED, 7, f" {made.number(6)}.", bits=None, tokens=False)
    found = judged(made, batched, tokens=False)
    assert found.verdict == "leak"
    assert [one.ordinal for one in found.indices if one.verdict == "leak"] == [7]

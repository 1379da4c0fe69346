"""Orders of requests, against what each arm is for, and their steps when a folder grows."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ruler_bench.leak.arms import KINDS
from ruler_bench.records import Record
from ruler_bench.streams import (
    AGING,
    AGING_ORDINALS,
    AGING_REQUESTS,
    CUT,
    HALF,
    OTHER,
    QUARTER,
    streams,
)

ARMS = (*KINDS, "slots_2", "chunks_512")
UNITS = (128, 256)
ordinal_sets = st.sets(st.integers(0, 200), min_size=1, max_size=12)


def stream(arm, ordinals, seed=3, units=UNITS):
    (found,) = streams([arm], sorted(ordinals), seed, units)
    return found


def asked(arm, ordinals, **settings):
    return [one.ordinal for one in stream(arm, ordinals, **settings).steps]


@pytest.mark.parametrize("arm", ARMS)
@given(few=ordinal_sets, more=ordinal_sets)
def test_a_step_names_the_same_request_whatever_else_is_asked(arm, few, more):
    first = {one.step: one for one in stream(arm, few).steps}
    second = {one.step: one for one in stream(arm, few | more).steps}
    assert len(first) == len(stream(arm, few).steps)
    assert {step: second[step] for step in first} == first


@pytest.mark.parametrize("arm", ARMS)
@given(ordinals=ordinal_sets)
def test_every_sample_is_asked_and_scored(arm, ordinals):
    scored = {one.ordinal for one in stream(arm, ordinals).steps if one.scored}
    assert ordinals <= scored


def test_resend_cancels_a_request_and_sends_the_same_again():
    steps = stream("resend", [0, 3]).steps
    assert [(one.ordinal, one.action, one.scored) for one in steps] == [
        *((0, "cancel", False), (0, None, True)),
        *((3, "cancel", False), (3, None, True)),
    ]


def test_flood_asks_others_between_the_first_time_and_the_second():
    found = stream("flood", [0, 3])
    asked_for = [one.ordinal for one in found.steps]
    assert asked_for[:2] == asked_for[-2:] == [0, 3]
    assert asked_for[2:-2] == [AGING_ORDINALS + one for one in range(AGING_REQUESTS)]
    assert all(one.source == AGING for one in found.steps[2:-2])
    # An engine that goes on knows nothing: it is asked all that opens the stream.
    done = {one.step for one in found.steps} - {found.steps[-1].step}
    assert len(found.pending(done)) == len(found.steps) - 1
    assert found.pending({one.step for one in found.steps}) == []


def test_two_questions_asks_another_of_the_same_context_first():
    steps = stream("two_questions", [5]).steps
    assert [(one.source, one.scored, one.group) for one in steps] == [
        (OTHER, True, 5),
        ("sample", True, 5),
    ]


@given(ordinals=ordinal_sets)
def test_shuffled_is_another_order_of_the_same(ordinals):
    assert sorted(asked("shuffled", ordinals)) == asked("persistent", ordinals)


def test_the_seed_decides_the_shuffled_order():
    orders = {tuple(asked("shuffled", range(10), seed=seed)) for seed in range(20)}
    assert len(orders) > 15
    assert asked("shuffled", range(10), seed=4) == asked("shuffled", range(10), seed=4)
    # Each ordinal comes first about equally often.
    firsts = [asked("shuffled", range(4), seed=seed)[0] for seed in range(400)]
    assert all(60 < firsts.count(one) < 140 for one in range(4))


def test_the_orders_are_those_of_their_names():
    assert asked("axa", [0, 3]) == [0, 1, 0, 3, 2, 3]
    assert asked("repeat", [4]) == [4, 4, 4]
    mixed = stream("length_mix", [2, 5]).steps
    assert [one.source for one in mixed] == ["sample", HALF, "sample", "sample", QUARTER, "sample"]
    cut = stream("boundary", [1]).steps
    assert [(one.source, one.unit_tokens, one.beyond_tokens) for one in cut] == [
        (CUT, unit, beyond) for unit in UNITS for beyond in (-1, 0, 1)
    ]
    filled = stream("fill", [1]).steps
    assert [(one.ordinal, one.action, one.scored) for one in filled] == [
        (1, "fill", False),
        (1, None, True),
    ]
    cancelled = stream("cancel", [1]).steps
    assert [(one.ordinal, one.action, one.scored) for one in cancelled] == [
        (0, "cancel", False),
        (1, None, True),
    ]


def test_aged_begins_with_requests_that_no_sample_is():
    steps = stream("aged", [0, 7]).steps
    before, after = steps[:AGING_REQUESTS], steps[AGING_REQUESTS:]
    assert len(before) == 50
    assert all(one.source == AGING and not one.scored for one in before)
    assert all(one.ordinal >= AGING_ORDINALS for one in before)
    assert [one.ordinal for one in after] == [0, 7]


def test_the_reference_also_answers_what_only_other_arms_ask():
    found = {one.arm: one for one in streams(["boundary", "length_mix", "reference"], [0], 1, (8,))}
    steps = found["reference"].steps
    assert [one.source for one in steps] == ["sample", CUT, CUT, CUT, HALF]
    assert len({one.step for one in steps}) == len(steps)
    # Of the samples there is one answer each, in order.
    assert [one.step for one in steps if one.source == "sample"] == [0]


def test_cheap_arms_run_first_in_whatever_order_they_are_named():
    named = ["fresh", "slots_2", "reference", "fresh_again", "persistent"]
    order = [one.arm for one in streams(named, [0])]
    assert order == ["persistent", "reference", "slots_2", "fresh", "fresh_again"]


@pytest.mark.parametrize("arm", ["axa", "repeat", "length_mix", "fill", "cancel"])
def test_a_group_that_was_broken_off_is_asked_again_as_a_whole(arm):
    found = stream(arm, [0, 1, 2])
    size = len(found.steps) // 3
    done = {one.step for one in found.steps[: size + 1]}
    assert found.pending(done) == list(found.steps[size:])
    assert found.pending({one.step for one in found.steps}) == []


def test_a_new_engine_of_the_aged_arm_is_aged_anew():
    found = stream("aged", [0, 1])
    done = {one.step for one in found.steps[:-1]}
    assert found.pending(done) == [*found.steps[:AGING_REQUESTS], found.steps[-1]]
    assert found.pending({one.step for one in found.steps}) == []
    # Where all samples are there, only the missing ones of the others are asked.
    assert found.pending({one.step for one in found.steps[1:]}) == [found.steps[0]]


def recorded(found, life_of, failed):
    """Make the records of a stream that engines answered, each from where the last one ended."""
    records, served = [], Counter()
    for one in found.steps:
        life = life_of(one.step)
        records.append(
            Record(
                arm=found.arm,
                step=one.step,
                ordinal=one.ordinal,
                task="niah_single_1",
                length=1024,
                life=life,
                position=served[life],
                predecessor=None,
                expected=(),
                depth=None,
                prompt_sha256="",
                prompt_tokens=1,
                error="tired" if one.step in failed else None,
            )
        )
        served[life] += 1
    return records


@given(
    total=st.integers(1, 12),
    died=st.sets(st.integers(0, 11)),
    failed=st.sets(st.integers(0, 11)),
    order=st.sampled_from(["persistent", "shuffled"]),
)
def test_a_life_in_which_a_request_failed_is_asked_again_as_a_whole(total, died, failed, order):
    found = stream(order, range(total))
    places = {one.step: place for place, one in enumerate(found.steps)}
    lives = {step: sum(one < place for one in died) for step, place in places.items()}
    failed = {one for one in failed | died if one < total}
    failed = {found.steps[one].step for one in failed}
    records = recorded(found, lives.get, failed)
    left = found.left(records)
    broken = {one.life for one in records if one.error and one.position}
    alone = {one.step for one in records if one.error and not one.position}
    expected = {one.step for one in records if one.life in broken} | alone
    assert [one.step for one in left.pending] == [
        one.step for one in found.steps if one.step in expected
    ]
    assert left.again == {one for one in expected if one not in failed}
    assert not left.kept
    # Without what came before it, a failure stays.
    last = found.steps[-1]
    few = found.only({last.ordinal}).left(records)
    assert few.kept == ({last.step} if last.step in failed and records[-1].position else set())
    assert len(few.pending) == (last.step in failed and not records[-1].position)


def test_an_engine_that_failed_while_it_was_aged_is_aged_anew():
    found = stream("aged", [0, 1])
    left = found.left(recorded(found, lambda _: 1, {30}))
    assert left.pending == list(found.steps)
    assert found.left(recorded(found, lambda _: 1, ())).pending == []

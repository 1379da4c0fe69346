"""What deserves a fresh engine, and what is worth stopping for."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ruler_bench.leak.arms import ENGINE_PER_SAMPLE, ONE_ENGINE, Arm
from ruler_bench.leak.join import ArmFacts
from ruler_bench.records import Record
from ruler_bench.suspects import audited, suspects, suspicious

ARMS = {
    name: ArmFacts(Arm(name, lifetime, backend, {"slots": slots}))
    for name, lifetime, backend, slots in (
        ("persistent", ONE_ENGINE, "mine", 2),
        ("shuffled", ONE_ENGINE, "mine", 2),
        ("fresh", ENGINE_PER_SAMPLE, "mine", 2),
        ("reference", ONE_ENGINE, "hf", 2),
        ("slots_4", ONE_ENGINE, "mine", 4),
    )
}


def record(arm="persistent", ordinal=0, **changes):
    answer = Record(
        arm=arm,
        step=ordinal,
        ordinal=ordinal,
        task="niah_single_1",
        length=1024,
        life=1,
        position=0,
        predecessor=None,
        expected=("7",),
        depth=None,
        prompt_sha256=f"prompt {ordinal}",
        prompt_tokens=9,
        output=" 7",
        output_tokens=(5, 6),
        logits_digest=("a", "b"),
        finish_reason="stop",
        score=100.0,
        correct=True,
    )
    return replace(answer, **changes)


OTHER_TOKENS = {"output": " 8", "output_tokens": (5, 7)}
OTHER_BITS = {"logits_digest": ("a", "c")}


@pytest.mark.parametrize("arm", ["shuffled", "fresh"])
@pytest.mark.parametrize("changes", [OTHER_TOKENS, OTHER_BITS])
def test_arms_of_equal_settings_must_agree_to_the_bit(arm, changes):
    assert suspicious(record(arm, **changes), [record()], ARMS)
    assert not suspicious(record(arm), [record()], ARMS)


@pytest.mark.parametrize("arm", ["reference", "slots_4"])
def test_where_no_bits_are_promised_nothing_is_worth_stopping_for(arm):
    assert not suspicious(record(arm, **OTHER_TOKENS), [record()], ARMS)


@pytest.mark.parametrize(
    "changes",
    [
        {"ordinal": 1},
        {"prompt_sha256": "another"},
        {"length": 512},
        {"error": "x", "output": None, "output_tokens": None},
        {"score": None, "correct": None},
    ],
)
def test_what_answers_something_else_contradicts_nothing(changes):
    assert not suspicious(record("fresh", **{**OTHER_TOKENS, **changes}), [record()], ARMS)


def test_a_repeated_request_of_one_arm_contradicts_itself():
    assert suspicious(replace(record(), step=1, output_tokens=(5, 9)), [record()], ARMS)
    assert not suspicious(record(**OTHER_TOKENS), [record()], ARMS)


def test_suspects_are_wrong_failed_or_different():
    records = [
        record(ordinal=0),
        record(ordinal=1, score=0.0, correct=False),
        record(ordinal=2, error="x", output=None, output_tokens=None, score=None, correct=None),
        record(ordinal=3),
        record("reference", 3, **OTHER_TOKENS),
        record(ordinal=4),
        record("shuffled", 4, **OTHER_BITS),
        record(ordinal=5),
        record("reference", 5, **OTHER_BITS),
        record(ordinal=9, score=0.0, correct=False),
    ]
    assert suspects(records, range(7), ARMS) == [1, 2, 3, 4]


def test_without_tokens_the_text_is_compared():
    text = {"output_tokens": None, "logits_digest": None}
    assert suspicious(record("fresh", **{**text, "output": "x"}), [record(**text)], ARMS)
    assert not suspicious(record("fresh", **text), [record()], ARMS)


@given(st.sets(st.integers(0, 99), min_size=1), st.integers(0, 5), st.integers(0, 20))
def test_the_audit_draws_from_all_that_was_asked(ordinals, seed, count):
    drawn = audited(ordinals, seed, count)
    assert len(drawn) == min(count, len(ordinals))
    assert set(drawn) <= ordinals
    assert drawn == sorted(set(drawn)) == audited(sorted(ordinals), seed, count)


def test_every_sample_is_drawn_about_equally_often():
    counts = [sum(one in audited(range(10), seed, 2) for seed in range(1000)) for one in range(10)]
    assert all(140 < one < 260 for one in counts)

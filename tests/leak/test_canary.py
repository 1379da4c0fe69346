"""Canaries: whole answers as proof, parts of answers as hints with a control."""

import uuid
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from ruler_bench.leak.canary import can_be_canary, scan


def _uuid(seed):
    return str(uuid.UUID(int=Random(seed).getrandbits(128), version=4))


def _scan(made, *records, count=20, **more):
    return scan({"persistent": list(records)}, {**made.prompts(count), **more})


def test_the_answer_of_an_earlier_sample_is_proof(made):
    found = _scan(
        made, made.answer("persistent", 3), made.answer("persistent", 4, f" {made.number(3)}.")
    )
    assert [(one.ordinal, one.owner, one.owner_position) for one in found.proofs] == [(4, 3, 3)]
    assert found.proofs[0].value == made.number(3)


def test_it_counts_inside_an_answer_that_is_right(made):
    text = f" {made.number(4)}. The number is {made.number(3)}."
    found = _scan(made, made.answer("persistent", 3), made.answer("persistent", 4, text))
    assert len(found.proofs) == 1


def test_a_later_sample_cannot_leak(made):
    found = _scan(
        made, made.answer("persistent", 3, f" {made.number(4)}."), made.answer("persistent", 4)
    )
    assert not found.proofs
    assert (found.earlier_hits, found.later_hits) == (0, 1)


def test_another_life_cannot_leak(made):
    found = _scan(
        made,
        made.answer("persistent", 3),
        made.answer("persistent", 5),
        made.answer("persistent", 4, f" {made.number(3)}.", life=2),
        made.answer("persistent", 6, life=2),
    )
    assert not found.proofs


def test_a_request_that_failed_was_served_too(made):
    failed = made.answer("persistent", 3, error="OutOfMemory", output=None, correct=None)
    found = _scan(made, failed, made.answer("persistent", 4, f" {made.number(3)}."))
    assert len(found.proofs) == 1


def test_a_part_of_a_longer_number_is_no_proof(made):
    for text in (f" 1{made.number(3)}.", f" {made.number(3)}9", f" x{made.number(3)}"):
        assert not _scan(
            made, made.answer("persistent", 3), made.answer("persistent", 4, text)
        ).proofs


def test_a_value_of_this_prompt_is_no_proof(made):
    text = f"{made.prompt(4)} One of the special magic numbers for other is: {made.number(3)}."
    found = _scan(
        made,
        made.answer("persistent", 3),
        made.answer("persistent", 4, f" {made.number(3)}."),
        **{made.prompt_hash(4): text},
    )
    assert not found.proofs
    assert not found.hints


def test_an_answer_of_two_samples_is_no_proof(made):
    found = _scan(
        made,
        made.answer("persistent", 2, expected=(made.number(3),)),
        made.answer("persistent", 3),
        made.answer("persistent", 4, f" {made.number(3)}."),
    )
    assert not found.proofs


def test_an_answer_within_another_sample_s_is_no_proof(made):
    found = _scan(
        made,
        made.answer("persistent", 2, expected=(f"88{made.number(3)}",)),
        made.answer("persistent", 3),
        made.answer("persistent", 4, f" {made.number(3)}."),
    )
    assert not found.proofs


def test_outputs_without_their_prompt_are_passed_over(made):
    records = [made.answer("persistent", 3), made.answer("persistent", 4, f" {made.number(3)}.")]
    found = scan({"persistent": records}, {made.prompt_hash(3): made.prompt(3)})
    assert not found.proofs
    assert found.outputs == 1


def test_uuids_count_whatever_their_case(made):
    value = _uuid(1)
    found = _scan(
        made,
        made.answer("persistent", 3, expected=(value,)),
        made.answer("persistent", 4, f" {value.upper()}."),
    )
    assert [one.value for one in found.proofs] == [value]


def test_hints_are_six_digits_or_eight_hex(made):
    first, value = made.number(3), _uuid(2)
    served = [
        made.answer("persistent", 3),
        made.answer("persistent", 5, expected=(value,)),
    ]
    eight, seven = value.replace("-", "")[5:13], value.replace("-", "")[5:12]
    for text, hits in (
        (f" {first[:6]}", 1),
        (f" {first[:5]}", 0),
        (f" {eight[:3]}-{eight[3:]}", 1),
        (f" {seven}", 0),
    ):
        found = _scan(made, *served, made.answer("persistent", 7, text))
        assert found.earlier_hits == hits, text


def test_words_are_no_canaries():
    assert can_be_canary("1234567")
    assert can_be_canary(_uuid(3))
    assert not can_be_canary("12345")
    assert not can_be_canary("wandering")


def test_hints_are_held_against_those_of_later_answers(made):
    rng = Random(0)
    leaky = [
        made.answer("persistent", one, f" {made.number(rng.randrange(one))[:6]}." if one else None)
        for one in range(20)
    ]
    assert _scan(made, *leaky).test.p_value < 1e-4
    either = []
    for one in range(20):
        other = rng.choice([each for each in range(20) if each != one])
        either.append(made.answer("persistent", one, f" {made.number(other)[:6]}."))
    assert _scan(made, *either).test.p_value > 0.05


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(2, 12))
def test_proofs_are_what_a_search_of_every_pair_finds(made, rng, count):
    """Brute force: every output against the answer of every other sample."""
    records = []
    for one in range(count):
        words = [made.number(rng.randrange(count)) for _ in range(rng.randrange(3))]
        records.append(made.answer("persistent", one, " ".join(["is", *words, "here."])))
    found = {(one.ordinal, one.owner) for one in _scan(made, *records, count=count).proofs}
    expected = {
        (late.ordinal, early.ordinal)
        for late in records
        for early in records
        if early.position < late.position and made.number(early.ordinal) in late.output.split()
    }
    assert found == expected


def test_random_wrong_answers_give_no_proof(made):
    """A wrong seven-digit output meets one of 100 answers about once in 100000."""
    rng = Random(1)
    records = [
        made.answer("persistent", one, f" {rng.randint(10**6, 10**7 - 1)}.") for one in range(100)
    ]
    assert not _scan(made, *records, count=100).proofs

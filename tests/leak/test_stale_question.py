"""Answers to another question on the same context: proof where they are too many for errors."""

import hashlib
from random import Random

import pytest

from ruler_bench.leak.stale_question import stale_questions
from ruler_bench.records import Record

NEEDLES = 30


def value(context, needle):
    return str(Random(f"{context} {needle}").randint(10**6, 10**7 - 1))


def prompt(context, needle):
    hidden = "".join(
        f"One of the special magic numbers for key-{one} is: {value(context, one)}. "
        for one in range(NEEDLES)
    )
    return f"{hidden}What is the special magic number for key-{needle}?"


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


PROMPTS = {sha(prompt(one, n)): prompt(one, n) for one in range(12) for n in range(NEEDLES)}


def asked(arm, context, needle, prints, position, life=1):  # noqa: PLR0917 (a row of a table)
    """A request for one needle whose answer is another's, or its own."""
    return Record(
        **{"arm": arm, "step": position, "ordinal": context, "task": "t", "length": 9},
        **{"life": life, "position": position, "predecessor": None, "depth": None},
        **{"expected": (value(context, needle),), "prompt_sha256": sha(prompt(context, needle))},
        **{"prompt_tokens": 9, "output": f" {value(context, prints)}."},
        correct=prints == needle,
    )


def pairs(arm, contexts, second, life=1):
    """Needle 3, then needle 7, of each context; the second answer is what `second` says."""
    for place, one in enumerate(contexts):
        yield asked(arm, one, 3, 3, 2 * place, life)
        yield asked(arm, one, 7, second(one), 2 * place + 1, life)


def found(streams, one_server=(), controls=()):
    return stale_questions(streams, PROMPTS, one_server, controls)


def test_two_answers_of_a_stale_prefix_are_proof_and_one_is_not():
    two = found({"two_questions": list(pairs("two_questions", range(2), lambda one: 3))})
    assert [(one.ordinal, one.value, one.position) for one in two] == [
        (0, value(0, 3), 1),
        (1, value(1, 3), 3),
    ]
    assert all(one.is_same_context for one in two)
    assert not found({"two_questions": list(pairs("two_questions", range(1), lambda one: 3))})


def test_right_answers_and_other_wrong_ones_are_none():
    for second in (lambda one: 7, lambda one: 9, lambda one: 10 + one % 9):
        assert not found({"two_questions": list(pairs("two_questions", range(12), second))})


def test_a_model_that_errs_at_random_is_not_accused():
    """Of 100 runs of a model that prints any needle, hardly one has so many hits: 0.002 at most."""
    others = [one for one in range(NEEDLES) if one != 7]
    alarms = 0
    for seed in range(100):
        draw = Random(seed)
        made = pairs("two_questions", range(12), lambda one, draw=draw: draw.choice(others))
        alarms += bool(found({"two_questions": list(made)}))
    assert alarms <= 2


def test_what_the_model_prints_by_itself_is_not_put_down_to_a_cache():
    streams = {"two_questions": list(pairs("two_questions", range(3), lambda one: 3))}
    for arm in ("fresh", "reference"):
        controls = [asked(arm, one, 7, 3, 0, life=one + 1) for one in range(3)]
        assert not found(streams, controls=controls)
    # An arm that asked it before any other question on the context says the same.
    streams["persistent"] = [asked("persistent", one, 7, 3, one) for one in range(3)]
    assert not found(streams)


@pytest.mark.parametrize("managed", [True, False])
def test_what_an_earlier_arm_left_in_a_server_of_others_counts(managed):
    """The sample is asked first; the other question then gets its answer."""
    streams = {
        "persistent": [asked("persistent", one, 3, 3, one) for one in range(3)],
        "two_questions": [
            asked("two_questions", one, needle, 3, 2 * one + place)
            for one in range(3)
            for place, needle in enumerate((7, 3))
        ],
    }
    hits = found(streams, one_server=("persistent", "two_questions") if managed else ())
    assert [one.ordinal for one in hits] == ([0, 1, 2] if managed else [])


def test_another_life_knows_nothing_of_it():
    made = [
        asked("two_questions", one, needle, 3, 0, life=2 * one + place + 1)
        for one in range(3)
        for place, needle in enumerate((3, 7))
    ]
    assert not found({"two_questions": made})

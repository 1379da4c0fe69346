"""Where two answers part, against answers written by hand."""

import dataclasses

import pytest

from ruler_bench.records import Record
from scripts.check.compare import compare_arms

RECORD = Record(
    arm="a",
    step=0,
    ordinal=7,
    task="niah_single_1",
    length=10,
    life=1,
    position=0,
    predecessor=None,
    expected=(),
    depth=None,
    prompt_sha256="p",
    prompt_tokens=9,
    output_tokens=(1, 2, 3),
    logits_digest=("x", "y", "z"),
    top2_margin=(0.5, 0.25, 0.125),
)


class Answers:
    """A ledger that holds two answers."""

    def __init__(self, got: Record, wanted: Record, settings=({}, {})) -> None:
        self.held = {"a": [got], "b": [dataclasses.replace(wanted, arm="b")]}
        self.settings = dict(zip("ab", settings, strict=True))

    def records(self, arm):
        return self.held[arm]

    def in_force(self, arm):
        return self.settings[arm]


def compare(changes, settings=({}, {}), expected=1, **options):
    got = dataclasses.replace(RECORD, **changes)
    return compare_arms(Answers(got, RECORD, settings), "a", "b", expected, **options)


def test_the_same():
    found = compare({"step": 4, "life": 2})
    assert found.passed
    assert (found.requests, found.digests, found.missing) == (1, 3, 0)


@pytest.mark.parametrize(
    ("changes", "position", "token_position", "tokens", "margins"),
    [
        ({"logits_digest": ("x", "q", "z")}, 1, None, (None, None), (0.25, 0.25)),
        ({"output_tokens": (1, 2, 9), "logits_digest": ("x", "q", "r"),
          "top2_margin": (0.5, 0.25, 0.0)}, 1, 2, (9, 3), (0.0, 0.125)),
        ({"output_tokens": (1, 2), "logits_digest": ("x", "y"), "top2_margin": (0.5, 0.25)},
         2, 2, (None, 3), (None, 0.125)),
    ],
)  # fmt: skip
def test_where_they_part(changes, position, token_position, tokens, margins):
    found = compare(changes)
    assert not found.passed
    assert found.digests == position
    (one,) = found.differences
    assert (one.position, one.token_position) == (position, token_position)
    assert (one.token_ids, one.margins) == (tokens, margins)
    assert (one.ordinal, one.prompt_tokens) == (7, 9)


@pytest.mark.parametrize(
    "changes",
    [
        {"error": "RequestError: broken"},
        {"output_tokens": (), "logits_digest": ()},
        {"logits_digest": None},
        {"logits_digest": ("x", "y")},
        {"prompt_sha256": "another"},
    ],
)
def test_what_proves_nothing(changes):
    found = compare(changes)
    assert not found.passed
    assert found.digests == 0
    assert found.differences[0].reason


def test_other_digests_are_no_matter_where_only_tokens_count():
    changes = {"logits_digest": ("q", "r", "s")}
    assert compare(changes, ({"chunk_tokens": 1}, {"chunk_tokens": 2}), tokens_only=True).passed
    assert not compare({"output_tokens": (1, 9, 3)}, tokens_only=True).passed


def test_missing_answers_and_other_settings_prove_nothing():
    assert compare({}, expected=2).missing == 1
    assert not compare({}, expected=2).passed
    assert not compare({"ordinal": 8}).passed
    assert not compare({}, ({"dtype": "float32"}, {"dtype": "bfloat16"})).passed
    assert not compare({"ordinal": 8}, expected=0).passed

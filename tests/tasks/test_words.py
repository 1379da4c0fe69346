"""Ranked words against the product they stand for."""

import importlib.metadata
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ruler_bench.errors import UsageError
from ruler_bench.tasks import words
from ruler_bench.tasks.words import AdjectiveNouns, load_words

NAMES = st.lists(st.text("ab-'~ ", min_size=1, max_size=4), min_size=1, max_size=8)


def product(adjectives: list[str], nouns: list[str]) -> list[str]:
    return sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in nouns})


def lists() -> tuple[list[str], list[str]]:
    folder = words._word_lists_folder()
    adjectives, nouns = (
        words._read_lines(folder / f"{kind}list.txt") for kind in ("adjective", "noun")
    )
    return adjectives, nouns


@given(adjectives=NAMES, nouns=NAMES)
@settings(max_examples=120, deadline=None)
def test_ranks_are_those_of_the_sorted_product(adjectives: list[str], nouns: list[str]) -> None:
    assert list(AdjectiveNouns(adjectives, nouns)) == product(adjectives, nouns)


def test_hyphenated_and_doubled_adjectives_of_the_real_lists() -> None:
    adjectives, nouns = lists()
    hyphenated = [one for one in adjectives if "-" in one]
    roots = [one.partition("-")[0] for one in hyphenated]
    doubled = [one for one in adjectives if adjectives.count(one) > 1]
    others = random.Random(0).sample(adjectives, 20)
    chosen = [*hyphenated, *(one for one in roots if one in adjectives), *doubled, *others]
    assert set(doubled) == {"wet", "nasty"}
    assert "blue" in roots
    assert list(AdjectiveNouns(chosen, nouns)) == product(chosen, nouns)


def test_the_real_lists_have_as_many_words_as_the_reference() -> None:
    assert len(load_words()) == 6_175_260


def test_the_real_words_ascend_across_every_family() -> None:
    ranked = load_words()
    near = [
        rank + offset for rank in ranked._starts[1:-1] for offset in (-2, -1, 0, 1)
    ] + random.Random(1).sample(range(len(ranked) - 1), 20_000)
    assert all(ranked[rank] < ranked[rank + 1] for rank in near)


def test_choice_draws_the_same_word_and_leaves_the_same_state() -> None:
    adjectives, nouns = ["blue", "blue-eyed", "odd"], ["eyed-cat", "cat", "dog"]
    ranked, plain = AdjectiveNouns(adjectives, nouns), product(adjectives, nouns)
    one, other = random.Random(5), random.Random(5)
    assert [one.choice(ranked) for _ in range(200)] == [other.choice(plain) for _ in range(200)]
    assert one.getstate() == other.getstate()


def test_acts_as_a_sequence() -> None:
    ranked = AdjectiveNouns(["b", "a"], ["y", "x"])
    assert ranked[-1] == "b-y"
    assert ranked[1:3] == ["a-y", "b-x"]
    with pytest.raises(IndexError):
        ranked[4]


@pytest.mark.slow
def test_every_real_word_has_the_rank_of_the_whole_product() -> None:
    """Ten seconds and a gigabyte: what the class saves."""
    assert list(load_words()) == product(*lists())


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.0.1")
    with pytest.raises(UsageError, match=r"3\.0\.1 .* pip install wonderwords==2\.2\.0"):
        words._word_lists_folder()

"""Counting in pieces against counting the whole text."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ruler_bench.splitting import SPACES
from ruler_bench.tasks import counting
from ruler_bench.tasks.counting import PartCounter, merge_parts
from ruler_bench.tokenizer import FolderTokenizer

PARTS = st.lists(
    st.text(" ab.1\n'é“", max_size=6)
    | st.sampled_from(
        [" One", " \n", "", " ", "'s x", " 's", " for odd-cat is: 12.", " is: 4d2-0a1b", "-7", "x9"]
    ),
    max_size=12,
)


@given(parts=PARTS)
def test_merged_parts_hold_the_same_text(parts: list[str]) -> None:
    assert "".join(merge_parts(parts, SPACES)) == "".join(parts)


def test_parts_are_merged_only_where_a_cut_would_matter() -> None:
    parts = ["The", " sky is", "\nblue.", " ", " One", "", " of"]
    assert list(merge_parts(parts, SPACES)) == ["The", " sky is\nblue.  One", " of"]


@given(parts=PARTS, cut=st.integers(0, 60))
@settings(deadline=None)
def test_counts_equal_those_of_the_whole_text(
    smollm2: FolderTokenizer, parts: list[str], cut: int
) -> None:
    counter = PartCounter(smollm2)
    text = "".join(parts)
    assert counter.count(parts) == smollm2.count(text)
    assert counter.count_before(parts, min(cut, len(text))) == smollm2.count(text[:cut])


def test_a_word_is_tokenised_once(make_word_tokenizer: Callable[..., object]) -> None:
    tokenizer = make_word_tokenizer()
    counter = PartCounter(tokenizer)
    assert counter.count(["a", " b", " b", " c"]) == 7
    assert tokenizer.texts_counted == 3
    assert counter.count(["a", " b", " d b"]) == 7
    assert tokenizer.texts_counted == 4


def test_what_is_remembered_stays_bounded(
    make_word_tokenizer: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "MAX_REMEMBERED", 4)
    counter = PartCounter(make_word_tokenizer())
    for start in range(0, 12, 3):
        assert counter.count(["a", *(f" {start + i}" for i in range(3))]) == 7
        assert max(len(counter._parts), len(counter._words)) <= 4


def test_an_unknown_tokenizer_counts_the_whole_text(
    make_word_tokenizer: Callable[..., object],
) -> None:
    tokenizer = make_word_tokenizer(cuts=None)
    counter = PartCounter(tokenizer)
    assert [counter.count(["a", " b", " c"]) for _ in range(2)] == [5, 5]
    assert tokenizer.texts_counted == 2

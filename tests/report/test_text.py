import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from ruler_bench.report.text import (
    code_block,
    human_bytes,
    human_number,
    human_seconds,
    markdown_cell,
    visible,
)

# Any character, lone surrogates too, and often the ones that mean something.
ANYTHING = st.text(
    alphabet=st.one_of(
        st.characters(),
        st.characters(categories=["Cs"]),
        st.sampled_from("|`\\*_[]<>&#~!-+:\n\r\t\x00\x1b\x7f\x85\u2028\u202e"),
    ),
    max_size=40,
)


@given(ANYTHING)
def test_visible_text_is_one_printable_line_that_can_be_undone(text):
    shown = visible(text)
    assert shown.isprintable()
    shown.encode("utf-8")
    assert shown.encode("ascii", "backslashreplace").decode("unicode_escape") == text


def test_long_text_is_cut_and_its_length_said():
    assert visible("ab\n" * 100, limit=4) == "ab\\na... (300 characters)"
    assert visible("abcd", limit=4) == "abcd"
    assert len(markdown_cell("x" * 10**6)) < 300


@given(ANYTHING)
def test_a_markdown_cell_renders_as_the_visible_text(text):
    token = MarkdownIt("commonmark").enable("table").parseInline(markdown_cell(text))[0]
    kinds = {child.type for child in token.children}
    assert kinds <= {"text", "text_special"}
    assert "".join(child.content for child in token.children).strip() == visible(text).strip()


def test_plain_answers_and_names_stay_readable_in_the_source():
    text = "niah_single_1: 500b8a75-0000, the answer (blue-cat) is 1234567."
    assert markdown_cell(text) == text


@given(st.lists(ANYTHING.map(visible), max_size=5))
def test_a_code_block_holds_just_its_lines(lines):
    tokens = MarkdownIt("commonmark").parse(code_block(lines) + "\n\nafter\n")
    assert [token.type for token in tokens[:2]] == ["fence", "paragraph_open"]
    assert tokens[0].content == "".join(f"{line}\n" for line in lines)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0 MiB"),
        (512, "0.5 KiB"),
        (2**20 * 1.5, "1.5 MiB"),
        (3 * 2**30, "3.00 GiB"),
    ],
)
def test_bytes(value, text):
    assert human_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.01234, "12.3 ms"), (1.0, "1.00 s"), (75.5, "75.50 s")]
)
def test_seconds(value, text):
    assert human_seconds(value) == text


def test_numbers():
    assert human_number(None, 2) == "-"
    assert human_number(91.666, 2) == "91.67"

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ruler_bench.errors import UsageError
from ruler_bench.score import cell_score, is_null, postprocess, score

# Few letters, so that matches, cases and control characters meet often.
TEXT = st.text(alphabet="aAbB1İß \t\n\x00\x1f\x7f\u2028", max_size=12)
REFERENCES = st.lists(st.text(alphabet="aAbB1", min_size=1, max_size=3), min_size=1, max_size=4)


def occurs(reference, output):
    """A letter by letter reading of RULER's rule, without strip, regular expressions or `in`."""
    text = list(output)
    for _ in range(2):
        while text and text[0].isspace():
            text.pop(0)
        while text and text[-1].isspace():
            text.pop()
        text = ["\n" if ord(letter) < 32 else letter for letter in text]
    haystack, needle = "".join(text).lower(), reference.lower()
    starts = range(len(haystack) - len(needle) + 1)
    return any(all(haystack[at + i] == letter for i, letter in enumerate(needle)) for at in starts)


@given(TEXT, REFERENCES)
def test_scores_equal_a_letter_by_letter_reading(output, references):
    found = [occurs(reference, output) for reference in references]
    assert score("all", output, references) == pytest.approx(
        100 * float(Fraction(sum(found), len(found)))
    )
    assert score("part", output, references) == (100.0 if any(found) else 0.0)


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("  12 \n", "12"),
        ("\x00\x01 12 \x1f", "12"),
        ("12\x00345", "12\n345"),
        ("a\tb\r\nc", "a\nb\n\nc"),
        ("a\x7fb\x85c", "a\x7fb\x85c"),
        (" \x00\t\n ", ""),
        ("", ""),
    ],
)
def test_postprocess(output, text):
    assert postprocess(output) == text
    assert is_null(output) == (text == "")


@pytest.mark.parametrize(
    ("output", "references", "all_", "part"),
    [
        ("The number is 1234567.", ["1234567"], 100, 100),
        ("91234567", ["1234567"], 100, 100),
        ("123\x004567", ["1234567"], 0, 0),
        ("123\n4567", ["1234567"], 0, 0),
        ("12345671234567", ["1234567", "7123"], 100, 100),
        ("NORMANS of FRANCE", ["the Normans", "Normans", "France"], 200 / 3, 100),
        ("normans", ["Normans"], 100, 100),
        ("", ["1"], 0, 0),
        (" \n\x00", ["1"], 0, 0),
        ("", [""], 100, 100),
        ("1, 2", ["1", "2", "3", "4"], 50, 100),
        ("1", ["1", "1"], 100, 100),
        ("anything", [None], 0, 0),
        ("1", ["1", None], 50, 100),
    ],
)
def test_cases(output, references, all_, part):
    assert score("all", output, references) == pytest.approx(all_)
    assert score("part", output, references) == part


@pytest.mark.parametrize("parts", range(1, 101))
def test_only_a_full_match_is_exactly_100(parts):
    references = [f"<{number}>" for number in range(parts)]
    assert score("all", "".join(references), references) == 100.0
    assert score("all", "".join(references[1:]), references) < 100.0


# Worked out by the metric functions of the reference (commit c3f5e3b, Python 3.11): outputs of
# which the first `hits` hold the first reference, the others none.
@pytest.mark.parametrize(
    ("samples", "hits", "references", "all_", "part"),
    [
        (3, 1, 1, 33.33, 33.33),
        (3, 2, 1, 66.67, 66.67),
        (7, 5, 4, 17.86, 71.43),
        (800, 1, 1, 0.12, 0.12),
        (800, 3, 1, 0.38, 0.38),
        (500, 333, 3, 22.2, 66.6),
        (1600, 7, 1, 0.44, 0.44),
        (96, 43, 3, 14.93, 44.79),
        (20, 20, 3, 33.33, 100.0),
        (160, 1, 10, 0.06, 0.62),
    ],
)
def test_cell_scores_round_as_the_reference_does(samples, hits, references, all_, part):
    expected = [[f"<{number}>" for number in range(references)]] * samples
    outputs = ["<0>"] * hits + ["no"] * (samples - hits)
    assert cell_score("all", outputs, expected) == all_
    assert cell_score("part", outputs, expected) == part


@given(st.lists(st.tuples(TEXT, REFERENCES), min_size=1, max_size=30))
def test_a_cell_score_is_the_rounded_mean(samples):
    outputs, expected = zip(*samples, strict=True)
    for metric in ("all", "part"):
        mean = sum(score(metric, *sample) for sample in samples) / len(samples)
        assert cell_score(metric, outputs, expected) == pytest.approx(mean, abs=0.005 + 1e-9)


def test_unknown_metrics_and_missing_references_are_refused():
    with pytest.raises(UsageError, match=r"unknown metric 'al'.*Did you mean 'all'"):
        score("al", "1", ["1"])
    with pytest.raises(ValueError, match="reference"):
        score("all", "1", [])
    with pytest.raises(ValueError, match="no outputs"):
        cell_score("all", [], [])

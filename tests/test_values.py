import pytest
from hypothesis import given
from hypothesis import strategies as st

from ruler_bench.errors import UsageError
from ruler_bench.values import as_indices, parse_ordinals


@given(st.sets(st.integers(0, 300), min_size=1, max_size=30))
def test_ordinals_are_read_as_written(chosen):
    entries, expected = [], sorted(chosen)
    for one in expected:
        entries.append(f"{one}-{one}" if one % 3 == 0 else one)
    assert parse_ordinals(entries, 20) == tuple(expected)


@given(st.sets(st.integers(0, 60), min_size=1, max_size=30))
def test_ordinals_written_as_indices_read_back(chosen):
    entries = as_indices(sorted(chosen))
    read = [int(one) if one.isdigit() else one for one in entries]
    assert parse_ordinals(read, 1) == tuple(sorted(chosen))


def test_ranges_include_both_ends():
    assert parse_ordinals(["0-4", 9], 1) == (0, 1, 2, 3, 4, 9)
    assert parse_ordinals(None, 3) == (0, 1, 2)


@pytest.mark.parametrize(
    "entry", ["a", "1-", "3-1", -1, 1.5, True, None, "0-99999999", "\u0663-\u0665"]
)
def test_anything_else_is_refused(entry):
    with pytest.raises(UsageError, match="out of range"):
        parse_ordinals([entry], 20)

"""When to ask again."""

import email.utils

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.openai_server.retry import Policy, retry_after_seconds

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        (" 12 ", 12.0),
        (email.utils.formatdate(NOW + 30, usegmt=True), 30.0),
        (email.utils.formatdate(NOW - 30, usegmt=True), 0.0),
        ("Fri, 15 Jan 2027 08:00:30 GMT", 30.0),
        ("", None),
        ("-5", None),
        ("soon", None),
        ("1.5", None),
        ("²", None),
        ("Fri, 99 Jan 2027 08:00:30 GMT", None),
        ("Fri, 15 Jan 2027 08:00:30 -0000", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(text, seconds):
    assert retry_after_seconds({"retry-after": text}, NOW) == seconds


def test_without_the_header_nothing_is_asked_for():
    assert retry_after_seconds({}, NOW) is None


@given(st.text(max_size=60))
def test_no_header_is_an_error_or_a_time_travel(text):
    found = retry_after_seconds({"retry-after": text}, NOW)
    assert found is None or found >= 0


@given(st.integers(0, 200), st.none() | st.floats(0, 1e12))
def test_no_wait_is_longer_than_allowed(retry, asked):
    policy = Policy(backoff_seconds=0.5, max_wait_seconds=60.0)
    assert 0 <= policy.wait_seconds(retry, asked) <= 60


def test_waits_double_and_the_server_goes_before():
    policy = Policy(backoff_seconds=0.5, max_wait_seconds=60.0)
    assert [policy.wait_seconds(one, None) for one in range(4)] == [0.5, 1.0, 2.0, 4.0]
    assert policy.wait_seconds(3, 7.0) == 7.0

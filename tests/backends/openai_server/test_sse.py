"""Events of a stream, however it is cut."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base import RequestError
from backends.openai_server import sse


def read(pieces):
    async def chunks():
        for one in pieces:
            yield one

    async def collect():
        return [one async for one in sse.events(chunks())]

    return asyncio.run(collect())


def cut(data, places):
    ends = [*sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(
    st.lists(st.text(), max_size=5),
    st.lists(st.integers(0, 10_000), max_size=8),
    st.sampled_from(["\n", "\r\n"]),
)
def test_what_was_put_in_comes_out_wherever_it_is_cut(texts, places, end):
    put = [json.dumps(one, ensure_ascii=False) for one in texts]
    data = "".join(f": ping{end}event: x{end}data: {one}{end}{end}" for one in put).encode()
    assert read(cut(data, places)) == put


def test_lines_of_one_event_are_joined_and_a_space_is_optional():
    assert read([b"data: a\ndata:b\n\ndata:  c\n\n"]) == ["a\nb", " c"]


def test_an_event_that_is_not_ended_is_none():
    assert read([b"data: a\n\ndata: b\n"]) == ["a"]


def test_a_line_without_end_is_an_error_and_not_kept(monkeypatch):
    monkeypatch.setattr(sse, "MAX_LINE_BYTES", 100)
    with pytest.raises(RequestError, match="a line of more than 100 bytes"):
        read([b"x" * 60, b"x" * 60])


def test_what_is_no_text_is_an_error():
    with pytest.raises(RequestError, match="no UTF-8"):
        read([b"data: \xff\n\n"])

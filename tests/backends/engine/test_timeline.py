"""Timelines: the trace that a request leaves, and the share of copies hidden behind kernels."""

import gzip
import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from backends.base import ConfigurationError, RequestError
from backends.engine import timeline
from backends.engine.timeline import Timeline, device_intervals, hidden_share

CPU = torch.device("cpu")

spans = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 12)).map(lambda one: (one[0], sum(one))),
    max_size=8,
)


def units(intervals):
    """The units of whole-numbered time that the intervals cover."""
    return {unit for start, end in intervals for unit in range(start, end)}


@given(copies=spans, kernels=spans)
def test_hidden_share_against_counting_units_of_time(copies, kernels):
    copying, computing = units(copies), units(kernels)
    share = hidden_share(copies, kernels)
    if not copying:
        assert share is None
    else:
        assert share == float(Fraction(len(copying & computing), len(copying)))


def event(name, start, end, annotation=False):
    time_range = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=time_range, is_user_annotation=annotation)


def test_which_events_are_copies_and_which_kernels():
    copies, kernels = device_intervals(
        [
            event("Memcpy HtoD (Pinned -> Device)", 1.0, 2.5),
            event("Memcpy DtoH (Device -> Pageable)", 3.001, 4.0),
            event("Memcpy DtoD (Device -> Device)", 0.0, 9.0),
            event("Memset (Device)", 0.0, 9.0),
            event("decode", 0.0, 9.0, annotation=True),
            event("flash_fwd_kernel<128>", 2.0, 3.0),
        ]
    )
    assert copies == [(1000, 2500), (3001, 4000)]
    assert kernels == [(2000, 3000)]


def compute():
    torch.ones(8, 8) @ torch.ones(8, 8)


def read(path):
    with gzip.open(path) as file:
        return json.load(file)


def test_a_request_leaves_a_chrome_trace(tmp_path):
    folder = tmp_path / "deep" / "traces"
    traced = Timeline(folder, CPU)
    for request_id in (3, 12):
        with traced.request(request_id):
            compute()
        assert traced.copy_hidden_share() is None
    assert sorted(path.name for path in folder.iterdir()) == [
        "request_000003.json.gz",
        "request_000012.json.gz",
    ]
    for path in folder.iterdir():
        trace = read(path)
        operations = [one for one in trace["traceEvents"] if one.get("cat") == "cpu_op"]
        assert {"aten::ones", "aten::mm"} <= {one["name"] for one in operations}
        # What a viewer needs of a complete event.
        for one in operations:
            assert one["ph"] == "X"
            assert one["dur"] >= 0
            assert {"ts", "pid", "tid"} <= one.keys()
        # What no reader needs.
        assert trace.get("host_name", "") == trace.get("traceName", "") == ""
        assert str(folder) not in json.dumps(trace)


def test_a_request_that_fails_is_traced_too_and_the_next_one(tmp_path):
    traced = Timeline(tmp_path, CPU)

    def fail():
        compute()
        raise RequestError("out of it")

    with pytest.raises(RequestError, match="out of it"), traced.request(0):
        fail()
    with traced.request(1):
        compute()
    names = [
        {
            one.get("name")
            for one in read(tmp_path / f"request_00000{request}.json.gz")["traceEvents"]
        }
        for request in (0, 1)
    ]
    assert all("aten::mm" in one for one in names)


def test_an_older_trace_is_replaced(tmp_path):
    (tmp_path / "request_000000.json.gz").write_bytes(b"old")
    with Timeline(tmp_path, CPU).request(0):
        compute()
    assert read(tmp_path / "request_000000.json.gz")["traceEvents"]


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


def test_beside_another_profiler_nothing_is_run_and_its_events_are_kept(tmp_path):
    traced = Timeline(tmp_path, CPU)
    with profile(activities=[ProfilerActivity.CPU]) as other:
        compute()
        with pytest.raises(ConfigurationError) as error, traced.request(0):
            raise AssertionError("it was run")
    assert f"backend.timeline={tmp_path}: another torch.profiler is running" in one_line(error)
    assert "aten::mm" in {one.name for one in other.events()}
    assert list(tmp_path.iterdir()) == []
    with traced.request(0):
        compute()


def test_a_profiler_that_does_not_start(tmp_path, monkeypatch):
    def refuse(_self):
        raise RuntimeError("no\nkineto")

    monkeypatch.setattr(timeline.profile, "start", refuse)
    with pytest.raises(ConfigurationError) as error, Timeline(tmp_path, CPU).request(0):
        raise AssertionError("it was run")
    assert "torch.profiler cannot start (no kineto)" in one_line(error)


def test_a_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError) as error:
        Timeline(tmp_path / "file", CPU)
    assert "cannot be used (File exists)" in one_line(error)


def test_a_trace_that_cannot_be_written(tmp_path):
    folder = tmp_path / "traces"
    traced = Timeline(folder, CPU)
    with pytest.raises(RequestError) as error, traced.request(0):
        folder.rmdir()
    assert "request 0: its trace" in one_line(error)
    assert "No such file or directory" in one_line(error)


def test_a_trace_that_was_cut_short_leaves_no_file(tmp_path, monkeypatch):
    def cut(_self, path):
        Path(path).write_text('{"traceEvents": [\n{"ph":')

    monkeypatch.setattr(timeline.profile, "export_chrome_trace", cut)
    with pytest.raises(RequestError) as error, Timeline(tmp_path, CPU).request(0):
        compute()
    assert "cut short" in one_line(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_copies_beside_kernels_are_hidden_and_copies_alone_are_not(tmp_path):
    device = torch.device("cuda", 0)
    source = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    factor = torch.randn(4096, 4096, device=device)
    stream = torch.cuda.Stream(device)
    product = factor @ factor  # everything is loaded before it is traced

    def copy():
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    copy()
    torch.cuda.synchronize(device)
    traced = Timeline(tmp_path, device)

    with traced.request(0):
        for _ in range(40):
            torch.mm(factor, factor, out=product)
        copy()
        for _ in range(40):
            torch.mm(factor, factor, out=product)
    hidden = traced.copy_hidden_share()
    with traced.request(1):
        copy()
    alone = traced.copy_hidden_share()
    with traced.request(2):
        torch.mm(factor, factor, out=product)
    assert traced.copy_hidden_share() is None
    assert alone == 0
    assert 0.5 < hidden <= 1
    categories = {
        one.get("cat") for one in read(tmp_path / "request_000000.json.gz")["traceEvents"]
    }
    assert {"kernel", "gpu_memcpy"} <= categories

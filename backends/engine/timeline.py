"""Timelines: a Chrome trace a request, and the share of copy time that was hidden behind compute.

Open a trace in ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import contextlib
import gzip
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch._C._autograd import DeviceType, _profiler_enabled
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, supported_activities

from backends.base import ConfigurationError, RequestError

Interval = tuple[float, float]
"""Start and end of some work, in any unit of time; the end is not before the start."""

_COPIES = ("Memcpy HtoD", "Memcpy DtoH")
_NO_KERNELS = ("Memcpy", "Memset")
# A trace is for sharing: it should not tell the machine's name and folders.
_PRIVATE = re.compile(rb'"(host_name|traceName)": "(?:[^"\\]|\\.)*"')


class Timeline:
    """Traces requests through torch.profiler, one file a request: `request_000007.json.gz`.

    A tool for looking at the order of work, not for measuring it: profiling costs time, on the
    host above all, so that the times of a traced request are not speed figures. The share of
    hidden copies is one of the traced run.

    Args:
        folder: where to write; made when it is not there. An older trace of the same number is
            replaced.
        device: where the engine computes. On a CPU only the host's work is traced.

    Raises:
        ConfigurationError: the folder cannot be used, or this torch cannot trace the device.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder = folder
        self._device = device
        self._copy_hidden_share: float | None = None
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
            if ProfilerActivity.CUDA not in supported_activities():  # type: ignore[no-untyped-call]
                raise ConfigurationError(
                    f"backend.timeline={folder}: PyTorch {torch.__version__} was built without "
                    "CUPTI and cannot trace a GPU; install another build, or set "
                    "backend.timeline=null."
                )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"backend.timeline={folder}: cannot be used ({error.strerror}); name a folder "
                "that can be written."
            ) from error

    @contextlib.contextmanager
    def request(self, request_id: int) -> Iterator[None]:
        """Trace what is done within; the trace is written also where that fails.

        Raises:
            ConfigurationError: something else is being profiled; nothing was run.
            RequestError: the trace cannot be written.
        """
        self._copy_hidden_share = None
        profiler = self._start()
        try:
            yield
        except BaseException:
            # What failed is what matters; the trace of it is a help if it can be had.
            with contextlib.suppress(Exception):
                self._finish(profiler, request_id)
            raise
        self._finish(profiler, request_id)

    def copy_hidden_share(self) -> float | None:
        """Return the share of the last request's copy time during which a kernel ran too.

        Copies are all those between host and device. None where there were none, on a CPU, where
        copies are not concurrent, and where another profiler keeps the device's events.
        """
        return self._copy_hidden_share

    def _start(self) -> profile:
        # A second profiler does not fail: it takes the first one's events away in silence.
        if _profiler_enabled():
            raise ConfigurationError(
                f"backend.timeline={self._folder}: another torch.profiler is running in this "
                "process; stop it, or set backend.timeline=null."
            )
        profiler = profile(activities=self._activities)
        try:
            profiler.start()
        except RuntimeError as error:
            raise ConfigurationError(
                f"backend.timeline={self._folder}: torch.profiler cannot start "
                f"({' '.join(str(error).split())}); set backend.timeline=null."
            ) from error
        return profiler

    def _finish(self, profiler: profile, request_id: int) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        finally:
            profiler.stop()
        if self._device.type == "cuda":
            self._copy_hidden_share = hidden_share(*device_intervals(_on(profiler, self._device)))
        path = self._folder / f"request_{request_id:06d}.json.gz"
        try:
            _write(profiler, path)
        except OSError as error:
            raise RequestError(
                f"request {request_id}: its trace {path} cannot be written ({error.strerror}); "
                "make room, or set backend.timeline=null"
            ) from error


def _on(profiler: profile, device: torch.device) -> Iterator[FunctionEvent]:
    """Yield the events that ran on a GPU."""
    for event in profiler.events() or ():  # type: ignore[no-untyped-call]
        if event.device_type == DeviceType.CUDA and (
            device.index is None or event.device_index == device.index
        ):
            yield event


def device_intervals(events: Iterable[FunctionEvent]) -> tuple[list[Interval], list[Interval]]:
    """Return when copies between host and device ran, and when kernels did, in nanoseconds.

    Args:
        events: of one GPU. Named ranges of the program also appear there, and are no kernels.
    """
    copies: list[Interval] = []
    kernels: list[Interval] = []
    for event in events:
        span = (round(event.time_range.start * 1000), round(event.time_range.end * 1000))
        if event.name.startswith(_COPIES):
            copies.append(span)
        elif not event.name.startswith(_NO_KERNELS) and not event.is_user_annotation:
            kernels.append(span)
    return copies, kernels


def hidden_share(copies: Iterable[Interval], kernels: Iterable[Interval]) -> float | None:
    """Return the share of the time with a copy that is time with a kernel too.

    Time during which several copies run counts once.

    Args:
        copies: in any order, and they may overlap.
        kernels: likewise.

    Returns:
        0 to 1, or None where copies take no time.
    """
    copying, computing = _union(copies), _union(kernels)
    total = sum(end - start for start, end in copying)
    if not total:
        return None
    hidden: float = 0
    place = 0
    for start, end in copying:
        while place < len(computing) and computing[place][1] <= start:
            place += 1
        # The last one that is looked at may reach into the next copy, so `place` stays.
        for low, high in _until(computing, place, end):
            hidden += min(end, high) - max(start, low)
    return hidden / total


def _until(spans: list[Interval], place: int, end: float) -> Iterator[Interval]:
    while place < len(spans) and spans[place][0] < end:
        yield spans[place]
        place += 1


def _union(spans: Iterable[Interval]) -> list[Interval]:
    """Return ascending spans, none touching another, that cover the same time."""
    merged: list[Interval] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _write(profiler: profile, path: Path) -> None:
    """Write the trace; it appears whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    plain, packed = path.with_suffix(".part"), path.with_suffix(".gz.part")
    try:
        plain.touch()  # the exporter reports nothing that goes wrong
        profiler.export_chrome_trace(str(plain))
        last = b""
        with plain.open("rb") as source, gzip.open(packed, "wb", 6) as target:
            for line in source:
                target.write(_PRIVATE.sub(rb'"\1": ""', line))
                last = line.strip() or last
        if not last.endswith(b"}"):
            raise OSError(0, "it was cut short; the disk may be full")
        packed.replace(path)
    finally:
        for part in (plain, packed):
            part.unlink(missing_ok=True)

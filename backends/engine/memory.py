"""The engine's memory plan: every buffer is declared here before one is allocated.

Nothing in this file allocates. The plan is printed, checked against what the machine has, and
refused with the largest setting that would fit. Throughout, "gb" in a key means GiB, 2**30 bytes.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch

from backends.base import ConfigurationError
from backends.engine.host_memory import detect_host_memory

Place = Literal["device", "host"]
Part = Literal["weights", "kv_ring", "kv_device", "kv_host", "activations", "other"]

GIB = 2**30
DEVICE_CAP_KEY = "backend.device_memory_gb"
HOST_MEMORY_KEY = "backend.host_memory_gb"

OUTSIDE_ALLOCATOR_BYTES = GIB
"""What a process takes of a GPU beside its tensors: an allowance, not a measurement.

It stands for the CUDA context, the kernels that cuBLAS, cuDNN and PyTorch load when they first run
and their workspaces, and for what PyTorch's allocator loses by rounding (up to 2 MiB a large
tensor). Free memory that is asked for once the context exists no longer holds the context, so a
plan against it keeps some of this twice: on the safe side.
"""

_MOST_GB = 2**30


@dataclass(frozen=True, slots=True)
class Buffer:
    """One tensor that is allocated for good, or the room that a step takes at most."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: Place
    part: Part

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan may take. None is no limit.

    Attributes:
        device_reason, host_reason: where the limit comes from, in words for a message.
        host_may_grow: the host limit is what is there now, and the machine may get more.
        device_is_host: device buffers lie in host memory (the CPU device) and count there, too.
    """

    device_bytes: int | None
    device_reason: str
    host_bytes: int | None
    host_reason: str
    host_may_grow: bool
    device_is_host: bool = False


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All buffers of an engine."""

    buffers: tuple[Buffer, ...]

    @property
    def device_bytes(self) -> int:
        """Bytes of all device buffers."""
        return sum(self.bytes_by_part("device").values())

    @property
    def host_bytes(self) -> int:
        """Bytes of all host buffers."""
        return sum(self.bytes_by_part("host").values())

    def bytes_by_part(self, place: Place) -> dict[Part, int]:
        """Return the bytes of each part that has buffers in a place, in the order of `Part`."""
        sums: dict[Part, int] = {
            part: 0
            for part in get_args(Part)
            if any((buffer.part, buffer.place) == (part, place) for buffer in self.buffers)
        }
        for buffer in self.buffers:
            if buffer.place == place:
                sums[buffer.part] += buffer.nbytes
        return sums

    def lines(self, limits: Limits | None = None) -> list[str]:
        """Return the table that is printed before anything is allocated.

        One line a part, then the totals, with their limits where these are given.
        """
        places: tuple[Place, ...] = ("device", "host")
        sums = {place: self.bytes_by_part(place) for place in places}
        rows = [
            (
                part,
                " + ".join(
                    f"{format_bytes(sums[at][part])} {at}" for at in places if part in sums[at]
                ),
            )
            for part in get_args(Part)
            if any(part in sums[at] for at in places)
        ]
        host_bytes, beside = self.host_bytes, _beside(limits, "host")
        if limits is not None and limits.device_is_host:
            host_bytes, beside = host_bytes + self.device_bytes, f", device included,{beside}"
        rows += [
            ("device total", format_bytes(self.device_bytes) + _beside(limits, "device")),
            ("host total", format_bytes(host_bytes) + beside),
        ]
        return [f"{name:<13} {text}" for name, text in rows]

    def to_json(self) -> dict[str, Any]:
        """Return totals, parts and buffers as plain JSON values."""
        return {
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "device_bytes_by_part": self.bytes_by_part("device"),
            "host_bytes_by_part": self.bytes_by_part("host"),
            "buffers": [
                {
                    "name": buffer.name,
                    "shape": list(buffer.shape),
                    "dtype": str(buffer.dtype).removeprefix("torch."),
                    "place": buffer.place,
                    "part": buffer.part,
                    "bytes": buffer.nbytes,
                }
                for buffer in self.buffers
            ],
        }


class Alternative(NamedTuple):
    """A setting that makes a plan smaller when it is lowered.

    Attributes:
        key: its name for the user, such as "backend.max_model_len".
        current: its value now.
        plan_for: the plan under another value, all else equal; it must grow with the value.
        candidates: values that are allowed, ascending.
    """

    key: str
    current: int
    plan_for: Callable[[int], MemoryPlan]
    candidates: Sequence[int]


def context_allowance(device: torch.device) -> tuple[Buffer, ...]:
    """Return the buffer that stands for what lies outside the allocator; none on the CPU."""
    if device.type == "cpu":
        return ()
    return (Buffer("cuda_context", (OUTSIDE_ALLOCATOR_BYTES,), torch.uint8, "device", "other"),)


def read_limits(
    device: torch.device, device_memory_gb: float | None, host_memory_gb: float | None
) -> Limits:
    """Find what a new engine may take, now, before it allocates anything.

    On CUDA that is the device memory that is free or idle in this process's allocator, and at most
    the cap less what this process holds already. On the CPU device only the cap limits device
    buffers; they lie in host memory and count there, too.

    Args:
        device: where the engine computes.
        device_memory_gb: the cap in GiB (2**30 bytes), or None.
        host_memory_gb: GiB of host memory that may be taken, in place of what is detected.

    Raises:
        ConfigurationError: a figure is not a number above 0.
    """
    cap_bytes = _gb_to_bytes(DEVICE_CAP_KEY, device_memory_gb)
    host_bytes = _gb_to_bytes(HOST_MEMORY_KEY, host_memory_gb)
    if host_bytes is None:
        detected = detect_host_memory()
        host_reason = f"{detected.source}; {HOST_MEMORY_KEY} overrides it"
        host_bytes, may_grow = detected.available_bytes, detected.may_grow
    else:
        host_reason, may_grow = f"{HOST_MEMORY_KEY}={host_memory_gb}", False
    device_bytes, device_reason = cap_bytes, f"cap {DEVICE_CAP_KEY}={device_memory_gb}"
    if device.type == "cpu":
        device_reason = device_reason if cap_bytes is not None else "host memory"
    else:
        held = torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - held
        if cap_bytes is None or free < cap_bytes - held:
            device_bytes, device_reason = free, "free device memory"
        elif held:
            device_bytes = max(0, cap_bytes - held)
            device_reason += f" less {format_bytes(held)} that this process already holds"
    return Limits(
        device_bytes, device_reason, host_bytes, host_reason, may_grow, device.type == "cpu"
    )


def check(plan: MemoryPlan, limits: Limits, alternatives: Iterable[Alternative] = ()) -> list[str]:
    """Refuse a plan that does not fit, naming the largest setting that would.

    Args:
        plan: what is to be allocated.
        limits: what there is.
        alternatives: settings to lower, tried in order; the first that helps is named.

    Returns:
        Warnings to print: host memory that is not there yet, on a machine that may get more.

    Raises:
        ConfigurationError: the plan does not fit.
    """
    overruns = _overruns(plan, limits)
    refused = [overrun for overrun in overruns if not overrun.may_grow]
    if not refused:
        return [
            f"{overrun.words()}; going on, since this machine shows signs that its memory grows "
            "on demand."
            for overrun in overruns
        ]
    needs = " and ".join(overrun.words() for overrun in refused)
    advice = _advice(refused, limits, alternatives)
    raise ConfigurationError(f"The memory plan does not fit: {needs}; {advice}.")


def cap_device(
    device: torch.device, device_memory_gb: float | None, outside_bytes: int = 0
) -> None:
    """Hold this process to a share of the device; more is torch.OutOfMemoryError.

    PyTorch's allocator is what is held, so the context and what else lies outside it come on top,
    unless they are taken off the cap here. The CPU device has no allocator to hold: there the plan
    alone is checked.

    Args:
        device: the device.
        device_memory_gb: the cap in GiB (2**30 bytes); None takes an earlier cap off.
        outside_bytes: taken off the cap for what lies outside the allocator.

    Raises:
        ConfigurationError: the cap is not a number above 0, more than the device has, or not more
            than `outside_bytes`.
    """
    cap_bytes = _gb_to_bytes(DEVICE_CAP_KEY, device_memory_gb)
    if device.type == "cpu":
        return
    if cap_bytes is None:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    if cap_bytes > total_bytes:
        raise ConfigurationError(
            f"{DEVICE_CAP_KEY}={device_memory_gb} (GiB, 2**30 bytes) is more than the "
            f"{format_bytes(total_bytes)} of {device}: lower it, or leave it null for no cap."
        )
    if cap_bytes <= outside_bytes:
        raise ConfigurationError(
            f"{DEVICE_CAP_KEY}={device_memory_gb} (GiB, 2**30 bytes) leaves nothing for tensors: "
            f"{format_bytes(outside_bytes)} are kept for the CUDA context."
        )
    fraction = (cap_bytes - outside_bytes) / total_bytes
    torch.cuda.set_per_process_memory_fraction(fraction, device)


def require_memory_gb(key: str, value: object) -> None:
    """Raise ConfigurationError unless `value` is None or a number of GiB above 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN fails both comparisons.
    if value is None or (number and 1 / GIB <= value <= _MOST_GB):  # type: ignore[operator]
        return
    raise ConfigurationError(
        f"{key}={value!r} is not a number of GiB (2**30 bytes) above 0; leave it null to have no "
        "say."
    )


def format_bytes(count: int) -> str:
    """Write a size in GiB, or in MiB below 0.1 GiB."""
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:.2f} MiB"


class _Overrun(NamedTuple):
    """A limit that a plan breaks."""

    place: Place
    needed_bytes: int
    weight_bytes: int
    limit_bytes: int
    reason: str
    may_grow: bool

    @property
    def weights_alone(self) -> bool:
        return self.weight_bytes > self.limit_bytes

    def words(self) -> str:
        needed_bytes = self.weight_bytes if self.weights_alone else self.needed_bytes
        needed, there = format_bytes(needed_bytes), format_bytes(self.limit_bytes)
        if needed == there:
            needed, there = f"{needed_bytes} bytes", f"{self.limit_bytes} bytes"
        who = "the weights alone need" if self.weights_alone else "the buffers need"
        return f"{who} {needed} of {self.place} memory, but there are {there} ({self.reason})"


def _overruns(plan: MemoryPlan, limits: Limits) -> list[_Overrun]:
    device, host = plan.bytes_by_part("device"), plan.bytes_by_part("host")
    device_sums = sum(device.values()), device.get("weights", 0)
    host_sums = sum(host.values()), host.get("weights", 0)
    if limits.device_is_host:
        host_sums = host_sums[0] + device_sums[0], host_sums[1] + device_sums[1]
    overruns = []
    if limits.device_bytes is not None and device_sums[0] > limits.device_bytes:
        overruns.append(
            _Overrun("device", *device_sums, limits.device_bytes, limits.device_reason, False)
        )
    if limits.host_bytes is not None and host_sums[0] > limits.host_bytes:
        overruns.append(
            _Overrun(
                "host", *host_sums, limits.host_bytes, limits.host_reason, limits.host_may_grow
            )
        )
    return overruns


def _advice(refused: list[_Overrun], limits: Limits, alternatives: Iterable[Alternative]) -> str:
    if any(overrun.weights_alone for overrun in refused):
        return "raise that limit, or take a smaller model or dtype"
    tried = []
    for alternative in alternatives:
        fitting = _largest_fitting(alternative, limits)
        if fitting is not None:
            return (
                f"lower {alternative.key} from {alternative.current} to {fitting}, the largest "
                "that fits"
            )
        tried.append(alternative.key)
    if not tried:
        return "raise that limit, or take a smaller model"
    return f"no lower {' or '.join(tried)} would fit alone: raise that limit, or lower several"


def _largest_fitting(alternative: Alternative, limits: Limits) -> int | None:
    """Return the largest candidate below the current value whose plan fits, or None."""

    def is_too_large(value: int) -> bool:
        return any(
            not overrun.may_grow for overrun in _overruns(alternative.plan_for(value), limits)
        )

    candidates = alternative.candidates
    lower = bisect.bisect_left(candidates, alternative.current)
    count = bisect.bisect_left(candidates, True, hi=lower, key=is_too_large)
    return candidates[count - 1] if count else None


def _beside(limits: Limits | None, place: Place) -> str:
    if limits is None:
        return ""
    limit = limits.device_bytes if place == "device" else limits.host_bytes
    reason = limits.device_reason if place == "device" else limits.host_reason
    if limit is None:
        return f" (no limit but {reason})" if reason else ""
    return f" of {format_bytes(limit)} ({reason})"


def _gb_to_bytes(key: str, value: float | None) -> int | None:
    require_memory_gb(key, value)
    return None if value is None else int(value * GIB)

"""Values of keys: their ranges, lengths, ordinals, devices. Wrong ones are refused by name."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from ruler_bench.errors import UsageError, unknown_name

MAX_SEED = 2**32 - 1
MAX_ORDINAL = 999_999
MAX_THREADS = 1024
MAX_TIMEOUT_SECONDS = 1_000_000
MAX_LENGTH = 1 << 24  # keeps a slip of the keyboard from filling memory with one sample


def check_int(key: str, value: Any, low: int, high: int | None = None) -> int:
    """Return `value` as an integer within [low, high].

    Raises:
        UsageError: it is no integer or out of range; names the key, the value and what is allowed.
    """
    allowed = f"an integer of at least {low}" if high is None else f"an integer in {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{key}={value}: must be {allowed}.")
    if value < low or (high is not None and value > high):
        raise UsageError(f"{key}={value}: out of range; must be {allowed}.")
    return value


def parse_lengths(value: Any) -> tuple[int, ...]:
    """Return the lengths that `length` names: an integer or a list of different integers."""
    values = value if isinstance(value, list) else [value]
    if not values:
        raise UsageError("length=[]: names no length; for instance length=4096 or [4096,8192].")
    lengths = tuple(check_int("length", one, 1, MAX_LENGTH) for one in values)
    if len(set(lengths)) != len(lengths):
        raise UsageError(f"length={shown(values)}: names a length twice.")
    return lengths


_RANGE = re.compile(r"([0-9]+)-([0-9]+)")


def parse_ordinals(indices: Any, num_samples: int) -> tuple[int, ...]:
    """Return the ordinals to run, ascending: `indices` where given, else the first num_samples.

    Raises:
        UsageError: an entry is neither an ordinal nor a range LOW-HIGH, or appears twice.
    """
    if indices is None:
        return tuple(range(num_samples))
    if not isinstance(indices, list) or not indices:
        raise UsageError(
            f"indices={shown(indices)}: must be a list of ordinals and ranges, "
            "for instance indices=[0-4,9] or indices=[17,37]."
        )
    ordinals: list[int] = []
    for entry in indices:
        ordinals.extend(_expand(entry))
    doubled = [one for one, count in Counter(ordinals).items() if count > 1]
    if doubled:
        raise UsageError(f"indices={shown(indices)}: names ordinal {min(doubled)} twice.")
    return tuple(sorted(ordinals))


def _expand(entry: Any) -> Sequence[int]:
    if isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry <= MAX_ORDINAL:
        return [entry]
    match = _RANGE.fullmatch(entry) if isinstance(entry, str) else None
    if match:
        low, high = int(match[1]), int(match[2])
        if low <= high <= MAX_ORDINAL:
            return range(low, high + 1)
    raise UsageError(
        f"indices: {entry!r} is out of range; each entry must be an ordinal (0 to {MAX_ORDINAL}) "
        "or a range such as 0-4."
    )


def as_indices(ordinals: Sequence[int]) -> list[str]:
    """Return ascending ordinals as one would type them: "7" or "0-19"."""
    runs: list[list[int]] = []
    for one in ordinals:
        if runs and one == runs[-1][-1] + 1:
            runs[-1][1:] = [one]
        else:
            runs.append([one])
    return ["-".join(str(end) for end in run) for run in runs]


def plain(value: Any) -> Any:
    """Return a composed value as plain dictionaries, lists and scalars."""
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    return value


def shown(value: Any) -> str:
    """Return a value as one would type it: a list in brackets, without spaces."""
    if isinstance(value, list):
        return "[" + ",".join(str(one) for one in value) + "]"
    return str(value)


def resolve_device(device: str) -> str:
    """Return the device to use: "cpu", "cuda" or "cuda:N".

    Raises:
        UsageError: the name is unknown, or CUDA is asked for and not there.
    """
    if device == "cpu":
        return device
    if device != "auto" and not re.fullmatch(r"cuda(:\d+)?", device):
        names = ("auto", "cpu", "cuda", "cuda:0")
        raise unknown_name("device", device, names, like=device.lower().replace("gpu", "cuda"))
    import torch  # noqa: PLC0415 (seconds; not needed where device=cpu)

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not torch.cuda.is_available():
        raise UsageError(
            f"device={device}: torch {torch.__version__} sees no CUDA GPU here; "
            "use device=cpu, or install a CUDA build of torch."
        )
    number = int(device.partition(":")[2] or 0)
    if number >= torch.cuda.device_count():
        raise UsageError(
            f"device={device}: there are {torch.cuda.device_count()} GPUs, "
            f"cuda:0 to cuda:{torch.cuda.device_count() - 1}."
        )
    return device


def default_threads() -> int:
    """Return the cores this process may use, less one for everything else, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) - 1)

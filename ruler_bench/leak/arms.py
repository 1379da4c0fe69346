"""Arms: the streams that are held against each other, and what a manifest says about each.

An arm is a name (`Record.arm`), an order of requests and a lifetime of engines. What differs
between two arms is what their comparison can show: persistent against fresh, for instance, shows
what one request leaves behind for the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ruler_bench.errors import UsageError, nearest

ONE_ENGINE = "one_engine"
ENGINE_PER_SAMPLE = "engine_per_sample"
ENGINE_PER_SAMPLE_IN_PROCESS = "engine_per_sample_in_process"
LIFETIMES = (ONE_ENGINE, ENGINE_PER_SAMPLE, ENGINE_PER_SAMPLE_IN_PROCESS)

FILL, CANCEL = "fill", "cancel"
ACTIONS = (FILL, CANCEL)


@dataclass(frozen=True, slots=True)
class Kind:
    """What an arm's name stands for.

    Attributes:
        order: which requests, one after the other; a name that `ruler_bench.streams` knows.
        is_fresh: each request has an engine of its own.
        actions: what is done to some of the requests.
    """

    order: str = "ordinal"
    is_fresh: bool = False
    actions: tuple[str, ...] = ()


KINDS: dict[str, Kind] = {
    "persistent": Kind(),
    "persistent_again": Kind(),
    "shuffled": Kind(order="shuffled"),
    "reference": Kind(),
    "reference_again": Kind(),
    "aged": Kind(order="aged"),
    "axa": Kind(order="axa"),
    "repeat": Kind(order="repeat"),
    "length_mix": Kind(order="length_mix"),
    "boundary": Kind(order="boundary"),
    "fill": Kind(order="fill", actions=(FILL,)),
    "cancel": Kind(order="cancel", actions=(CANCEL,)),
    "resend": Kind(order="resend", actions=(CANCEL,)),
    "flood": Kind(order="flood"),
    "two_questions": Kind(order="two_questions"),
    "fresh": Kind(is_fresh=True),
    "fresh_again": Kind(is_fresh=True),
}
"""Every arm but the sweeps, in the order in which they run: those with one engine first."""

SWEPT_SETTINGS: dict[str, tuple[str, ...]] = {
    "slots": ("num_gpu_blocks", "num_kv_buffers"),
    "chunks": ("chunk_tokens",),
    "concurrent": ("concurrency", "batch_size"),
}
"""Of slots_<n> and so on: the backend setting that is <n>, the first that a backend has."""

REFERENCE = "reference"
REFERENCES = (REFERENCE, "reference_again")


@dataclass(frozen=True, slots=True)
class Variant:
    """How the engine of an arm differs from the run's.

    Attributes:
        settings: other values; of several keys the first that the backend has.
        preset: another preset of our engine, by the name in `backends.engine`.
        records: what is computed is recorded, in a folder of the run's.
    """

    settings: tuple[tuple[tuple[str, ...], Any], ...] = ()
    preset: str | None = None
    records: bool = False


_CHUNK, _ATTEND = ("chunk_tokens",), ("attend_tokens",)
VARIANTS: dict[str, Variant] = {
    "attend_whole": Variant(((_ATTEND, None),), "gpu_only"),
    "gpu_only_whole": Variant(((_CHUNK, None), (_ATTEND, None)), "gpu_only"),
    "layerwise": Variant((), "offload_layerwise"),
    **{
        f"offload_{mode}": Variant(((("offload",), mode), (("resident_tokens",), None)))
        for mode in ("always", "never", "auto")
    },
}
"""Arms with another engine that differ by more, or by other things, than a number."""

SYNCHRONISED, RECORDED = "synchronised", "recorded"
ENDINGS: dict[str, Variant] = {
    SYNCHRONISED: Variant(((("synchronise",), True),)),
    RECORDED: Variant(records=True),
}
"""Arms of their own, and endings of others' names, as in slots_2_synchronised. What is recorded
takes long and much room: the first sample alone."""

SPELLINGS = (
    *KINDS,
    *(f"{name}_<n>" for name in (*SWEPT_SETTINGS, "attend")),
    *VARIANTS,
    *ENDINGS,
)
_ATTEND_SWEEP = re.compile(r"attend_([1-9][0-9]{0,8})")
_SWEEP = re.compile(rf"({'|'.join(SWEPT_SETTINGS)})_([1-9][0-9]{{0,8}})")


def swept_setting(name: str) -> tuple[tuple[str, ...], int] | None:
    """Return the settings that a sweep's arm may stand for and its value; None for other arms."""
    match = _SWEEP.fullmatch(name)
    return None if match is None else (SWEPT_SETTINGS[match[1]], int(match[2]))


def is_batched(name: str) -> bool:
    """Tell whether an arm's requests are in flight together."""
    return name.startswith("concurrent_")


def variant_of(name: str) -> Variant | None:
    """Return how an arm's engine differs from the run's; None where it does not, or is unknown."""
    base, _, ending = name.rpartition("_")
    if name in ENDINGS:
        return ENDINGS[name]
    if ending in ENDINGS:
        found, more = _variant_named(base), ENDINGS[ending]
        if found is None:
            return None
        return Variant(found.settings + more.settings, found.preset, more.records)
    return _variant_named(name)


def _variant_named(name: str) -> Variant | None:
    swept = swept_setting(name)
    if swept is not None:
        return Variant((swept,))
    match = _ATTEND_SWEEP.fullmatch(name)
    if match is not None:
        return Variant(((_ATTEND, int(match[1])),), "gpu_only")
    return VARIANTS.get(name)


def kind_of(name: str) -> Kind:
    """Return what an arm's name stands for.

    Raises:
        UsageError: no arm has this name; names the nearest and all of them.
    """
    if name in KINDS:
        return KINDS[name]
    if variant_of(name) is not None:
        return Kind()
    known = [*KINDS, *(f"{one}_2" for one in SWEPT_SETTINGS), *VARIANTS, *ENDINGS]
    close = nearest(name, known)
    hint = f" Did you mean {close!r}?" if close else ""
    raise UsageError(
        f"unknown arm {name!r}.{hint} Allowed: {', '.join(sorted(SPELLINGS))}; <n> is a number, "
        "as in slots_2 or chunks_512."
    )


def in_running_order(names: Iterable[str]) -> list[str]:
    """Return arms with the cheap ones, those of one engine, before those of many."""
    known = list(KINDS)
    return sorted(
        names, key=lambda one: (kind_of(one).is_fresh, known.index(one) if one in known else 99)
    )


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm that ran, as the manifest describes it.

    Attributes:
        name: `Record.arm` of its records.
        lifetime: one of LIFETIMES. "one_engine": one engine answers the whole stream (a stream
            that was broken off goes on with another, `Record.life` says so). "engine_per_sample":
            a new engine in a new process for each request. "engine_per_sample_in_process": a new
            engine for each request in one process, whose allocators, ports and module state may
            outlive it.
        backend: name of the backend's configuration.
        settings: the engine's settings in force, as its `describe()` said.
        order: which requests in which order, see `ruler_bench.streams`.
        actions: what was done to some of the requests, of ACTIONS.
    """

    name: str
    lifetime: str
    backend: str
    settings: Mapping[str, Any]
    order: str = "ordinal"
    actions: tuple[str, ...] = ()

    @property
    def is_fresh(self) -> bool:
        """Whether each request had an engine of its own."""
        return self.lifetime != ONE_ENGINE

    def to_manifest(self) -> dict[str, Any]:
        """Return the entry of manifest["arms"], under the arm's name."""
        return {
            "lifetime": self.lifetime,
            "backend": self.backend,
            "settings": dict(self.settings),
            "order": self.order,
            "actions": list(self.actions),
        }

    @classmethod
    def from_manifest(cls, name: str, entry: Any) -> Arm:
        """Return the arm of an entry of manifest["arms"].

        Raises:
            ValueError: a field is missing or of the wrong kind; names it.
        """
        if not isinstance(entry, dict):
            raise ValueError(f"arms.{name} is no object")
        checks = {
            "lifetime": entry.get("lifetime") in LIFETIMES,
            "backend": isinstance(entry.get("backend"), str),
            "settings": isinstance(entry.get("settings"), dict),
            "order": isinstance(entry.get("order"), str),
            "actions": isinstance(entry.get("actions"), list),
        }
        for field, good in checks.items():
            if not good:
                raise ValueError(f"arms.{name}.{field} is {entry.get(field)!r:.60}")
        return cls(
            name=name,
            lifetime=entry["lifetime"],
            backend=entry["backend"],
            settings=entry["settings"],
            order=entry["order"],
            actions=tuple(str(one) for one in entry["actions"]),
        )


def arms_of(manifest: Mapping[str, Any]) -> dict[str, Arm]:
    """Return the arms of a manifest by name; {} where it has none.

    Raises:
        ValueError: an entry is damaged.
    """
    entries = manifest.get("arms", {})
    if not isinstance(entries, dict):
        raise ValueError("arms is no object")
    return {name: Arm.from_manifest(name, entry) for name, entry in entries.items()}

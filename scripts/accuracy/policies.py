"""Policies as a command line names them, and the overrides that choose them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ruler_bench.errors import UsageError, unknown_name

FULL = "full"
PRESETS: dict[str, tuple[str, ...]] = {
    FULL: ("backend=gpu_only",),
    "xattention": ("backend=xattn",),
    "minference": ("backend=minference",),
    "a_shape": ("backend=gpu_only", "backend/policy=a_shape"),
}
"""Overrides of each policy, with all keys and values on the device."""
DEFAULT = (
    FULL,
    "xattention:stride=8,threshold=0.9",
    "xattention:stride=8,threshold=0.95",
    "xattention:stride=16,threshold=0.9",
    "xattention:stride=16,threshold=0.95",
    "minference",
    "a_shape",
)
WHOLE_PROMPT = ("backend.chunk_tokens=null", "backend.attend_tokens=null")
"""The paper's MInference sees a prompt's last queries alone where it comes in one chunk."""


@dataclass(frozen=True)
class PolicySpec:
    """A policy and its settings.

    Attributes:
        name: of `PRESETS`.
        settings: key=value each.
    """

    name: str
    settings: tuple[str, ...]

    @property
    def title(self) -> str:
        """What tables call it, and what a command line does."""
        return f"{self.name}:{','.join(self.settings)}" if self.settings else self.name

    @property
    def folder(self) -> str:
        """Name of the folder of its runs."""
        return re.sub(r"[^A-Za-z0-9._]+", "-", self.title)

    def overrides(self) -> list[str]:
        """Return the overrides that choose it."""
        chosen = [*PRESETS[self.name], *WHOLE_PROMPT]
        return chosen + [f"backend.policy.{one}" for one in self.settings]


def parse_policy(text: str) -> PolicySpec:
    """Read NAME or NAME:key=value,key=value.

    Raises:
        UsageError: the name is unknown, or what follows it is no setting.
    """
    name, colon, rest = text.partition(":")
    if name not in PRESETS:
        raise unknown_name("policy", name, PRESETS)
    settings = tuple(one.strip() for one in rest.split(",")) if colon else ()
    for one in settings:
        if not re.fullmatch(r"[a-z_]+=\S+", one):
            raise UsageError(
                f"policy {text}: {one!r} is no setting; for instance "
                "xattention:stride=8,threshold=0.9."
            )
    return PolicySpec(name, settings)


def parse_policies(texts: Sequence[str]) -> list[PolicySpec]:
    """Read several policies, each named once.

    Raises:
        UsageError: one cannot be read, or is named twice.
    """
    found = [parse_policy(one) for one in texts]
    folders = [one.folder for one in found]
    for spec in found:
        if folders.count(spec.folder) > 1:
            raise UsageError(f"--policies: {spec.title} is named twice.")
    return found

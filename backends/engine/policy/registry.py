"""Policies by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.base import ConfigurationError
from backends.engine.policy.base import Policy
from backends.engine.policy.full import FullPolicy
from backends.engine.settings import require_name

POLICIES: dict[str, type[Policy]] = {"full": FullPolicy}


def policy_name(settings: Mapping[str, Any] | None) -> str:
    """Return the name in a policy's settings; None stands for full.

    Raises:
        ConfigurationError: no name, an unknown one, or a setting that the policy does not have.
    """
    if settings is None:
        return FullPolicy.name
    if not isinstance(settings, Mapping):
        raise ConfigurationError(
            f"backend.policy={settings!r}: policy is a group of settings. Choose one with "
            f"backend/policy=NAME; allowed: {', '.join(POLICIES)}."
        )
    require_name("backend.policy.name", settings.get("name"), POLICIES)
    unknown = sorted(set(settings) - {"name"})
    if unknown:
        raise ConfigurationError(
            f"backend.policy.{unknown[0]} is no setting of policy {settings['name']!r}, which has "
            "none."
        )
    return str(settings["name"])

"""Policies by name, and their construction from what a user has set."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from backends.base import ConfigurationError
from backends.engine.policy.a_shape import AShapePolicy
from backends.engine.policy.base import Model, Policy
from backends.engine.policy.full import FullPolicy
from backends.engine.policy.minference import MInferencePolicy
from backends.engine.policy.xattention import XAttentionPolicy
from backends.engine.settings import require_name

POLICIES: dict[str, Callable[..., Policy]] = {
    policy.name: policy for policy in (FullPolicy, XAttentionPolicy, MInferencePolicy, AShapePolicy)
}
"""Each takes the Model, then its settings as keyword arguments."""


def policy_settings(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check a policy's name and the names of its settings; None stands for full.

    Values are checked by `make_policy`, since some need the model.

    Returns:
        The settings as given, with the name. It is plain data: a copy, not OmegaConf's.

    Raises:
        ConfigurationError: no name, an unknown one, or a setting that the policy does not have.
    """
    if settings is None:
        return {"name": FullPolicy.name}
    if not isinstance(settings, Mapping):
        raise ConfigurationError(
            f"backend.policy={settings!r}: policy is a group of settings. Choose one with "
            f"backend/policy=NAME; allowed: {', '.join(POLICIES)}."
        )
    name = settings.get("name")
    require_name("backend.policy.name", name, POLICIES)
    allowed = _setting_names(str(name))
    for key in settings:
        if key != "name" and key not in allowed:
            raise _no_such_setting(key, str(name), allowed)
    return dict(settings)


def make_policy(settings: Mapping[str, Any] | None, model: Model) -> Policy:
    """Build the policy that `settings` describe; None stands for full.

    Raises:
        ConfigurationError: as `policy_settings`, or a value that the policy or the model refuses.
    """
    values = policy_settings(settings)
    return POLICIES[values.pop("name")](model, **values)


def _no_such_setting(key: object, name: str, allowed: list[str]) -> ConfigurationError:
    close = difflib.get_close_matches(str(key), allowed, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    has = f"which has {', '.join(allowed)}" if allowed else "which has none"
    return ConfigurationError(
        f"backend.policy.{key} is no setting of policy {name!r}, {has}.{hint}"
    )


def _setting_names(name: str) -> list[str]:
    parameters = inspect.signature(POLICIES[name]).parameters.values()
    return [item.name for item in parameters if item.kind is inspect.Parameter.KEYWORD_ONLY]

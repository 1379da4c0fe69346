"""Preset: a factory of engines that can also say what memory its engine would take."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Generic, ParamSpec

import torch

from backends.base import ConfigurationError
from backends.engine.engine import Engine
from backends.engine.plan import memory_plan
from backends.engine.policy import policy_settings
from backends.engine.settings import Settings

P = ParamSpec("P")
Weights = Mapping[str, torch.Tensor] | None


class Preset(Generic[P]):
    """Builds engines from the settings that the decorated function returns.

    To call it is to build an engine; `memory_plan`, called with the same arguments, loads and
    allocates nothing.

    Args:
        choose: returns the engine's settings, and its weights where they are not in files.
    """

    def __init__(self, choose: Callable[P, tuple[Settings, Weights]]) -> None:
        self._choose = choose
        functools.update_wrapper(self, choose)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Engine:
        """Build an engine.

        Raises:
            ConfigurationError: a setting cannot be honoured.
        """
        return Engine(*self._choose(*args, **kwargs))

    def memory_plan(self, *args: P.args, **kwargs: P.kwargs) -> list[str]:
        """Return the lines of the memory plan of such an engine, with the machine's limits.

        Raises:
            ConfigurationError: a setting cannot be honoured, or the plan does not fit.
        """
        return memory_plan(*self._choose(*args, **kwargs))

    def with_policy(self, name: str, policy: str) -> Preset[P]:
        """Return a preset that differs in one thing: its policy, which is that one and no other.

        Args:
            name: of the new preset.
            policy: name of its policy; the argument `policy` gives its settings, None its defaults.
        """

        @functools.wraps(self._choose)
        def choose(*args: P.args, **kwargs: P.kwargs) -> tuple[Settings, Weights]:
            settings, weights = self._choose(*args, **kwargs)
            if kwargs.get("policy") is None:
                return replace(settings, policy=policy_settings({"name": policy})), weights
            asked = settings.policy["name"]
            if asked != policy:
                raise ConfigurationError(
                    f"backend.policy.name={asked}: backend={name} is {self._choose.__name__} with "
                    f"policy {policy}; use backend={self._choose.__name__} backend/policy={asked}."
                )
            return settings, weights

        choose.__name__ = choose.__qualname__ = name
        choose.__doc__ = f"Build an engine as `{self._choose.__name__}` does, with policy {policy}."
        return Preset(choose)

"""Preset: a factory of engines that can also say what memory its engine would take."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Generic, ParamSpec

import torch

from backends.engine.engine import Engine
from backends.engine.plan import memory_plan
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

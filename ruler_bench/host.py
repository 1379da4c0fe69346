"""Starts the engine that a configuration names, after checking every setting against it."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from types import ModuleType, NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.utils import get_object
from omegaconf import MISSING

from backends.base import HARNESS_ARGUMENTS, Backend, ConfigurationError
from ruler_bench.errors import UsageError, nearest, one_line, unknown_name
from ruler_bench.leak.arms import CANCEL, kind_of, variant_of

TARGET = "_target_"
OWN_KEYS = {"model_path": "model.path", "device": "device", "threads": "threads"}
METHODS = ("generate", "describe", "close")
PLAN = "memory_plan"

# Hydra logs what it also raises; the user is told once.
logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)


def backend_factory(settings: dict[str, Any]) -> Callable[..., Backend]:
    """Return the class or function that `_target_` names.

    Raises:
        UsageError: there is no `_target_`, or it cannot be imported.
    """
    target = settings.get(TARGET)
    if not isinstance(target, str) or target == MISSING:
        raise UsageError(
            "backend._target_ is missing: name the class, "
            "for instance backend=custom backend._target_=my_package.MyEngine"
        )
    if "." not in target:
        raise UsageError(
            f"backend._target_={target}: must be MODULE.CLASS, for instance my_package.MyEngine."
        )
    try:
        found: Callable[..., Backend] = get_object(target)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an engine's module may do anything when imported
        reason = error.__cause__ or error
        module = sys.modules.get(target.rpartition(".")[0])
        if module is not None:
            raise _no_such_class(target, module) from error
        raise UsageError(
            f"backend._target_={target}: cannot be imported ({type(reason).__name__}: "
            f"{one_line(reason)}). Check the name; its module must lie in the folder you run in, "
            "on PYTHONPATH, or be installed."
        ) from error
    return found


def _no_such_class(target: str, module: ModuleType) -> UsageError:
    """Return the error of a name that its module, which can be imported, has not."""
    path, _, name = target.rpartition(".")
    own = [
        key
        for key, one in vars(module).items()
        if callable(getattr(one, "generate", None)) and not key.startswith("_")
    ]
    close = nearest(name, own)
    hint = f" Did you mean {path}.{close}?" if close else ""
    listed = f" Engines in it: {', '.join(sorted(own))}." if own else ""
    return UsageError(f"backend._target_={target}: {path} has no {name}.{hint}{listed}")


def checked_factory(settings: dict[str, Any]) -> Callable[..., Backend]:
    """Return the factory of a backend that has every setting: none may be dropped in silence.

    Raises:
        UsageError: names the setting, the nearest one and all of them.
    """
    factory = backend_factory(settings)
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"backend._target_={settings[TARGET]}: is no class or function whose parameters can "
            "be read; name a backend class as backends/base.py describes it."
        ) from error
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        raise UsageError(
            f"backend._target_={settings[TARGET]}: takes **keywords, so that a typing error "
            "would go unseen; give its constructor named parameters."
        )
    if any(one.kind is inspect.Parameter.POSITIONAL_ONLY for one in parameters):
        raise UsageError(
            f"backend._target_={settings[TARGET]}: has positional-only parameters; settings are "
            "given by name."
        )
    for key, instead in OWN_KEYS.items():
        if settings.get(key) is not None:
            raise UsageError(f"backend.{key}: set {instead} instead, which all parts follow.")
    hints = parameter_hints(factory)
    names = {one.name for one in parameters if not holds_tensors(hints.get(one.name))}
    for key in settings:
        if holds_tensors(hints.get(key)):
            raise UsageError(
                f"backend.{key}: takes tensors, which only a caller in Python can give; leave it "
                "out here."
            )
        if key != TARGET and key not in names:
            raise _unknown_setting(key, names, settings[TARGET])
    _check_types(hints, settings)
    required = [one.name for one in parameters if one.default is inspect.Parameter.empty]
    for name in required:
        if name not in settings and name not in HARNESS_ARGUMENTS:
            raise UsageError(f"backend.{name} is missing: {settings[TARGET]} needs it.")
    return factory


def check_threads(*backends: dict[str, Any]) -> None:
    """Refuse `threads` where no engine of a run takes it: it would be dropped in silence.

    Args:
        backends: the composed settings of each.

    Raises:
        UsageError: none takes it, or a `_target_` cannot be imported.
    """
    if not any("threads" in _parameters(one) for one in backends):
        raise UsageError(
            f"threads: {backends[0][TARGET]} takes no threads, so that it would do nothing; leave "
            "it out, or give its constructor a parameter of that name."
        )


def _parameters(settings: dict[str, Any]) -> Container[str]:
    try:
        return inspect.signature(backend_factory(settings)).parameters
    except (TypeError, ValueError):
        return ("threads",)  # `checked_factory` says what is wrong


def parameter_hints(factory: Callable[..., Backend]) -> dict[str, Any]:
    """Return the annotations of a factory's parameters; none where they cannot be resolved."""
    try:
        return get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    except (NameError, TypeError, AttributeError):
        return {}


def holds_tensors(hint: Any) -> bool:
    """Tell whether an annotation is, or contains, torch's Tensor."""
    if getattr(hint, "__module__", "") == "torch" and getattr(hint, "__name__", "") == "Tensor":
        return True
    return any(holds_tensors(one) for one in get_args(hint))


def _check_types(hints: Mapping[str, Any], settings: dict[str, Any]) -> None:
    """Check values against plain annotations: int, float, bool and str, also with None.

    Others are left to the constructor.
    """
    for key, value in settings.items():
        hint = hints.get(key)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if key == TARGET or not set(kinds) <= {int, float, bool, str, NoneType}:
            continue
        if type(value) in kinds or (type(value) is int and float in kinds):
            continue
        allowed = " or ".join("null" if one is NoneType else one.__name__ for one in kinds)
        raise UsageError(f"backend.{key}={value}: must be {allowed}.")


def _unknown_setting(key: str, names: set[str], target: str) -> UsageError:
    error = unknown_name("key", f"backend.{key}", [f"backend.{name}" for name in names])
    if target.startswith("backends."):
        return error
    return UsageError(f"{error} For a class of your own start from backend=custom.")


def start_backend(settings: dict[str, Any], harness: dict[str, Any]) -> Backend:
    """Build the engine of a composed backend configuration.

    Args:
        settings: the configuration, `_target_` included.
        harness: a value for each of `HARNESS_ARGUMENTS`; used where the constructor has the
            parameter and the user did not set it.

    Raises:
        UsageError, ConfigurationError: a setting is unknown or cannot be honoured, or what was
            built is no backend.
        Exception: whatever else the constructor raised.
    """
    backend = bound_factory(settings, harness)()
    missing = [name for name in METHODS if not callable(getattr(backend, name, None))]
    if missing:
        raise UsageError(
            f"backend._target_={settings[TARGET]}: is no backend, it has no method "
            f"{' and no method '.join(missing)}; backends/base.py says what each one does."
        )
    return backend


def bound_factory(settings: dict[str, Any], harness: dict[str, Any]) -> functools.partial[Backend]:
    """Return what builds the engine, with all of its arguments; see `start_backend`.

    Raises:
        UsageError: a setting is unknown or cannot be honoured.
    """
    factory = checked_factory(settings)
    return functools.partial(factory, **_arguments(factory, settings, harness))


def _arguments(
    factory: Callable[..., Backend], settings: dict[str, Any], harness: dict[str, Any]
) -> dict[str, Any]:
    """Return the user's settings, and the harness's values for what they did not set."""
    names = inspect.signature(factory).parameters
    arguments = {key: value for key, value in settings.items() if key != TARGET}
    for key, value in harness.items():
        if key in names and arguments.get(key) is None:
            arguments[key] = value
    return arguments


def memory_plan(settings: dict[str, Any], harness: dict[str, Any]) -> list[str] | None:
    """Return the lines of a backend's memory plan, or None where it has none to tell.

    A factory may have a `memory_plan` that takes the factory's own arguments and returns lines of
    text, without loading or allocating anything. Where the factory is a class, it is a static or a
    class method.

    Args:
        settings: as for `start_backend`.
        harness: likewise.

    Raises:
        UsageError, ConfigurationError: a setting is unknown or cannot be honoured, the plan does
            not fit, or the backend's own code failed.
    """
    factory = checked_factory(settings)
    found = inspect.getattr_static(factory, PLAN, None)
    if found is None or (inspect.isclass(factory) and inspect.isfunction(found)):
        return None  # a method of the engine, which is not there yet
    arguments = _arguments(factory, settings, harness)
    try:
        return [str(line) for line in getattr(factory, PLAN)(**arguments)]
    except (ConfigurationError, KeyboardInterrupt):
        raise
    except BaseException as error:  # an engine under test may do anything
        raise UsageError(
            f"backend._target_={settings[TARGET]}: its {PLAN} failed ({type(error).__name__}: "
            f"{one_line(error)})."
        ) from error


def described(backend: Backend) -> dict[str, Any]:
    """Return an engine's settings in force.

    Raises:
        UsageError: they are no plain JSON object, which the manifest could not hold.
    """
    found = backend.describe()
    try:
        plain = json.loads(json.dumps(found, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the engine's describe() returned values that JSON does not have ({one_line(error)}); "
            "return numbers, text, lists and dicts."
        ) from error
    if not isinstance(plain, dict):
        raise UsageError(f"the engine's describe() returned {type(found).__name__}, not a dict.")
    return plain


# --- what an arm asks of a backend --------------------------------------------------------------


CHECKPOINT = "checkpoint"
OWN_ENGINE = "backends.engine."


def settings_of_arm(arm: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the backend settings of an arm: those of some arms have other values in them.

    Raises:
        UsageError: the backend has no such setting, or is not ours where the arm needs that.
    """
    variant = variant_of(arm)
    if variant is None:
        return settings
    if variant.preset is not None:
        settings = _of_preset(arm, settings, OWN_ENGINE + variant.preset)
    names = inspect.signature(backend_factory(settings)).parameters
    found = dict(settings)
    for keys, value in variant.settings:
        found[_first_known(arm, settings, keys, names)] = value
    if variant.records:
        _first_known(arm, settings, (CHECKPOINT,), names)
    checked_factory(found)
    return found


def _first_known(
    arm: str, settings: dict[str, Any], keys: Sequence[str], names: Container[str]
) -> str:
    key = next((one for one in keys if one in names), None)
    if key is None:
        raise UsageError(
            f"arm {arm}: {settings[TARGET]} has no setting {' or '.join(keys)}; leave the arm out."
        )
    return key


def _of_preset(arm: str, settings: dict[str, Any], target: str) -> dict[str, Any]:
    """Return the settings of another preset of our engine: what both have stays."""
    if not str(settings[TARGET]).startswith(OWN_ENGINE):
        raise UsageError(
            f"arm {arm}: is another preset of the project's engine, and {settings[TARGET]} is "
            "none; leave the arm out."
        )
    names = inspect.signature(checked_factory({TARGET: target})).parameters
    return {key: value for key, value in settings.items() if key in names} | {TARGET: target}


def check_arm(arm: str, settings: dict[str, Any]) -> None:
    """Refuse an arm that a backend cannot do, as far as that shows before it is built.

    Raises:
        UsageError: names the arm and what the backend lacks.
    """
    settings_of_arm(arm, settings)
    factory = checked_factory(settings)
    if kind_of(arm).is_fresh:
        check_fresh_engines(f"arm {arm}", settings)
    can_cancel = not inspect.isclass(factory) or callable(getattr(factory, "cancel", None))
    if CANCEL in kind_of(arm).actions and not can_cancel:
        raise cannot_cancel(arm, str(settings[TARGET]))


def check_fresh_engines(what: str, settings: dict[str, Any]) -> None:
    """Refuse what needs new engines where nobody can start one (backends.base.OUTLIVES_CLOSE).

    Args:
        what: what needs them, for the message.
        settings: of the backend.

    Raises:
        UsageError: says why there are none, and what is left open without them.
    """
    why = getattr(checked_factory(settings), "why_not_fresh", None)
    reason = None if why is None else why(**{k: v for k, v in settings.items() if k != TARGET})
    if reason is not None:
        raise UsageError(
            f"{what}: {reason}. Without fresh engines a leak shows only where an answer prints "
            "another's whole answer: leave them out, for instance "
            "arms=[persistent,persistent_again,shuffled,reference]."
        )


def cannot_cancel(arm: str, target: str) -> UsageError:
    """Return the error of an arm that cancels requests, of a backend that has no such method."""
    return UsageError(
        f"arm {arm}: {target} has no method cancel(request_id), which would end a request from "
        "another thread; leave the arm out."
    )

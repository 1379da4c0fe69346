"""Loading a model with transformers, or saying in one line why it cannot be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from backends.base import ConfigurationError

WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
AUTO_CLASS = AutoModelForCausalLM.__name__

_INSTALL = {"flash_attention_2": " Install it: pip install flash-attn --no-build-isolation"}
_LOADING_ERRORS = (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError)


def load(
    model_path: str,
    device: torch.device,
    attn_implementation: str | None,
    options: dict[str, Any],
) -> Any:
    """Return the model in evaluation mode on the device.

    Args:
        model_path: folder or hub name.
        device: where it goes.
        attn_implementation: None leaves it to transformers.
        options: more arguments of `from_pretrained`, dtype and trust_remote_code.

    Raises:
        ConfigurationError: see `backends.hf.TransformersBackend`.
    """
    is_trusted = options["trust_remote_code"]
    if attn_implementation is not None:
        if "/" not in attn_implementation:  # with a slash it is a kernel from the hub
            # Names with a bar are for transformers' paged batching, not for `generate`.
            names = (name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in name)
            allowed = {"eager", *names}
            check_name("attn_implementation", attn_implementation, allowed)
        options = options | {"attn_implementation": attn_implementation}
    _check_folder(model_path)
    try:
        with _quiet_transformers():
            config = AutoConfig.from_pretrained(model_path, trust_remote_code=is_trusted)
            brings_code = is_trusted and AUTO_CLASS in (getattr(config, "auto_map", None) or {})
            if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not brings_code:
                raise ConfigurationError(
                    f"model {model_path}: transformers has no causal language model for "
                    f"model_type={config.model_type!r}."
                )
            model, loading = AutoModelForCausalLM.from_pretrained(
                model_path, config=config, output_loading_info=True, **options
            )
            _check_complete(model_path, loading["missing_keys"])
            model.generation_config = GenerationConfig()
            return model.eval().to(device)
    except ConfigurationError:
        raise
    except _LOADING_ERRORS as error:
        if not is_trusted and "trust_remote_code" in str(error):
            raise ConfigurationError(
                f"model {model_path}: brings code of its own, which is not run; read it, then say "
                "backend.trust_remote_code=true."
            ) from error
        raise ConfigurationError(
            f"model {model_path}: transformers cannot load it: {first_line(error)}"
            f"{_INSTALL.get(attn_implementation or '', '')}"
        ) from error


def _check_folder(model_path: str) -> None:
    folder = Path(model_path)
    if not folder.is_dir():
        return  # a hub name; transformers says what is wrong with it
    if not (folder / "config.json").is_file():
        raise ConfigurationError(f"model folder {folder} holds no config.json.")
    if not any(path for pattern in WEIGHT_PATTERNS for path in folder.glob(pattern)):
        raise ConfigurationError(
            f"model folder {folder} holds no weights ({' or '.join(WEIGHT_PATTERNS)})."
        )


def _check_complete(model_path: str, missing: Iterable[str]) -> None:
    """Refuse weights that lack tensors: transformers would fill them with random numbers."""
    names = sorted(missing)
    if names:
        raise ConfigurationError(
            f"model {model_path}: its weights lack {len(names)} tensors, {names[0]} for one; "
            "download them again, or check config.json."
        )


def check_name(key: str, name: str, allowed: Iterable[str]) -> None:
    """Refuse a name that is not allowed.

    Raises:
        ConfigurationError: names the nearest one and all of them.
    """
    names = sorted(allowed)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigurationError(
            f"backend.{key}={name}: unknown.{hint} Allowed: {', '.join(names)}."
        )


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep loading bars and remarks off the terminal: what matters is checked and raised."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()

"""What the decoder needs to know of a model, read from transformers' configuration of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backends.base import ConfigurationError


@dataclass(frozen=True, slots=True)
class OptionalWeights:
    """Which weights the layers have besides those that all families share.

    Attributes:
        query_key_norm: whether each head of queries and keys is normalised before it is rotated.
    """

    query_key_value_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """What tells one architecture from another.

    Attributes:
        model_type: by which transformers chooses the class of the configuration and of the model.
        optional_weights: finds out from the configuration. Source: transformers' modeling_*.py;
            what is fixed there is fixed here, whatever the configuration says of it.
    """

    model_type: str
    optional_weights: Callable[[Any], OptionalWeights]


FAMILIES = {
    "LlamaForCausalLM": Family(
        "llama",
        lambda config: OptionalWeights(
            query_key_value_bias=config.attention_bias,
            output_bias=config.attention_bias,
            mlp_bias=config.mlp_bias,
        ),
    ),
    "Qwen2ForCausalLM": Family("qwen2", lambda _: OptionalWeights(query_key_value_bias=True)),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        lambda config: OptionalWeights(
            query_key_value_bias=config.attention_bias,
            output_bias=config.attention_bias,
            query_key_norm=True,
        ),
    ),
    "MistralForCausalLM": Family("mistral", lambda _: OptionalWeights()),
}
"""By the name that a config.json gives under `architectures`."""

HONOURED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "quantization_config": (),
    "attention_chunk_size": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "clip_qkv": (),
}
"""Settings under which a model is another one, and the values with which it is ours.

A setting that is absent or null is always honoured.
"""

REQUIRED_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
OPTIONAL_SIZES = ("head_dim", "sliding_window")
"""Settings that are integers from 1; the second kind may also be absent or null."""

POSITIVE_ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
)

HONOURED_ROPE_VALUES: dict[str, tuple[Any, ...]] = {
    # The types whose frequencies do not change with the length of the request.
    "rope_type": ("default", "linear", "llama3", "yarn"),
    "partial_rotary_factor": (1.0,),
    "mrope_section": (),
    "llama_4_scaling_beta": (),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a model's configuration that the decoder needs.

    Attributes:
        inverse_frequencies: of the rotary embedding, float32, [head_dim / 2].
        rope_scaling: factor on the rotary embedding's cosines and sines.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    max_positions: int
    norm_epsilon: float
    tied_embeddings: bool
    optional_weights: OptionalWeights
    inverse_frequencies: torch.Tensor
    rope_scaling: float


def find_model(model_path: str) -> Path:
    """Return the folder of a model: `model_path` itself, or the hub's model of that name.

    Raises:
        ConfigurationError: there is neither such a folder nor such a model.
    """
    try:
        folder = Path(model_path).expanduser()
        is_folder = folder.is_dir()
    except (OSError, RuntimeError) as error:  # too long a name, or ~ of an unknown user
        raise ConfigurationError(
            f"model.path={model_path}: cannot be looked up ({error}); name a folder or a hub name "
            "such as org/model."
        ) from error
    if is_folder:
        return folder
    if folder.exists():
        raise ConfigurationError(f"model.path={model_path} is a file; a model folder is needed.")
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (slow, and rarely needed)

    try:
        return Path(snapshot_download(model_path, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigurationError(
            f"model.path={model_path} is no folder, and no model of that name could be had "
            f"from the hub: {reason}"
        ) from error


def read_shape(folder: Path) -> ModelShape:
    """Read the configuration of the model in `folder`.

    Raises:
        ConfigurationError: no config.json, an architecture that is not supported, a value that
            no model can have, or a setting that the decoder does not honour.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigurationError(f"{folder} has no config.json, so it is not a model folder.")
    raw = _read_object(path)
    architecture = _architecture(path, raw)
    if architecture not in FAMILIES:
        raise ConfigurationError(
            f"{path}: architecture {architecture} is not supported by this engine, which runs "
            f"{', '.join(FAMILIES)}; use backend=hf for this model."
        )
    family = FAMILIES[architecture]
    # Before transformers, which fails on some of them in words of its own and takes others.
    for key in (*REQUIRED_SIZES, *OPTIONAL_SIZES):
        _check_size(path, key, raw.get(key))
    for rope in (raw, raw.get("rope_parameters"), raw.get("rope_scaling")):
        if isinstance(rope, dict):
            _check_rope_numbers(path, rope)

    from transformers import AutoConfig  # noqa: PLC0415 (slow; bad settings fail before it)

    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # of many kinds, by version
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"{path}: transformers cannot read it: {reason}") from error
    if config.model_type != family.model_type:
        raise ConfigurationError(
            f"{path}: model_type={config.model_type!r} does not go with architecture "
            f"{architecture}, whose model_type is {family.model_type!r}."
        )
    _check_values(path, config)
    _refuse_what_is_not_honoured(path, config)
    frequencies, scaling = _rope(path, config)
    return ModelShape(
        architecture=architecture,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(config),
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        max_positions=config.max_position_embeddings,
        norm_epsilon=config.rms_norm_eps,
        tied_embeddings=bool(config.tie_word_embeddings),
        optional_weights=family.optional_weights(config),
        inverse_frequencies=frequencies,
        rope_scaling=scaling,
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} is not valid JSON: {error}; correct it or copy the model anew."
        ) from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} holds no JSON object; correct it or copy the model anew.")
    return values


def _architecture(path: Path, raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or ["none"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise _wrong(path, "architectures", names, "a list of names")
    return names[0]


def _wrong(path: Path, key: str, value: Any, allowed: str) -> ConfigurationError:
    return ConfigurationError(f"{path}: {key}={value!r} is wrong; write {allowed}.")


def _check_size(path: Path, key: str, value: Any) -> None:
    if value is not None and (type(value) is not int or value < 1):  # a bool is an int too
        raise _wrong(path, key, value, "an integer of at least 1")


def _check_number(path: Path, key: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise _wrong(path, key, value, "a number above 0")


def _check_rope_numbers(path: Path, rope: dict[str, Any]) -> None:
    for key in POSITIVE_ROPE_NUMBERS:
        if rope.get(key) is not None:
            _check_number(path, key, rope[key])


def _check_values(path: Path, config: Any) -> None:
    """Raise ConfigurationError for a value that no model can have."""
    for key in REQUIRED_SIZES:
        value = getattr(config, key, None)
        if value is None:
            raise _wrong(path, key, value, "an integer of at least 1")
        _check_size(path, key, value)
    for key in OPTIONAL_SIZES:
        _check_size(path, key, getattr(config, key, None))
    _check_number(path, "rms_norm_eps", config.rms_norm_eps)
    head_dim = _head_dim(config)
    if head_dim < 2 or head_dim % 2:
        raise ConfigurationError(
            f"{path}: a head is {head_dim} wide; the rotary embedding needs an even width of at "
            "least 2: correct head_dim, or hidden_size and num_attention_heads."
        )


def _head_dim(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _refuse_what_is_not_honoured(path: Path, config: Any) -> None:
    """Raise ConfigurationError for a setting under which the answer would be another one."""
    for key, honoured in HONOURED_VALUES.items():
        _refuse_unless(path, key, getattr(config, key, None), honoured)
    # Where use_sliding_window switches a window off, the class of the configuration drops it.
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        _refuse_unless(path, "sliding_window", window, ())
    for layer_type in getattr(config, "layer_types", None) or ():
        _refuse_unless(path, "layer_types", layer_type, ("full_attention",))
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigurationError(
            f"{path}: num_attention_heads={config.num_attention_heads} is no multiple of "
            f"num_key_value_heads={config.num_key_value_heads}."
        )


def _refuse_unless(path: Path, key: str, value: Any, honoured: tuple[Any, ...]) -> None:
    if value is not None and value not in honoured:
        allowed = f" (allowed: {', '.join(map(str, honoured))})" if honoured else ""
        raise ConfigurationError(
            f"{path}: {key}={value!r} is not honoured by this engine{allowed}; "
            "use backend=hf for this model."
        )


def _rope(path: Path, config: Any) -> tuple[torch.Tensor, float]:
    """Return the rotary embedding's inverse frequencies and its scaling.

    Source: RoFormer (arXiv 2104.09864); scaled forms through transformers' ROPE_INIT_FUNCTIONS.
    """
    parameters = config.rope_parameters
    for key, honoured in HONOURED_ROPE_VALUES.items():
        _refuse_unless(path, key, parameters.get(key), honoured)
    if any(isinstance(value, dict) for value in parameters.values()):  # one set a layer type
        _refuse_unless(path, "rope_parameters", parameters, ())
    _check_number(path, "rope_theta", parameters.get("rope_theta"))
    _check_rope_numbers(path, parameters)
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        dim = _head_dim(config)
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    frequencies, scaling = _scaled_rope(path, kind, config)
    if not (torch.isfinite(frequencies).all() and math.isfinite(scaling)):
        raise _wrong(path, "rope_parameters", parameters, "numbers that give finite frequencies")
    return frequencies, scaling


def _scaled_rope(path: Path, kind: str, config: Any) -> tuple[torch.Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    try:
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    except Exception as error:  # of many kinds, by version and type
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigurationError(
            f"{path}: rope_parameters={config.rope_parameters} cannot be used ({reason}); correct "
            "them after the model's own config.json."
        ) from error
    return frequencies.float(), float(scaling)

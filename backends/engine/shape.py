"""What the decoder needs to know of a model, read from transformers' configuration of it."""

from __future__ import annotations

import json
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
    folder = Path(model_path).expanduser()
    if folder.is_dir():
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
        ConfigurationError: no config.json, an architecture that is not supported, or a setting
            that the decoder does not honour.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigurationError(f"{folder} has no config.json, so it is not a model folder.")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}.") from error
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in FAMILIES:
        raise ConfigurationError(
            f"{path}: architecture {architecture} is not supported by this engine, which runs "
            f"{', '.join(FAMILIES)}; use backend=hf for this model."
        )
    family = FAMILIES[architecture]

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
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        dim = _head_dim(config)
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.float(), float(scaling)

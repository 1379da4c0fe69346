"""A decoder of Llama's shape, read from transformers' configuration of the model.

Only the arithmetic between tokens and logits lives here. Where keys and values are kept, and in
what pieces they are attended to, is the caller's: `Decoder.forward` hands every layer's query,
key and value rows to a function.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from backends.base import ConfigurationError
from backends.engine.weights import Checkpoint

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose frequencies do not change with the length of the request."""

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, query rows, key rows, value rows) -> attended rows, each [rows, heads, head_dim].

There may be fewer query rows than key rows: they are the last ones.
"""


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
    attention_bias: bool
    mlp_bias: bool
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
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ConfigurationError(
            f"{path}: architecture {architecture} is not supported by this engine, which runs "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}; use backend=hf for this model."
        )

    from transformers import AutoConfig  # noqa: PLC0415 (slow; bad settings fail before it)

    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # of many kinds, by version
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"{path}: transformers cannot read it: {reason}") from error
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
        attention_bias=bool(config.attention_bias),
        mlp_bias=bool(config.mlp_bias),
        inverse_frequencies=frequencies,
        rope_scaling=scaling,
    )


def _head_dim(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _refuse_what_is_not_honoured(path: Path, config: Any) -> None:
    """Raise ConfigurationError for a setting under which the answer would be another one."""
    plain_layers = {None, "full_attention"}
    refused = {
        "sliding_window": getattr(config, "sliding_window", None) is not None,
        "attention_chunk_size": getattr(config, "attention_chunk_size", None) is not None,
        "layer_types": not set(getattr(config, "layer_types", None) or ()) <= plain_layers,
        "quantization_config": getattr(config, "quantization_config", None) is not None,
        "hidden_act": config.hidden_act != "silu",
    }
    for key, wrong in refused.items():
        if wrong:
            raise ConfigurationError(
                f"{path}: {key}={getattr(config, key)!r} is not honoured by this engine; "
                "use backend=hf for this model."
            )
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigurationError(
            f"{path}: num_attention_heads={config.num_attention_heads} is no multiple of "
            f"num_key_value_heads={config.num_key_value_heads}."
        )


def _rope(path: Path, config: Any) -> tuple[torch.Tensor, float]:
    """Return the rotary embedding's inverse frequencies and its scaling.

    Source: RoFormer (arXiv 2104.09864); scaled forms through transformers' ROPE_INIT_FUNCTIONS.
    """
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in SUPPORTED_ROPE_TYPES:
        raise ConfigurationError(
            f"{path}: rope_type={kind!r} is not honoured by this engine. "
            f"Allowed: {', '.join(SUPPORTED_ROPE_TYPES)}."
        )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigurationError(
            f"{path}: partial_rotary_factor={parameters['partial_rotary_factor']} is not "
            "honoured by this engine; only 1.0 is."
        )
    if kind == "default":
        dim = _head_dim(config)
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.float(), float(scaling)


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    query_key_value: _Linear
    output: _Linear
    mlp_norm: torch.Tensor
    gate_up: _Linear
    down: _Linear


class _Reader:
    """Makes tensors on the device from a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype

    def tensor(self, name: str, *size: int) -> torch.Tensor:
        target = torch.empty(size, device=self._device, dtype=self._dtype)
        self._checkpoint.copy_into(name, target)
        return target

    def linear(self, prefix: str, outputs: dict[str, int], inputs: int, *, bias: bool) -> _Linear:
        """Stack projections of the same input, so that one product computes them all."""
        total = sum(outputs.values())
        weight = torch.empty((total, inputs), device=self._device, dtype=self._dtype)
        stacked_bias = torch.empty(total, device=self._device, dtype=self._dtype) if bias else None
        row = 0
        for name, size in outputs.items():
            self._checkpoint.copy_into(f"{prefix}.{name}.weight", weight[row : row + size])
            if stacked_bias is not None:
                self._checkpoint.copy_into(f"{prefix}.{name}.bias", stacked_bias[row : row + size])
            row += size
        return _Linear(weight, stacked_bias)


class Decoder:
    """Token ids in, logits of the last position out.

    Args:
        shape: the model's configuration.
        folder: where its weights are.
        device: where to compute.
        dtype: of weights and activations.

    Raises:
        ConfigurationError: a tensor is missing, has another shape, or would not be used.
    """

    def __init__(
        self, shape: ModelShape, folder: Path, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shape = shape
        self._device = device
        self._dtype = dtype
        self._frequencies = shape.inverse_frequencies.to(device)
        with Checkpoint(folder) as checkpoint:
            reader = _Reader(checkpoint, device, dtype)
            self._embedding = reader.tensor(
                "model.embed_tokens.weight", shape.vocabulary, shape.hidden
            )
            self._layers = [self._read_layer(reader, index) for index in range(shape.layers)]
            self._norm = reader.tensor("model.norm.weight", shape.hidden)
            self._head = (
                self._embedding
                if shape.tied_embeddings
                else reader.tensor("lm_head.weight", shape.vocabulary, shape.hidden)
            )
            _refuse_unused(folder, checkpoint.unused())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights on the device."""
        tensors = [self._embedding, self._norm]
        if self._head is not self._embedding:
            tensors.append(self._head)
        for layer in self._layers:
            tensors += [layer.attention_norm, layer.mlp_norm]
            for linear in (layer.query_key_value, layer.output, layer.gate_up, layer.down):
                tensors.append(linear.weight)
                if linear.bias is not None:
                    tensors.append(linear.bias)
        return sum(tensor.nbytes for tensor in tensors)

    def forward(
        self, token_ids: Sequence[int], start: int, attend: Attend, *, want_logits: bool
    ) -> torch.Tensor | None:
        """Run the tokens at positions `start`, `start + 1`, ... through all layers.

        The last layer's output matters at the last position of a prompt only. So elsewhere that
        layer computes keys and values and nothing more, and `attend` gets no query rows.

        Args:
            token_ids: one or more.
            start: position of the first of them.
            attend: stores the layer's keys and values, and attends.
            want_logits: whether the last of the tokens is to be continued.

        Returns:
            The logits after the last token, float32 [vocabulary], or None.
        """
        rows = F.embedding(torch.tensor(token_ids, device=self._device), self._embedding)
        cosines, sines = self._rotation(start, len(token_ids))
        for index, layer in enumerate(self._layers):
            query, key, value = self._project(layer, rows, cosines, sines)
            if index == len(self._layers) - 1:
                wanted = 1 if want_logits else 0
                query = query[len(token_ids) - wanted :]
                rows = rows[len(token_ids) - wanted :]
            mixed = attend(index, query, key, value)
            if not rows.shape[0]:
                return None
            rows = rows + layer.output(mixed.flatten(1))
            rows = rows + self._mlp(layer, rows)
        return F.linear(self._normalise(rows, self._norm), self._head)[0].float()

    def _project(
        self, layer: _Layer, rows: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        projected = layer.query_key_value(self._normalise(rows, layer.attention_norm))
        projected = projected.view(rows.shape[0], heads + 2 * kv_heads, self.shape.head_dim)
        rotated = _rotate(projected[:, : heads + kv_heads], cosines, sines)
        return rotated[:, :heads], rotated[:, heads:], projected[:, heads + kv_heads :]

    def _mlp(self, layer: _Layer, rows: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(self._normalise(rows, layer.mlp_norm)).chunk(2, dim=-1)
        return layer.down(F.silu(gate).mul_(up))

    def _normalise(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(rows, (self.shape.hidden,), weight, self.shape.norm_epsilon)

    def _rotation(self, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines for `count` positions, each [count, 1, head_dim / 2].

        They are computed anew for each step, so that their bits depend on nothing but positions.
        """
        positions = torch.arange(start, start + count, device=self._device, dtype=torch.float32)
        angles = (positions[:, None] * self._frequencies)[:, None]
        scale = self.shape.rope_scaling
        return (angles.cos() * scale).to(self._dtype), (angles.sin() * scale).to(self._dtype)

    def _read_layer(self, reader: _Reader, index: int) -> _Layer:
        shape = self.shape
        prefix = f"model.layers.{index}"
        kv_width = shape.kv_heads * shape.head_dim
        width = shape.heads * shape.head_dim
        bias, mlp_bias = shape.attention_bias, shape.mlp_bias
        qkv = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        gate_up = {"gate_proj": shape.intermediate, "up_proj": shape.intermediate}
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return _Layer(
            attention_norm=reader.tensor(f"{prefix}.input_layernorm.weight", shape.hidden),
            query_key_value=reader.linear(attention, qkv, shape.hidden, bias=bias),
            output=reader.linear(attention, {"o_proj": shape.hidden}, width, bias=bias),
            mlp_norm=reader.tensor(f"{prefix}.post_attention_layernorm.weight", shape.hidden),
            gate_up=reader.linear(mlp, gate_up, shape.hidden, bias=mlp_bias),
            down=reader.linear(mlp, {"down_proj": shape.hidden}, shape.intermediate, bias=mlp_bias),
        )


def _rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + head_dim / 2) of every head [rows, heads, head_dim] by position."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


def _refuse_unused(folder: Path, names: list[str]) -> None:
    """Raise ConfigurationError for weights that the decoder would silently leave out.

    Tied heads and saved rotary frequencies repeat what is read elsewhere.
    """
    left = [name for name in names if name != "lm_head.weight" and "rotary_emb" not in name]
    if left:
        raise ConfigurationError(
            f"{folder}: {len(left)} tensor(s) do not belong to the architecture in config.json, "
            f"the first is {left[0]!r}."
        )

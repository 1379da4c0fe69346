"""The arithmetic between tokens and logits.

Where keys and values are kept, and in what pieces they are attended to, is the caller's:
`Decoder.forward` hands every layer's query, key and value rows to a function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from backends.base import ConfigurationError
from backends.engine.shape import ModelShape
from backends.engine.weights import Checkpoint

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, query rows, key rows, value rows) -> attended rows, each [rows, heads, head_dim].

There may be fewer query rows than key rows: they are the last ones.
"""


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer.

    Attributes:
        query_key_norm: factors on the normalised heads, queries before keys,
            [heads + kv_heads, head_dim]; None where heads are not normalised.
    """

    attention_norm: torch.Tensor
    query_key_value: _Linear
    query_key_norm: torch.Tensor | None
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
            self._head = self._read_head(reader, checkpoint)
            _refuse_unused(folder, checkpoint.unused())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights on the device."""
        tensors = [self._embedding, self._norm]
        if self._head is not self._embedding:
            tensors.append(self._head)
        for layer in self._layers:
            tensors += [layer.attention_norm, layer.mlp_norm]
            if layer.query_key_norm is not None:
                tensors.append(layer.query_key_norm)
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
        rotated = projected[:, : heads + kv_heads]
        if layer.query_key_norm is not None:
            rotated = F.rms_norm(rotated, (self.shape.head_dim,), eps=self.shape.norm_epsilon)
            rotated = rotated * layer.query_key_norm
        rotated = _rotate(rotated, cosines, sines)
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

    def _read_head(self, reader: _Reader, checkpoint: Checkpoint) -> torch.Tensor:
        """Return the output matrix: the embedding itself where the two are tied.

        A file may hold both. If these differ they are not tied, whatever the configuration says;
        transformers decides the same.
        """
        tied, name = self.shape.tied_embeddings, "lm_head.weight"
        if tied and name not in checkpoint:
            return self._embedding
        head = reader.tensor(name, self.shape.vocabulary, self.shape.hidden)
        return self._embedding if tied and torch.equal(head, self._embedding) else head

    def _read_layer(self, reader: _Reader, index: int) -> _Layer:
        shape = self.shape
        prefix = f"model.layers.{index}"
        kv_width = shape.kv_heads * shape.head_dim
        width = shape.heads * shape.head_dim
        optional = shape.optional_weights
        qkv = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        gate_up = {"gate_proj": shape.intermediate, "up_proj": shape.intermediate}
        down = {"down_proj": shape.hidden}
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return _Layer(
            attention_norm=reader.tensor(f"{prefix}.input_layernorm.weight", shape.hidden),
            query_key_value=reader.linear(
                attention, qkv, shape.hidden, bias=optional.query_key_value_bias
            ),
            query_key_norm=(
                self._read_query_key_norm(reader, attention) if optional.query_key_norm else None
            ),
            output=reader.linear(
                attention, {"o_proj": shape.hidden}, width, bias=optional.output_bias
            ),
            mlp_norm=reader.tensor(f"{prefix}.post_attention_layernorm.weight", shape.hidden),
            gate_up=reader.linear(mlp, gate_up, shape.hidden, bias=optional.mlp_bias),
            down=reader.linear(mlp, down, shape.intermediate, bias=optional.mlp_bias),
        )

    def _read_query_key_norm(self, reader: _Reader, prefix: str) -> torch.Tensor:
        """Stack the factors head by head, so that one product serves queries and keys."""
        shape = self.shape
        query = reader.tensor(f"{prefix}.q_norm.weight", shape.head_dim)
        key = reader.tensor(f"{prefix}.k_norm.weight", shape.head_dim)
        return torch.cat((query.expand(shape.heads, -1), key.expand(shape.kv_heads, -1)))


def _rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + head_dim / 2) of every head [rows, heads, head_dim] by position."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


def _refuse_unused(folder: Path, names: list[str]) -> None:
    """Raise ConfigurationError for weights that the decoder would silently leave out.

    Saved rotary frequencies repeat what follows from the configuration.
    """
    left = [name for name in names if "rotary_emb" not in name]
    if left:
        raise ConfigurationError(
            f"{folder}: {len(left)} tensor(s) do not belong to the architecture in config.json, "
            f"the first is {left[0]!r}."
        )

"""The arithmetic between tokens and logits.

Where keys and values are kept, and in what pieces they are attended to, is the caller's: it gives
every layer the room for its keys and values, and attends (`LayerRooms`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from backends.base import ConfigurationError
from backends.engine.memory import Buffer
from backends.engine.ops import Ops
from backends.engine.shape import ModelShape
from backends.engine.weights import WeightSource
from backends.engine.workspace import Workspace, slices


class Room(NamedTuple):
    """Where a layer's new keys and values go, each [tokens, kv_heads, head_dim].

    Attributes:
        row: the row of the first new token, int64 [1] on the device; None is row 0.
    """

    keys: torch.Tensor
    values: torch.Tensor
    row: torch.Tensor | None


class LayerRooms(Protocol):
    """One step's keys and values, layer by layer.

    Attributes:
        rows: new tokens in the step.
    """

    rows: int

    def room(self, layer: int) -> Room:
        """Return where the layer's new keys and values go, once that is free."""
        ...

    def written(self, layer: int) -> None:
        """Take note that they are there."""
        ...

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attend with the last rows of the step, [queries, heads, head_dim]; like `query`."""
        ...


class Observer(Protocol):
    """Looks on, for a comparison of two runs."""

    def starts(self, rotation: torch.Tensor) -> None:
        """See what the rotary embedding makes of ones at the step's positions, [rows, head_dim]."""
        ...

    def layer_done(self, layer: int, hidden: torch.Tensor) -> None:
        """See the residual rows [rows, hidden] after a layer; in the last, one row."""
        ...


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Write the product with `rows` into `out`."""
        if self.bias is None:
            torch.mm(rows, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, rows, self.weight.t(), out=out)

    def add_to(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Add the product with `rows` to `out`, within the product's own kernel."""
        out.addmm_(rows, self.weight.t())
        if self.bias is not None:
            out.add_(self.bias)


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
    """Makes tensors on the device from a source of weights."""

    def __init__(self, source: WeightSource, device: torch.device, dtype: torch.dtype) -> None:
        self._source = source
        self._device = device
        self._dtype = dtype

    def tensor(self, name: str, *size: int) -> torch.Tensor:
        target = torch.empty(size, device=self._device, dtype=self._dtype)
        self._source.copy_into(name, target)
        return target

    def linear(self, prefix: str, outputs: dict[str, int], inputs: int, *, bias: bool) -> _Linear:
        """Stack projections of the same input, so that one product computes them all."""
        total = sum(outputs.values())
        weight = torch.empty((total, inputs), device=self._device, dtype=self._dtype)
        stacked_bias = torch.empty(total, device=self._device, dtype=self._dtype) if bias else None
        row = 0
        for name, size in outputs.items():
            self._source.copy_into(f"{prefix}.{name}.weight", weight[row : row + size])
            if stacked_bias is not None:
                self._source.copy_into(f"{prefix}.{name}.bias", stacked_bias[row : row + size])
            row += size
        return _Linear(weight, stacked_bias)


def weight_buffers(shape: ModelShape, dtype: torch.dtype, *, tied: bool) -> tuple[Buffer, ...]:
    """Declare the weights of a `Decoder`, one buffer for each kind and all layers.

    Args:
        shape: the model's configuration.
        dtype: of the weights.
        tied: whether the output matrix is the embedding itself.
    """
    heads_width = shape.heads * shape.head_dim
    joint = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    optional = shape.optional_weights
    per_layer: dict[str, tuple[int, ...]] = {
        "query_key_value": (joint, shape.hidden),
        "output": (shape.hidden, heads_width),
        "gate_up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
        "norms": (2, shape.hidden),
    }
    if optional.query_key_norm:
        per_layer["query_key_norm"] = (shape.heads + shape.kv_heads, shape.head_dim)
    if optional.query_key_value_bias:
        per_layer["query_key_value_bias"] = (joint,)
    if optional.output_bias:
        per_layer["output_bias"] = (shape.hidden,)
    if optional.mlp_bias:
        per_layer["mlp_bias"] = (2 * shape.intermediate + shape.hidden,)
    sizes = {name: (shape.layers, *size) for name, size in per_layer.items()}
    sizes["embedding"] = (1 if tied else 2, shape.vocabulary, shape.hidden)
    sizes["norm"] = (shape.hidden,)
    return tuple(Buffer(name, size, dtype, "device", "weights") for name, size in sizes.items())


class Decoder:
    """Token ids in, logits of the last position out.

    Args:
        shape: the model's configuration.
        source: of its weights.
        device: where to compute.
        dtype: of weights and activations.
        ops: the kernels between the products.

    Raises:
        ConfigurationError: a tensor is missing, has another shape, or would not be used.
    """

    def __init__(
        self,
        shape: ModelShape,
        source: WeightSource,
        device: torch.device,
        dtype: torch.dtype,
        ops: Ops,
    ) -> None:
        self.shape = shape
        self._device = device
        self._dtype = dtype
        self._ops = ops
        self._work: Workspace
        self._frequencies = shape.inverse_frequencies.to(device)
        reader = _Reader(source, device, dtype)
        self._embedding = reader.tensor("model.embed_tokens.weight", shape.vocabulary, shape.hidden)
        self._layers = [self._read_layer(reader, index) for index in range(shape.layers)]
        self._norm = reader.tensor("model.norm.weight", shape.hidden)
        self._head = self._read_head(reader, source)
        _refuse_unused(source)

    def work_in(self, work: Workspace) -> None:
        """Take the buffers to compute in."""
        self._work = work

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
        self,
        tokens: torch.Tensor,
        start: torch.Tensor,
        rooms: LayerRooms,
        *,
        want_logits: bool,
        observer: Observer | None = None,
    ) -> torch.Tensor | None:
        """Run the tokens at positions `start`, `start + 1`, ... through all layers.

        The last layer's output matters at the last position of a prompt only. So elsewhere that
        layer computes keys and values and nothing more.

        Args:
            tokens: ids, int64 [rows], on the device.
            start: position of the first of them, int64 [1], on the device.
            rooms: keeps keys and values, and attends.
            want_logits: whether the last of the tokens is to be continued.
            observer: is shown every layer's rows.

        Returns:
            The logits after the last token, float32 [vocabulary], or None. The next step
            overwrites them.
        """
        work, rows = self._work, tokens.shape[0]
        if observer is not None:
            observer.starts(self.rotation_of(start, rows))
        hidden = work.hidden[:rows]
        torch.index_select(self._embedding, 0, tokens, out=hidden)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            reads = index < last or want_logits
            query = work.query[:rows] if reads else None
            self._project(index, layer, start, query, rooms)
            if query is None:
                return None
            if index == last:
                query, hidden = query[rows - 1 :], hidden[rows - 1 :]
            # Without a name, so that it is given back before the next layer's is allocated.
            self._mix(layer, hidden, rooms.attend(index, query).flatten(1))
            if observer is not None:
                observer.layer_done(index, hidden)
        normed = work.normed[:1]
        self._normalise(hidden, self._norm, normed)
        return torch.mm(normed, self._head.t(), out=self._logits_in_dtype())[0].float()

    def forward_one(
        self,
        token: torch.Tensor,
        position: torch.Tensor,
        rooms: LayerRooms,
        *,
        observer: Observer | None = None,
    ) -> torch.Tensor:
        """Run one token, in kernels made for one row; see `forward`.

        Nothing is read back from the device and nothing is allocated, so that CUDA graphs can
        hold the parts of the step.

        Returns:
            The logits, float32 [vocabulary]. The next step overwrites them.
        """
        if observer is not None:
            observer.starts(self.rotation_of(position, 1))
        self.enter_one(token)
        for index in range(len(self._layers)):
            self.project_one(index, position, rooms.room(index))
            rooms.written(index)
            self.mix_one(index, rooms.attend(index, self.query_of_one))
            if observer is not None:
                observer.layer_done(index, self._work.hidden[:1])
        return self.logits_of_one()

    @property
    def query_of_one(self) -> torch.Tensor:
        """The queries that `project_one` makes, [1, heads, head_dim]."""
        return self._work.query[:1]

    def enter_one(self, token: torch.Tensor) -> None:
        """Begin a step of one token: look its embedding up."""
        torch.index_select(self._embedding, 0, token, out=self._work.hidden[:1])

    def project_one(self, index: int, position: torch.Tensor, room: Room) -> None:
        """Compute a layer's query, and its key and value into their room."""
        layer, heads = self._layers[index], self.shape.heads + 2 * self.shape.kv_heads
        joint = layer.query_key_value
        projected = self._work.wide(1, joint.weight.shape[0])
        self._ops.project_one(
            self._work.hidden[:1],
            joint.weight,
            joint.bias,
            projected,
            norm=layer.attention_norm,
            epsilon=self.shape.norm_epsilon,
            add=False,
        )
        self._rotate(
            layer,
            projected.view(1, heads, -1),
            (position, 0),
            query=self.query_of_one,
            room=room,
        )

    def mix_one(self, index: int, attended: torch.Tensor) -> None:
        """Add to the residual row what attention [1, heads, head_dim] and the MLP make of it."""
        layer, hidden, gated = self._layers[index], self._work.hidden[:1], self._work.gated[:1]
        self._add_one(layer.output, attended.flatten(1), hidden)
        self._ops.gated_one(
            hidden,
            layer.gate_up.weight,
            layer.gate_up.bias,
            gated,
            norm=layer.mlp_norm,
            epsilon=self.shape.norm_epsilon,
        )
        self._add_one(layer.down, gated, hidden)

    def logits_of_one(self) -> torch.Tensor:
        """End a step of one token; return its logits, float32 [vocabulary]."""
        self._ops.project_one(
            self._work.hidden[:1],
            self._head,
            None,
            self._work.logits,
            norm=self._norm,
            epsilon=self.shape.norm_epsilon,
            add=False,
        )
        return self._work.logits[0]

    def rotation_of(self, start: torch.Tensor, rows: int) -> torch.Tensor:
        """Return what the rotary embedding makes of ones at `rows` positions, [rows, head_dim].

        For a check of positions: it goes through the kernel that queries and keys go through.
        """
        heads = self.shape.heads + 2 * self.shape.kv_heads
        size = (rows, heads, self.shape.head_dim)
        ones = torch.ones(size, device=self._device, dtype=self._dtype)
        keys, values = (ones.new_empty(rows, self.shape.kv_heads, size[2]) for _ in range(2))
        room = Room(keys, values, None)
        self._rotate(None, ones, (start, 0), query=None, room=room)
        return keys[:, 0]

    def _logits_in_dtype(self) -> torch.Tensor:
        """Return [1, vocabulary] in the dtype of the weights, over the bytes of the logits."""
        logits = self._work.logits
        return logits.view(self._dtype)[:, : logits.shape[1]]

    def _project(
        self,
        index: int,
        layer: _Layer,
        start: torch.Tensor,
        query: torch.Tensor | None,
        rooms: LayerRooms,
    ) -> None:
        """Compute a layer's queries, and its keys and values into their room."""
        work, room, rows = self._work, rooms.room(index), rooms.rows
        heads = self.shape.heads + 2 * self.shape.kv_heads
        for part in slices(rows):
            count = part.stop - part.start
            normed = work.normed[:count]
            self._normalise(work.hidden[part], layer.attention_norm, normed)
            joint = layer.query_key_value
            projected = work.wide(count, joint.weight.shape[0])
            joint(normed, projected)
            self._rotate(
                layer,
                projected.view(count, heads, -1),
                (start, part.start),
                query=None if query is None else query[part],
                room=Room(room.keys[part], room.values[part], room.row),
            )
        rooms.written(index)

    def _rotate(
        self,
        layer: _Layer | None,
        projected: torch.Tensor,
        position: tuple[torch.Tensor, int],
        *,
        query: torch.Tensor | None,
        room: Room,
    ) -> None:
        """Rotate projected rows [rows, heads + 2 * kv_heads, head_dim] to where they belong.

        The first row's position is the sum of `position`.
        """
        self._ops.rotate(
            projected,
            *position,
            self._frequencies,
            self.shape.rope_scaling,
            None if layer is None else layer.query_key_norm,
            self.shape.norm_epsilon,
            query,
            room.keys,
            room.values,
            room.row,
        )

    def _mix(self, layer: _Layer, hidden: torch.Tensor, attended: torch.Tensor) -> None:
        """Add to the residual rows what attention and the MLP make of them."""
        work = self._work
        for part in slices(hidden.shape[0]):
            rows, count = hidden[part], part.stop - part.start
            layer.output.add_to(attended[part], rows)
            normed, gated = work.normed[:count], work.gated[:count]
            self._normalise(rows, layer.mlp_norm, normed)
            gate_up = work.wide(count, layer.gate_up.weight.shape[0])
            layer.gate_up(normed, gate_up)
            self._ops.silu_mul(gate_up, gated)
            layer.down.add_to(gated, rows)

    def _add_one(self, linear: _Linear, row: torch.Tensor, hidden: torch.Tensor) -> None:
        self._ops.project_one(
            row, linear.weight, linear.bias, hidden, norm=None, epsilon=0.0, add=True
        )

    def _normalise(self, rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        self._ops.rms_norm(rows, weight, self.shape.norm_epsilon, out)

    def _read_head(self, reader: _Reader, source: WeightSource) -> torch.Tensor:
        """Return the output matrix: the embedding itself where the two are tied.

        A file may hold both. If these differ they are not tied, whatever the configuration says;
        transformers decides the same.
        """
        tied, name = self.shape.tied_embeddings, "lm_head.weight"
        if tied and name not in source:
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


def _refuse_unused(source: WeightSource) -> None:
    """Raise ConfigurationError for weights that the decoder would silently leave out.

    Saved rotary frequencies repeat what follows from the configuration.
    """
    left = [name for name in source.unused() if "rotary_emb" not in name]
    if left:
        raise ConfigurationError(
            f"{source.name}: {len(left)} tensor(s) do not belong to the architecture in "
            f"config.json, the first is {left[0]!r}."
        )

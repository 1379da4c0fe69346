"""Random weights whose keys have the structure of real ones: sinks, a local band, strong columns.

Random weights alone attend to everything alike, so that no sparse policy can leave anything out.
Here every embedding has a part in common, c, and those of a few token ids a part u beside it, which
projections turn into keys and queries:

- q_proj makes a + b of c, k_proj makes a of c and b of u; so a query scores a.a with each key and
  b.b with the keys of the few ids.
- a has its energy where RoPE's frequencies turn by about one radian within the head's width, in
  proportion to w exp(-(w width)^2 / 2) at the frequency w: sums of such cosines fall off like a
  Gaussian of that width. That is the local band.
- b lies in the lowest frequencies, which hardly turn within the context: its score does not
  depend on the distance. The ids stand at the first positions (sinks), and in a few short runs
  spread over the prompt (strong columns).
- Beside that everything is random: embeddings, and all weights. What attention and MLP add to the
  residual stream is kept small, so that c and u are still what they were in the last layer.

Widths differ from key head to key head and strengths from query head to query head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from scripts.bench.shapes import WEIGHT_STD, RandomWeights, Shape

COMMON_SHARE = 0.6
"""Root mean square of c in an embedding whose own root mean square is about 1."""
OWN_SHARE = 0.8
"""Of the random part that tells one token from another."""
STRONG_SHARE = 1.0
"""Of u, in the embeddings that have it."""
NOISE = 0.4
"""Root mean square of the random part of queries and keys."""
RESIDUAL_STD = WEIGHT_STD / 50
"""Deviation of o_proj and down_proj."""
LOW_FREQUENCIES = 4
"""How many of RoPE's frequencies hold b; fewer where heads are small."""
NARROWEST, WIDEST = 1 / 64, 1 / 8
"""Widths of the bands, in shares of the shape's longest named length, evenly spread in between on
a logarithmic scale."""
WEAKEST, STRONGEST = 0.8, 1.2
"""Of the query heads, times the strength."""
SINK_TOKENS = 4
COLUMNS, COLUMN_TOKENS = 8, 16
"""Runs of strong columns, each so many tokens, at multiples of COLUMN_TOKENS."""
SLICE_ROWS = 8192
"""Rows that are rotated at a time, to bound the memory for it."""
_GOLDEN = (math.sqrt(5) - 1) / 2

DESCRIPTION = (
    f"every embedding has a part in common, and {SINK_TOKENS} ids at the start and {COLUMNS} runs "
    f"of {COLUMN_TOKENS} spread over the prompt have another; query and key projections turn "
    "these into a local band that falls off like a Gaussian (widths from 1/64 to 1/8 of the "
    "shape's longest length, by key head), sinks and strong columns, with random noise beside; "
    "residuals are kept small, so that all layers see the same (scripts/bench/structured.py)"
)


_Product = tuple[torch.Tensor, torch.Tensor]
"""What a head makes, [heads, head_dim], of how much of a direction, [hidden]."""


class StructuredWeights(RandomWeights):
    """`RandomWeights` with structured keys.

    Args:
        shape: of the model.
        device: where weights are made.
        dtype: of the weights.
        seed: of the random parts.
        strength: the score of the nearest key, and of a strong one, before the softmax.
        strong_ids: token ids of sinks and strong columns.
    """

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        *,
        strength: float,
        strong_ids: Sequence[int],
    ) -> None:
        super().__init__(shape, device, dtype, seed)
        self.strength = strength
        self.strong_ids = tuple(strong_ids)
        generator = torch.Generator("cpu").manual_seed(seed)
        pair = torch.randn(2, shape.hidden, generator=generator, dtype=torch.float64)
        # Two rows at right angles, each with a root mean square of 1.
        self._common, self._strong = torch.linalg.qr(pair.T)[0].T * math.sqrt(shape.hidden)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Make one weight.

        Raises:
            KeyError: the shape has no weight of that name.
        """
        tensor = super().__getitem__(name)
        if name == "model.embed_tokens.weight":
            return self._embeddings(tensor)
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if kind in ("q_proj", "k_proj"):
            layer = int(name.split(".")[2])
            products = self._queries(layer) if kind == "q_proj" else self._keys(layer)
            tensor.mul_(NOISE / math.sqrt(self._shape.hidden) / WEIGHT_STD)
            for outputs, inputs in products:
                # On the device: on the CPU they would take most of the time to build a model.
                tensor.addr_(outputs.flatten().to(tensor), inputs.to(tensor))
            return tensor
        if kind in ("o_proj", "down_proj"):
            return tensor.mul_(RESIDUAL_STD / WEIGHT_STD)
        return tensor

    def _embeddings(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor.mul_(OWN_SHARE / WEIGHT_STD).add_(COMMON_SHARE * self._common.to(tensor))
        strong = torch.tensor(self.strong_ids, device=tensor.device)
        tensor[strong] += STRONG_SHARE * self._strong.to(tensor)
        return tensor

    def _queries(self, layer: int) -> list[_Product]:
        """Return the structured part of q_proj."""
        shape = self._shape
        group = shape.heads // shape.kv_heads
        both = self.bands(layer) + self._columns()
        factors = [
            WEAKEST + (STRONGEST - WEAKEST) * _spread(layer * shape.heads + head)
            for head in range(shape.heads)
        ]
        rows = both.repeat_interleave(group, 0) * torch.tensor(factors)[:, None].double()
        return [(rows, self._reads(self._common, COMMON_SHARE))]

    def _keys(self, layer: int) -> list[_Product]:
        """Return the structured part of k_proj."""
        columns = self._columns().expand(self._shape.kv_heads, -1)
        # A strong embedding is longer, so that its normalised parts are smaller.
        length = math.hypot(COMMON_SHARE, OWN_SHARE, STRONG_SHARE)
        return [
            (self.bands(layer), self._reads(self._common, COMMON_SHARE)),
            (columns, self._reads(self._strong, STRONG_SHARE / length)),
        ]

    def _reads(self, direction: torch.Tensor, share: float) -> torch.Tensor:
        """Return the row that makes 1 of a normalised row with that share of a direction."""
        return direction / (self._shape.hidden * share)

    def bands(self, layer: int) -> torch.Tensor:
        """Return a for each key head, float64 [kv_heads, head_dim]."""
        shape = self._shape
        half = shape.head_dim // 2
        frequencies = shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        rows = torch.zeros(shape.kv_heads, shape.head_dim, dtype=torch.float64)
        for head in range(shape.kv_heads):
            turns = frequencies * self.width(layer, head)
            energy = turns * torch.exp(-(turns**2) / 2)
            energy[half - self._low :] = 0
            rows[head, :half] = (energy / energy.sum()).sqrt()
        return rows * self._size

    def width(self, layer: int, head: int) -> float:
        """Return the width of a key head's band, in tokens."""
        share = _spread(layer * self._shape.kv_heads + head)
        return max(self._shape.lengths) * NARROWEST * math.pow(WIDEST / NARROWEST, share)

    def _columns(self) -> torch.Tensor:
        """Return b, float64 [1, head_dim]."""
        half = self._shape.head_dim // 2
        row = torch.zeros(1, self._shape.head_dim, dtype=torch.float64)
        row[0, half - self._low : half] = math.sqrt(1 / self._low)
        return row * self._size

    @property
    def _low(self) -> int:
        return min(LOW_FREQUENCIES, self._shape.head_dim // 8)

    @property
    def _size(self) -> float:
        """Length of a and of b, whose product with itself is the strength times sqrt(head_dim)."""
        return math.sqrt(self.strength * math.sqrt(self._shape.head_dim))


def _spread(number: int) -> float:
    """Return the `number`-th of numbers that fill 0 to 1 evenly, however many there are."""
    return number * _GOLDEN % 1.0


# --- prompts ------------------------------------------------------------------------------------


def strong_ids(shape: Shape, text: Sequence[int]) -> tuple[int, ...]:
    """Return token ids for sinks and strong columns: the highest that the text does not have."""
    taken = set(text)
    free = (one for one in reversed(range(shape.vocabulary)) if one not in taken)
    return tuple(one for one, _ in zip(free, range(COLUMN_TOKENS), strict=False))


def strong_positions(tokens: int) -> list[int]:
    """Return where sinks and strong columns stand in a prompt of so many tokens."""
    positions = list(range(min(SINK_TOKENS, tokens)))
    for number in range(COLUMNS):
        start = int(tokens * (number + 0.5) / COLUMNS) // COLUMN_TOKENS * COLUMN_TOKENS
        positions += range(start, min(start + COLUMN_TOKENS, tokens))
    return sorted(set(positions))


def with_columns(
    make_prompt: Callable[[int], tuple[int, ...]], ids: Sequence[int]
) -> Callable[[int], tuple[int, ...]]:
    """Return what makes the same prompts with strong ids in their places."""

    def make(tokens: int) -> tuple[int, ...]:
        prompt = list(make_prompt(tokens))
        for number, position in enumerate(strong_positions(tokens)):
            prompt[position] = ids[number % len(ids)]
        return tuple(prompt)

    return make


# --- queries and keys of the first layer --------------------------------------------------------


class FirstLayer(NamedTuple):
    """What the first layer attends with.

    Attributes:
        query: [tokens, heads, head_dim], rotated.
        key: [tokens, kv_heads, head_dim], rotated.
        value: like `key`.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def first_layer(weights: StructuredWeights, shape: Shape, prompt: Sequence[int]) -> FirstLayer:
    """Return queries, keys and values of the first layer, by plain PyTorch."""
    embedding = weights["model.embed_tokens.weight"]
    hidden = embedding[torch.tensor(prompt, device=embedding.device)]
    del embedding
    normed = torch.nn.functional.rms_norm(hidden, (shape.hidden,), eps=shape.norm_epsilon)

    def project(name: str, heads: int) -> torch.Tensor:
        weight = weights[f"model.layers.0.self_attn.{name}.weight"]
        return (normed @ weight.t()).view(len(prompt), heads, shape.head_dim)

    return FirstLayer(
        _rotated(project("q_proj", shape.heads), shape),
        _rotated(project("k_proj", shape.kv_heads), shape),
        project("v_proj", shape.kv_heads),
    )


def _rotated(rows: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Turn [tokens, heads, head_dim] by RoPE, halves apart as in transformers' Llama."""
    half = shape.head_dim // 2
    # On the CPU: exact enough for positions beyond 2**17 only in float64.
    frequencies = shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(rows.shape[0], dtype=torch.float64)[:, None, None] * frequencies
    cosine, sine = (one.to(rows.device, torch.float32) for one in (angles.cos(), angles.sin()))
    turned = torch.empty_like(rows)
    for start in range(0, rows.shape[0], SLICE_ROWS):
        span = slice(start, start + SLICE_ROWS)
        first, second = rows[span, :, :half].float(), rows[span, :, half:].float()
        turned[span, :, :half] = first * cosine[span] - second * sine[span]
        turned[span, :, half:] = first * sine[span] + second * cosine[span]
    return turned

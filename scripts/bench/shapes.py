"""Shapes of models by name, the numbers of their configuration, and their random weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

WEIGHT_STD = 0.02  # transformers' initializer_range for Llama


class Product(NamedTuple):
    """One matrix product of a layer: rows [rows, inputs] times weights [outputs, inputs]."""

    name: str
    inputs: int
    outputs: int


class ChunkedSettings(NamedTuple):
    """The named setting of the chunked offload."""

    chunk_tokens: int
    block_tokens: int
    gpu_blocks: int


@dataclass(frozen=True)
class Shape:
    """The numbers of a Llama model, and the sizes at which it is measured by default.

    Attributes:
        name: by which --shape chooses it.
        max_tokens: the longest prompt with its generation that is measured.
        chunked: the chunked offload's setting.
        gemm_rows: rows of the products whose rate is measured.
        lengths: prompt tokens measured by default.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    max_tokens: int
    chunked: ChunkedSettings
    gemm_rows: tuple[int, ...]
    lengths: tuple[int, ...]
    rope_theta: float = 500_000.0
    norm_epsilon: float = 1e-5

    @property
    def kv_width(self) -> int:
        """Numbers in the keys of one token in one layer."""
        return self.kv_heads * self.head_dim

    @property
    def products(self) -> tuple[Product, ...]:
        """The four products of a layer, as an engine with stacked weights runs them."""
        width = self.heads * self.head_dim
        return (
            Product("qkv", self.hidden, width + 2 * self.kv_width),
            Product("output", width, self.hidden),
            Product("gate_up", self.hidden, 2 * self.intermediate),
            Product("down", self.intermediate, self.hidden),
        )

    def config(self, max_positions: int) -> dict[str, object]:
        """Return the config.json of a transformers model of this shape."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": max_positions,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": self.norm_epsilon,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
        }

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight under the name that transformers gives it."""
        width = self.heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary, self.hidden)
        }
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            shapes |= {
                f"{prefix}.self_attn.q_proj.weight": (width, self.hidden),
                f"{prefix}.self_attn.k_proj.weight": (self.kv_width, self.hidden),
                f"{prefix}.self_attn.v_proj.weight": (self.kv_width, self.hidden),
                f"{prefix}.self_attn.o_proj.weight": (self.hidden, width),
                f"{prefix}.mlp.gate_proj.weight": (self.intermediate, self.hidden),
                f"{prefix}.mlp.up_proj.weight": (self.intermediate, self.hidden),
                f"{prefix}.mlp.down_proj.weight": (self.hidden, self.intermediate),
                f"{prefix}.input_layernorm.weight": (self.hidden,),
                f"{prefix}.post_attention_layernorm.weight": (self.hidden,),
            }
        return shapes | {
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": (self.vocabulary, self.hidden),
        }


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            name="llama-3.1-8b",
            layers=32,
            hidden=4096,
            heads=32,
            kv_heads=8,
            head_dim=128,
            intermediate=14336,
            vocabulary=128256,
            max_tokens=1_048_576,
            chunked=ChunkedSettings(chunk_tokens=8192, block_tokens=16384, gpu_blocks=4),
            gemm_rows=(8192, 16384, 32768),
            lengths=(32768, 131072),
        ),
        Shape(
            name="tiny",
            layers=3,
            hidden=64,
            heads=4,
            kv_heads=2,
            head_dim=16,
            intermediate=160,
            vocabulary=4096,
            max_tokens=4096,
            chunked=ChunkedSettings(chunk_tokens=32, block_tokens=64, gpu_blocks=4),
            gemm_rows=(32, 64),
            lengths=(96, 256),
        ),
    )
}
"""What --shape allows. "tiny" is for trying the script out, and for its tests on a CPU."""


class RandomWeights(Mapping[str, torch.Tensor]):
    """Random weights by transformers' names; each is made anew whenever it is asked for.

    So they take no memory beside the model that they are copied into, and two models that read
    the same mapping hold the same numbers: normal with a deviation of `WEIGHT_STD`, norms one.

    Args:
        shape: of the model.
        device: where they are made.
        dtype: of the weights.
        seed: the same numbers for the same seed, device and version of PyTorch.
    """

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self._device, self._dtype, self._seed = device, dtype, seed
        self._shape = shape

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shape.weight_shapes()

    @cached_property
    def _ordinals(self) -> dict[str, int]:
        return {name: ordinal for ordinal, name in enumerate(self._shapes)}

    def __getitem__(self, name: str) -> torch.Tensor:
        """Make one weight.

        Raises:
            KeyError: the shape has no weight of that name.
        """
        tensor = torch.empty(self._shapes[name], device=self._device, dtype=self._dtype)
        if tensor.dim() == 1:
            return tensor.fill_(1.0)
        generator = torch.Generator(self._device).manual_seed(
            self._seed * len(self._shapes) + self._ordinals[name]
        )
        return tensor.normal_(0.0, WEIGHT_STD, generator=generator)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

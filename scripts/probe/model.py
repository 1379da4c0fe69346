"""The probe as it is trained: a Llama whose regions between attentions compile at one shape.

Everything but attention looks at single tokens, so it runs on a flat [tokens, hidden] batch whose
shape is the same at every sequence length: the compiler sees three regions once, and only the
attention call learns that a batch is 128 rows of 512 or 2 rows of 32768.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query [rows, heads, length, head_dim], key, value [rows, kv_heads, ...]) -> like query."""


@dataclass(frozen=True)
class ProbeConfig:
    """Shape of the model; the defaults are the probe's."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    max_positions: int = 65_536
    end_of_text: int = 0
    pad: int = 1

    def to_hf(self) -> dict[str, Any]:
        """Return config.json as transformers writes it for LlamaForCausalLM."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "dtype": "bfloat16",
            "eos_token_id": self.end_of_text,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_positions,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "pad_token_id": self.pad,
            "pretraining_tp": 1,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }

    def generation_config(self) -> dict[str, Any]:
        """Return generation_config.json: greedy, stops at the end of text."""
        return {
            "do_sample": False,
            "eos_token_id": self.end_of_text,
            "pad_token_id": self.pad,
            "use_cache": True,
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for a checkpoint."""
        return asdict(self)


class Layer(nn.Module):
    """Weights of one block: queries, keys and values in one matrix, gate and up in another."""

    def __init__(self, config: ProbeConfig) -> None:
        super().__init__()
        c = config
        out_std = INIT_STD / math.sqrt(2 * c.num_layers)
        heads = c.num_heads * c.head_dim
        self.attention_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.qkv = _weight((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden_size, INIT_STD)
        self.out = _weight(c.hidden_size, heads, out_std)
        self.mlp_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.gate_up = _weight(2 * c.intermediate_size, c.hidden_size, INIT_STD)
        self.down = _weight(c.hidden_size, c.intermediate_size, out_std)


INIT_STD = 0.03  # 0.02 is meant for wider models
EMBEDDING_STD = 0.04


def _weight(rows: int, columns: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * std)


class LossParts(NamedTuple):
    """What one micro-batch gives.

    Attributes:
        answers, others: weighted mean cross entropy in nats, scalars.
        correct: 1 where the most likely token is the target, [loss_positions].
    """

    answers: Tensor
    others: Tensor
    correct: Tensor


class Probe(nn.Module):
    """The model in float32, computing in `compute_dtype`."""

    def __init__(self, config: ProbeConfig, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.embedding = _weight(config.vocab_size, config.hidden_size, EMBEDDING_STD)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.final_norm = nn.Parameter(torch.ones(config.hidden_size))
        self._before, self._after, self._loss = before_attention, after_attention, token_loss
        self._rope: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def compile_regions(self) -> None:
        """Compile the three regions between the attentions."""
        self._before = torch.compile(before_attention, dynamic=False)
        self._after = torch.compile(after_attention, dynamic=False)
        self._loss = torch.compile(token_loss, dynamic=False)

    def use_plain_regions(self) -> None:
        """Undo `compile_regions`."""
        self._before, self._after, self._loss = before_attention, after_attention, token_loss

    def hidden(self, tokens: Tensor, attention: Attention) -> Tensor:
        """Return the last layer's output before the final norm.

        Args:
            tokens: ids, [rows, length].
            attention: causal attention for this length.

        Returns:
            [rows * length, hidden_size] in the compute type.
        """
        rows, length = tokens.shape
        cos, sin = self.rotations(rows, length)
        x = F.embedding(tokens.reshape(-1), self.embedding).to(self.compute_dtype)
        for layer in self.blocks():
            q, k, v = self.project(layer, x, cos, sin)
            mixed = attention(*(_by_head(t, rows, length) for t in (q, k, v)))
            x = self.merge(layer, x, mixed.transpose(1, 2).reshape(rows * length, -1))
        return x

    def loss(
        self,
        tokens: Tensor,
        attention: Attention,
        *,
        positions: Tensor,
        targets: Tensor,
        answer_weights: Tensor,
        other_weights: Tensor,
    ) -> LossParts:
        """Return the loss at chosen places of a batch (see sequences.Batch)."""
        x = self.hidden(tokens, attention).index_select(0, positions)
        nats, correct = self._loss(
            x, self.final_norm, self.embedding, targets, self.config.norm_eps
        )
        return LossParts((nats * answer_weights).sum(), (nats * other_weights).sum(), correct)

    def logits(self, x: Tensor) -> Tensor:
        """Return logits in float32, [..., vocab_size], from the last layer's output."""
        normed = _rms_norm(x, self.final_norm, self.config.norm_eps)
        return (normed @ self.embedding.to(x.dtype).T).float()

    def project(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Return rotated queries and keys, and values, each [tokens, heads, head_dim]."""
        c = self.config
        return self._before(
            x,
            norm=layer.attention_norm,
            qkv=layer.qkv,
            cos=cos,
            sin=sin,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            eps=c.norm_eps,
        )

    def merge(self, layer: Layer, x: Tensor, mixed: Tensor) -> Tensor:
        """Add attention's output and the MLP's to the residual stream."""
        return self._after(
            x,
            mixed,
            out=layer.out,
            norm=layer.mlp_norm,
            gate_up=layer.gate_up,
            down=layer.down,
            eps=self.config.norm_eps,
        )

    def blocks(self) -> Iterator[Layer]:
        """Iterate over the layers."""
        for layer in self.layers:
            assert isinstance(layer, Layer)
            yield layer

    def rotations(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of 0..length-1 for each row, [tokens, 1, head_dim/2]."""
        if (rows, length) not in self._rope:
            device = self.embedding.device
            self._rope[rows, length] = self.rotations_at(
                torch.arange(length, device=device).repeat(rows)
            )
        return self._rope[rows, length]

    def rotations_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines in float32 at given positions, [tokens, 1, head_dim/2]."""
        half = self.config.head_dim // 2
        steps = torch.arange(half, device=positions.device, dtype=torch.float32) / half
        angles = positions.float()[:, None] * self.config.rope_theta**-steps
        return angles.cos()[:, None], angles.sin()[:, None]

    def hf_state(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the weights under the names transformers' Llama gives them."""
        c = self.config
        heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        state: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.final_norm,
        }
        for index, layer in enumerate(self.blocks()):
            q, k, v = torch.split(layer.qkv, [heads, kv, kv])
            gate, up = layer.gate_up.chunk(2)
            prefix = f"model.layers.{index}."
            state |= {
                f"{prefix}input_layernorm.weight": layer.attention_norm,
                f"{prefix}self_attn.q_proj.weight": q,
                f"{prefix}self_attn.k_proj.weight": k,
                f"{prefix}self_attn.v_proj.weight": v,
                f"{prefix}self_attn.o_proj.weight": layer.out,
                f"{prefix}post_attention_layernorm.weight": layer.mlp_norm,
                f"{prefix}mlp.gate_proj.weight": gate,
                f"{prefix}mlp.up_proj.weight": up,
                f"{prefix}mlp.down_proj.weight": layer.down,
            }
        return {
            name: tensor.detach().to("cpu", dtype).contiguous().clone()
            for name, tensor in state.items()
        }

    def load_hf_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over weights under the names and in the shapes that `hf_state` gives them."""
        with torch.no_grad():
            self.embedding.copy_(state["model.embed_tokens.weight"])
            self.final_norm.copy_(state["model.norm.weight"])
            for index, layer in enumerate(self.blocks()):
                prefix = f"model.layers.{index}."
                for parameter, names in (
                    (layer.attention_norm, ["input_layernorm"]),
                    (layer.qkv, [f"self_attn.{part}_proj" for part in "qkv"]),
                    (layer.out, ["self_attn.o_proj"]),
                    (layer.mlp_norm, ["post_attention_layernorm"]),
                    (layer.gate_up, ["mlp.gate_proj", "mlp.up_proj"]),
                    (layer.down, ["mlp.down_proj"]),
                ):
                    parts = [state[f"{prefix}{name}.weight"] for name in names]
                    parameter.copy_(torch.cat(parts))


def _by_head(x: Tensor, rows: int, length: int) -> Tensor:
    return x.view(rows, length, x.shape[1], x.shape[2]).transpose(1, 2)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def before_attention(
    x: Tensor,
    *,
    norm: Tensor,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise, project and rotate: x [tokens, hidden] to three [tokens, heads, head_dim]."""
    projected = _rms_norm(x, norm, eps) @ qkv.to(x.dtype).T
    heads = projected.view(x.shape[0], num_heads + 2 * num_kv_heads, -1)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin), v.contiguous()


def after_attention(
    x: Tensor,
    mixed: Tensor,
    *,
    out: Tensor,
    norm: Tensor,
    gate_up: Tensor,
    down: Tensor,
    eps: float,
) -> Tensor:
    """Add attention's output, then the SwiGLU MLP's; x and mixed are [tokens, ...]."""
    x = x + mixed @ out.to(x.dtype).T
    gate, up = (_rms_norm(x, norm, eps) @ gate_up.to(x.dtype).T).chunk(2, dim=-1)
    return x + (F.silu(gate) * up) @ down.to(x.dtype).T


def token_loss(
    x: Tensor, norm: Tensor, embedding: Tensor, targets: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return cross entropy in nats and whether the best token is the target, each [tokens]."""
    logits = (_rms_norm(x, norm, eps) @ embedding.to(x.dtype).T).float()
    nats = F.cross_entropy(logits, targets, reduction="none")
    return nats, (logits.detach().argmax(-1) == targets).float()

"""The probe as a GGUF file, which llama.cpp's server reads.

llama.cpp's own converter knows tokenizers by a list of hashes, and the probe's is not on it. Its
tokenizer cuts text as SmolLM's does (digits one by one, then GPT-2's pattern), so that is the name
it gets. The file holds the probe's weights as float32, which loses nothing of its bfloat16.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ruler_bench.errors import UsageError

INSTALL = 'pip install "gguf>=0.17"'
ARCHITECTURE = "llama"
PRE_TOKENIZER = "smollm"
WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names of tensors in Hugging Face's format, and in GGUF (llama.cpp, gguf-py/gguf/constants.py)."""


def write(model: Path, path: Path) -> None:
    """Write a Llama model with tied embeddings and a byte-level BPE tokenizer as a GGUF file.

    Args:
        model: its folder.
        path: of the file; its folder is there.

    Raises:
        UsageError: the package gguf is missing.
    """
    try:
        import gguf  # noqa: PLC0415 (this server alone needs it)
    except ModuleNotFoundError as error:
        raise UsageError(f"--servers llama.cpp: the package gguf is missing; {INSTALL}.") from error
    config = json.loads((model / CONFIG).read_text(encoding="utf-8"))
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, ARCHITECTURE)
    _add_shape(writer, config)
    _add_tokenizer(writer, gguf.TokenType, json.loads((model / TOKENIZER).read_text("utf-8")))
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    for name, tensor in load_file(model / WEIGHTS).items():
        writer.add_tensor(gguf_name(name), _laid_out(name, tensor, config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(path)  # what is there is whole


def gguf_name(name: str) -> str:
    """Return what GGUF calls a tensor."""
    if name in TOP:
        return TOP[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{LAYER[rest.removesuffix('.weight')]}.weight"


def _laid_out(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Return a tensor as llama.cpp wants it: it rotates neighbouring rows of a head, Hugging Face
    rows that are half a head apart.
    """
    tensor = tensor.float()
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    key = next((heads[one] for one in heads if one in name), None)
    if key is None:
        return tensor
    halves = tensor.view(config[key], 2, -1, tensor.shape[-1])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def _add_shape(writer: Any, config: dict[str, Any]) -> None:
    writer.add_name("probe")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: Any, kinds: Any, tokenizer: dict[str, Any]) -> None:
    model = tokenizer["model"]
    special = {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    ids = model["vocab"] | special
    tokens = sorted(ids, key=lambda one: ids[one])
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(tokens)
    types = [kinds.CONTROL if one in special else kinds.NORMAL for one in tokens]
    writer.add_token_types([int(one) for one in types])
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)

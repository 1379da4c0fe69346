"""Weights to start from: a folder in Hugging Face format, checked against the probe's shape."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from scripts.probe.model import Probe, ProbeConfig

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"

# What decides the computation; the rest of config.json is how to load it.
SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
)


class WeightsError(Exception):
    """A folder's weights cannot be trained on; the message says which folder and why."""


def read_weights(folder: Path, config: ProbeConfig, assets: Path) -> dict[str, Tensor]:
    """Read a folder's weights.

    Args:
        folder: holds model.safetensors, and perhaps config.json and tokenizer.json.
        config: shape that the weights must have, as far as config.json tells.
        assets: folder of the tokenizer that training uses, which must be the folder's too.

    Returns:
        Tensors by the names transformers' Llama gives them.

    Raises:
        WeightsError: the folder holds no weights, or those of another model or tokenizer.
    """
    try:
        tensors = load_file(folder / WEIGHTS)
    except OSError as error:
        raise WeightsError(
            f"--from {folder}: no weights there ({WEIGHTS}: {error.strerror or error}); give the"
            " folder of an exported probe, such as ruler_bench/assets/probe"
        ) from error
    except SafetensorError as error:
        raise WeightsError(f"--from {folder}: {WEIGHTS} is damaged: {error}") from error
    _check_config(folder, config)
    _check_shapes(folder, tensors, config)
    own, used = folder / TOKENIZER, assets / TOKENIZER
    if own.exists() and own.read_bytes() != used.read_bytes():
        raise WeightsError(
            f"--from {folder}: its {TOKENIZER} is not the one of {assets}; add --assets {folder}"
            " and make the data anew with --prepare"
        )
    return tensors


def _check_config(folder: Path, config: ProbeConfig) -> None:
    path = folder / CONFIG
    if not path.exists():
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightsError(f"{path} is not JSON: {error}") from error
    expected = config.to_hf()
    others = [
        f"{name} {found.get(name)} instead of {expected[name]}"
        for name in SHAPE
        if found.get(name) != expected[name]
    ]
    if others:
        raise WeightsError(
            f"--from {folder}: another model than the probe: {', '.join(others)}; start from"
            " weights of the shape in scripts/probe/model.py"
        )


def _check_shapes(folder: Path, found: dict[str, Tensor], config: ProbeConfig) -> None:
    expected = Probe(config, torch.float32).hf_state(torch.float32)
    for name in sorted(found.keys() | expected.keys()):
        has, wants = (
            list(side[name].shape) if name in side else None for side in (found, expected)
        )
        if has != wants:
            raise WeightsError(
                f"--from {folder}: {name} is {has or 'missing'} where the probe has"
                f" {wants or 'nothing'}; start from weights of the shape in scripts/probe/model.py"
            )

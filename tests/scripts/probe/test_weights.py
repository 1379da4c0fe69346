"""Weights to start a training from: they come back, and others are refused with a reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts import train_probe
from scripts.probe.model import Probe, ProbeConfig
from scripts.probe.training import save_configs, save_weights
from scripts.probe.weights import WeightsError, read_weights

TINY = ProbeConfig(
    hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    save_weights(Probe(TINY, torch.float32), tmp_path)
    save_configs(TINY, tmp_path)
    shutil.copy(train_probe.ASSETS / "tokenizer.json", tmp_path)
    return tmp_path


def read(folder: Path) -> dict[str, torch.Tensor]:
    return read_weights(folder, TINY, train_probe.ASSETS)


def test_weights_that_were_written_are_taken_over(folder: Path) -> None:
    torch.manual_seed(2)
    model = Probe(TINY, torch.float32)
    model.load_hf_state(read(folder))
    stored = load_file(folder / "model.safetensors")
    for name, tensor in model.hf_state(torch.bfloat16).items():
        assert torch.equal(tensor, stored[name]), name


def test_the_shipped_weights_are_a_start() -> None:
    tensors = read_weights(train_probe.ASSETS, ProbeConfig(), train_probe.ASSETS)
    assert tensors["model.embed_tokens.weight"].shape == (4096, 256)


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def damaged(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def another_shape(folder: Path) -> None:
    path = folder / "model.safetensors"
    state = load_file(path)
    state["model.layers.1.mlp.up_proj.weight"] = torch.zeros(8, 32)
    save_file(state, path)


def another_layer(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"model.layers.2.input_layernorm.weight": torch.ones(32)}, path)


def another_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 10_000.0}))


def another_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (no_weights, "no weights there"),
        (damaged, "damaged"),
        (another_shape, r"up_proj.weight is \[8, 32\] where the probe has \[48, 32\]"),
        (another_layer, r"layers.2.input_layernorm.weight is \[32\] where the probe has nothing"),
        (another_config, "rope_theta 10000.0 instead of 500000.0"),
        (another_tokenizer, "--prepare"),
    ],
)
def test_other_weights_are_refused(folder: Path, spoil: object, reason: str) -> None:
    assert callable(spoil)
    spoil(folder)
    with pytest.raises(WeightsError, match=reason):
        read(folder)


def test_the_command_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    asked = ["--from", str(empty), "--out", str(tmp_path / "run"), "--device", "cpu"]
    assert train_probe.main(asked) == 2
    assert f"--from {empty}: no weights there" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()

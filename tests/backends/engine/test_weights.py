import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from backends.base import ConfigurationError
from backends.engine import gpu_only, offload, offload_layerwise
from backends.engine.weights import Checkpoint


@pytest.fixture
def copied(tiny, tmp_path):
    folder = tmp_path / "copied"
    shutil.copytree(tiny, folder)
    return folder


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_tensor_is_copied_with_device_and_dtype_of_the_target(tiny):
    wanted = load_file(tiny / "model.safetensors")["model.norm.weight"]
    target = torch.empty(wanted.shape, dtype=torch.bfloat16)
    with Checkpoint(tiny) as checkpoint:
        checkpoint.copy_into("model.norm.weight", target)
        assert "model.norm.weight" not in checkpoint.unused()
        assert "lm_head.weight" in checkpoint.unused()
    assert torch.equal(target, wanted.bfloat16())


def test_a_folder_without_weights(copied):
    (copied / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"holds no weights: model\.safetensors or"):
        gpu_only(model_path=str(copied))


def test_a_broken_file(copied):
    (copied / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(ConfigurationError, match="is not a readable safetensors file"):
        gpu_only(model_path=str(copied))


def test_a_missing_shard(save_model):
    folder = save_model(shard_size="30KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    gone = sorted(set(index["weight_map"].values()))[1]
    (folder / gone).unlink()
    with pytest.raises(ConfigurationError, match=f"{gone} is named in .* and is missing"):
        gpu_only(model_path=str(folder))


def test_a_missing_tensor(copied):
    rewrite(copied, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ConfigurationError, match=r"lack the tensor 'model\.layers\.1\.mlp\.up_pro"):
        gpu_only(model_path=str(copied))


def test_a_tensor_of_another_shape(copied):
    rewrite(copied, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(7)}))
    with pytest.raises(ConfigurationError, match=r"shape \(7,\), but .* asks for \(48,\)"):
        gpu_only(model_path=str(copied))


def test_a_tensor_that_would_be_left_out(copied):
    name = "model.layers.0.self_attn.q_norm.weight"
    rewrite(copied, lambda tensors: tensors.update({name: torch.ones(16)}))
    with pytest.raises(ConfigurationError, match=r"1 tensor.* do not belong .*q_norm"):
        gpu_only(model_path=str(copied))


def test_a_tensor_that_its_shard_lacks(save_model):
    folder = save_model(shard_size="30KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    name = next(key for key, file in index["weight_map"].items() if file == files[0])
    index["weight_map"][name] = files[1]
    path.write_text(json.dumps(index))
    with pytest.raises(ConfigurationError, match=rf"{files[1]}: the tensor '{name}' cannot be rea"):
        gpu_only(model_path=str(folder))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[" * 100_000,
        "[]",
        "3",
        "{}",
        '{"weight_map": null}',
        '{"weight_map": ["a"]}',
        '{"weight_map": 3}',
        '{"weight_map": {"model.norm.weight": 3}}',
        '{"weight_map": {"model.norm.weight": null}}',
    ],
    ids=lambda content: content[:40],
)
def test_a_broken_index_is_one_line(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigurationError, match="save or copy the model anew") as caught:
        Checkpoint(tmp_path)
    assert "model.safetensors.index.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "make", [lambda path: path.mkdir(), lambda path: path.symlink_to(path.parent / "gone")]
)
def test_what_is_no_file_is_one_line(tmp_path, name, make):
    make(tmp_path / name)
    with pytest.raises(ConfigurationError, match="save or copy the model anew") as caught:
        Checkpoint(tmp_path)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


# Weights that are given, not read.


@pytest.fixture(scope="module")
def twin(tiny):
    """transformers' model of the same folder."""
    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)


@pytest.mark.parametrize("build", [gpu_only, offload, offload_layerwise])
def test_a_state_dict_gives_the_bits_of_the_files(build, tiny, twin, ask):
    settings = {"model_path": str(tiny), "max_model_len": 512}
    wanted = ask(build(**settings), 60, 5)
    engine = build(**settings, weights=twin.state_dict())
    assert ask(engine, 60, 5).logits_digest == wanted.logits_digest
    assert engine.describe() == build(**settings).describe()


def test_the_engine_keeps_a_copy_of_its_own(tiny, twin, ask):
    weights = {name: tensor.clone() for name, tensor in twin.state_dict().items()}
    engine = gpu_only(model_path=str(tiny), weights=weights)
    wanted = ask(engine, 60, 5)
    for tensor in weights.values():
        tensor.zero_()
    assert ask(engine, 60, 5).logits_digest == wanted.logits_digest


def test_a_folder_without_weights_is_enough_then(copied, twin, tiny, ask):
    (copied / "model.safetensors").unlink()
    engine = gpu_only(model_path=str(copied), weights=twin.state_dict())
    wanted = ask(gpu_only(model_path=str(tiny)), 60, 5)
    assert ask(engine, 60, 5).logits_digest == wanted.logits_digest


def test_a_tied_model_needs_no_head(save_model, ask):
    folder = save_model(tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    both = model.state_dict()
    wanted = ask(gpu_only(model_path=str(folder)), 60, 5)
    for weights in (both, {name: both[name] for name in both if name != "lm_head.weight"}):
        engine = gpu_only(model_path=str(folder), weights=weights)
        assert ask(engine, 60, 5).logits_digest == wanted.logits_digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"),
            r"weights: the weights lack the tensor 'model\.layers\.1\.mlp\.up_proj\.weight'\.",
        ),
        (
            lambda weights: weights.update({"model.norm.weight": torch.zeros(7)}),
            r"weights: tensor 'model\.norm\.weight' has the shape \(7,\), but .* \(48,\)",
        ),
        (
            lambda weights: weights.update(
                {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}
            ),
            r"weights: 1 tensor.* do not belong .*q_norm",
        ),
        (lambda weights: weights.clear(), r"weights: the weights lack the tensor 'model\.embed"),
    ],
    ids=["missing", "misshaped", "extra", "none"],
)
def test_a_state_dict_that_does_not_fit_is_one_line(change, message, tiny, twin):
    weights = dict(twin.state_dict())
    change(weights)
    with pytest.raises(ConfigurationError, match=message) as error:
        gpu_only(model_path=str(tiny), weights=weights)
    assert "\n" not in str(error.value)

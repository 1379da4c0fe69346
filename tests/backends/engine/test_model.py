import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from backends.base import ConfigurationError
from backends.engine import engine as engine_module
from backends.engine import gpu_only, offload
from backends.engine.shape import FAMILIES, find_model, read_shape

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
MODELS = {
    "grouped heads": {},
    "tied embeddings": {"tie_word_embeddings": True},
    "one key head": {"num_key_value_heads": 1},
    "ungrouped heads": {"num_key_value_heads": 4},
    "head_dim of its own": {"head_dim": 24},
    "head_dim from hidden_size": {"head_dim": None},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "one layer": {"num_hidden_layers": 1},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "yarn rope": {"rope_parameters": YARN},
    "linear rope": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    },
    "sharded": {"shard_size": "30KB"},
    "bfloat16 file": {"dtype": torch.bfloat16},
    "Qwen2, its window switched off": {
        "architecture": "Qwen2ForCausalLM",
        "use_sliding_window": False,
        "sliding_window": 8,
        "max_window_layers": 0,
    },
    "Qwen2, yarn rope": {"architecture": "Qwen2ForCausalLM", "rope_parameters": YARN},
    "Qwen3, biases": {"architecture": "Qwen3ForCausalLM", "attention_bias": True},
    "Qwen3, another epsilon": {"architecture": "Qwen3ForCausalLM", "rms_norm_eps": 0.1},
    "Mistral, a window as long as the context": {
        "architecture": "MistralForCausalLM",
        "sliding_window": 256,
        "max_position_embeddings": 256,
    },
}
for _architecture in FAMILIES:
    _settings = {"architecture": _architecture, "sliding_window": None}
    MODELS |= {
        f"{_architecture}, tied, single file": _settings | {"tie_word_embeddings": True},
        f"{_architecture}, untied, sharded": _settings | {"shard_size": "30KB"},
        f"{_architecture}, head_dim of its own": _settings | {"head_dim": 24},
    }


@pytest.fixture
def chosen_from(monkeypatch):
    """The logits that tokens were chosen from, in order."""
    rows = []
    trace = engine_module.trace_logits

    def spy(logits):
        rows.append(logits.clone())
        return trace(logits)

    monkeypatch.setattr(engine_module, "trace_logits", spy)
    return rows


def assert_equals_transformers(folder, engine, ask, prompt, rows):
    answer = ask(engine, prompt, 8)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert type(model).__name__ == engine.describe()["architecture"]
    with torch.inference_mode():
        tokens = torch.tensor([[*prompt, *answer.token_ids[:-1]]])
        wanted = model(tokens).logits[0, len(prompt) - 1 :]
    torch.testing.assert_close(torch.stack(rows), wanted, rtol=1e-4, atol=1e-4)
    assert answer.token_ids == tuple(wanted.argmax(-1).tolist())
    best = wanted.topk(2).values
    torch.testing.assert_close(
        torch.tensor(answer.top2_margin), best[:, 0] - best[:, 1], rtol=1e-3, atol=1e-4
    )
    return answer


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS.keys())
def test_logits_are_those_of_transformers(settings, save_model, ask, prompt, chosen_from):
    folder = save_model(**settings)
    if "shard_size" in settings:
        assert len(list(folder.glob("model-*.safetensors"))) > 2
    cuts = {"max_model_len": 256, "chunk_tokens": 64, "attend_tokens": 32, "poison": True}
    engine = offload(model_path=str(folder), kvcache_block_size=32, **cuts)
    tokens = prompt(248)
    answer = assert_equals_transformers(folder, engine, ask, tokens, chosen_from)
    plain = ask(gpu_only(model_path=str(folder), **cuts), tokens, 8)
    assert answer.logits_digest == plain.logits_digest
    assert answer.bytes_up > 0 == plain.bytes_up


@pytest.mark.parametrize("repeated", [True, False])
def test_a_tied_model_whose_file_holds_a_head(repeated, save_model, request):
    ask, prompt, rows = map(request.getfixturevalue, ("ask", "prompt", "chosen_from"))
    folder = save_model(tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone() if repeated else embedding.flip(0)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    engine = gpu_only(model_path=str(folder))
    assert_equals_transformers(folder, engine, ask, prompt(50), rows)
    tied_bytes = sum(tensor.nbytes for tensor in tensors.values()) - embedding.nbytes
    assert engine.describe()["weight_bytes"] == tied_bytes + (not repeated) * embedding.nbytes


@pytest.mark.parametrize("attention", ["flash_cpu", "math"])
@pytest.mark.parametrize(("chunk", "attend"), [(None, None), (None, 20), (50, None), (50, 20)])
def test_pieces_and_kernels_do_not_change_the_model(request, chunk, attend, attention):
    tiny, ask, prompt, rows = map(request.getfixturevalue, ("tiny", "ask", "prompt", "chosen_from"))
    engine = gpu_only(
        model_path=str(tiny),
        max_model_len=300,
        chunk_tokens=chunk,
        attend_tokens=attend,
        attention=attention,
    )
    assert_equals_transformers(tiny, engine, ask, prompt(130), rows)


def test_the_probe_has_the_logits_of_transformers(probe, ask, prompt, chosen_from):
    engine = offload(model_path=str(probe), max_model_len=2100)
    assert_equals_transformers(probe, engine, ask, prompt(2000, vocabulary=4000), chosen_from)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.3), ("float16", 0.04)])
def test_half_precision_is_near(dtype, tolerance, tiny, ask, chosen_from):
    ask(gpu_only(model_path=str(tiny), dtype=dtype), 60, 1)
    ask(gpu_only(model_path=str(tiny), dtype="float32"), 60, 1)
    half, full = chosen_from
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, full, rtol=0, atol=tolerance)
    assert not torch.equal(half, full)


@pytest.fixture
def edited(tiny, tmp_path):
    """A copy of the tiny model with other settings in its config.json."""

    def edit(**settings):
        folder = tmp_path / "edited"
        shutil.copytree(tiny, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | settings))
        return folder

    return edit


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel is not .* runs LlamaForCausalLM, Qwen2ForCausalLM, "
            "Qwen3ForCausalLM, MistralForCausalLM; use backend=hf",
        ),
        ({"model_type": "mistral"}, "model_type='mistral' does not go .*LlamaFor.* is 'llama'"),
        ({"architectures": []}, "architecture none is not supported"),
        ({"sliding_window": 128}, "sliding_window=128 is not honoured.*backend=hf"),
        (
            {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]},
            r"layer_types='sliding_attention' is not honoured .*\(allowed: full_attention\)",
        ),
        ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50\.0 is not honoured"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30\.0 is not honoured"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar=256 is not honoured"),
        ({"attention_multiplier": 0.1}, r"attention_multiplier=0\.1 is not honoured"),
        ({"logits_scaling": 8.0}, r"logits_scaling=8\.0 is not honoured .*allowed: 1\.0"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5 .*allowed: 1\.0"),
        (
            {"rope_parameters": YARN | {"mrope_section": [2, 3, 3]}},
            r"mrope_section=\[2, 3, 3\] is not honoured",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
            "rope_parameters={'full_attention'.*} is not honoured",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config=.*not honoured"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not honoured"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_t"),
        (
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            },
            "partial_rotary_factor=0.5",
        ),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of .*heads=3"),
        ({"attention_bias": "yes"}, "transformers cannot read it"),
    ],
)
def test_settings_that_are_not_honoured_are_refused(edited, settings, message):
    with pytest.raises(ConfigurationError, match=message) as error:
        read_shape(edited(**settings))
    assert "\n" not in str(error.value)


def test_settings_that_change_nothing_are_accepted(edited, tiny):
    neutral = {
        "attention_dropout": 0.1,
        "attn_logit_softcapping": None,
        "hidden_act": "swish",
        "layer_types": ["full_attention"] * 3,
        "logits_scaling": 1.0,
        "partial_rotary_factor": 1.0,
        "sliding_window": None,
    }
    shape, plain = read_shape(edited(**neutral)), read_shape(tiny)
    assert torch.equal(shape.inverse_frequencies, plain.inverse_frequencies)
    assert shape.optional_weights == plain.optional_weights


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("MistralForCausalLM", {"sliding_window": 511}),
        # transformers' Mistral knows no such switch, and keeps the window.
        ("MistralForCausalLM", {"sliding_window": 64, "use_sliding_window": False}),
        ("Qwen2ForCausalLM", {"sliding_window": 64, "use_sliding_window": True}),
        ("Qwen3ForCausalLM", {"sliding_window": 64, "use_sliding_window": True}),
    ],
)
def test_a_window_in_force_is_refused(architecture, settings, save_model):
    folder = save_model(architecture=architecture, **settings)
    wanted = rf"sliding_window={settings['sliding_window']} is not honoured"
    with pytest.raises(ConfigurationError, match=wanted) as error:
        read_shape(folder)
    assert "\n" not in str(error.value)


def test_the_old_names_of_rope_settings_are_read(edited):
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    old = edited(rope_parameters=None, rope_theta=10000.0, rope_scaling=scaling)
    new = json.loads((old / "config.json").read_text())
    shape = read_shape(old)
    (old / "config.json").write_text(
        json.dumps(new | {"rope_parameters": LLAMA3, "rope_scaling": None})
    )
    assert torch.equal(shape.inverse_frequencies, read_shape(old).inverse_frequencies)
    (old / "config.json").write_text(
        json.dumps(new | {"rope_scaling": None, "rope_parameters": None})
    )
    assert not torch.equal(shape.inverse_frequencies, read_shape(old).inverse_frequencies)


def test_folders_that_are_no_models(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match=r"has no config\.json"):
        read_shape(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ConfigurationError, match="is a file; a model folder is needed"):
        find_model(str(file))
    with pytest.raises(ConfigurationError, match="is not valid JSON"):
        read_shape(tmp_path)


def test_a_name_that_is_neither_folder_nor_on_the_hub(monkeypatch):
    import huggingface_hub

    def absent(name, **_):
        raise OSError(f"cannot reach the hub for {name}\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    with pytest.raises(ConfigurationError, match="is no folder, and no model of that") as error:
        find_model("nobody/nothing")
    assert "\n" not in str(error.value)


def test_a_hub_name_is_downloaded_without_other_formats(tiny, monkeypatch):
    import huggingface_hub

    asked = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **how: asked.update(how) or str(tiny)
    )
    assert find_model("somebody/something") == tiny
    assert asked == {"allow_patterns": ["*.json", "*.safetensors"]}

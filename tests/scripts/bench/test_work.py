"""Operations and bytes against counts by hand, transformers' model and its cache."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from backends.engine.shape import read_shape
from scripts.bench import work
from scripts.bench.shapes import SHAPES, WEIGHT_STD, RandomWeights

TINY = SHAPES["tiny"]
LLAMA = SHAPES["llama-3.1-8b"]
CPU = torch.device("cpu")


def make_model(attention="eager"):
    return AutoModelForCausalLM.from_config(
        LlamaConfig(**TINY.config(512)), dtype=torch.float32, attn_implementation=attention
    ).eval()


def test_weights_have_transformers_names_and_shapes():
    state = make_model().state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == TINY.weight_shapes()
    assert work.weight_bytes(TINY, 4) == sum(tensor.nbytes for tensor in state.values())
    read = {name: tensor for name, tensor in state.items() if "embed_tokens" not in name}
    assert work.decode_weight_bytes(TINY, 4) == sum(tensor.nbytes for tensor in read.values())


def test_the_8b_shape_has_the_published_number_of_parameters():
    """8,030,261,248, as the model card of Llama-3.1-8B has it."""
    assert work.weight_bytes(LLAMA, 1) == 8_030_261_248


def test_all_rows_are_what_pytorch_counts_with_unmasked_attention():
    tokens = 40
    model = make_model()
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(torch.zeros(1, tokens, dtype=torch.long), logits_to_keep=1)
    counted = work.prefill_operations(TINY, tokens, all_rows=True)
    counted[work.ATTENTION] = TINY.layers * work.rectangular_operations(TINY, tokens, tokens)
    # The rotary embedding's angles are a product too: head_dim / 2 of them for each token.
    angles = 2 * tokens * TINY.head_dim // 2
    assert counter.get_total_flops() - sum(counted.values()) in (0, angles)


def needed_by_hand(shape, tokens):
    """Walk through every row of every layer."""
    width = shape.heads * shape.head_dim
    operations = dict.fromkeys(("qkv", "output", "gate_up", "down", "attention"), 0)
    for layer in range(shape.layers):
        for row in range(tokens):
            operations["qkv"] += 2 * shape.hidden * 2 * shape.kv_width
            if layer < shape.layers - 1 or row == tokens - 1:
                operations["qkv"] += 2 * shape.hidden * width
                operations["output"] += 2 * width * shape.hidden
                operations["gate_up"] += 2 * shape.hidden * 2 * shape.intermediate
                operations["down"] += 2 * shape.intermediate * shape.hidden
                operations["attention"] += 2 * 2 * width * (row + 1)
    return operations | {"head": 2 * shape.hidden * shape.vocabulary}


@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("shape", [TINY, LLAMA], ids=lambda shape: shape.name)
def test_what_one_answer_needs_is_counted_row_by_row(shape, tokens):
    assert work.prefill_operations(shape, tokens) == needed_by_hand(shape, tokens)


def test_less_is_needed_than_all_rows():
    needed = work.prefill_operations(LLAMA, 32768)
    whole = work.prefill_operations(LLAMA, 32768, all_rows=True)
    assert sum(needed.values()) < sum(whole.values())
    # The reference figure: 2 * 6.98e9 parameters a token and 2 * layers * heads * head_dim * N^2.
    rough = 2 * 6.98e9 * 32768 + 2 * 32 * 32 * 128 * 32768**2
    assert sum(whole.values()) == pytest.approx(rough, rel=1e-3)


def test_limits_need_every_rate():
    operations = {"qkv": 6.0, "down": 8.0, "attention": 10.0, "head": 12.0}
    rates = {"qkv": 2.0, "down": 4.0, "attention": 5.0, "unused": 1.0}
    assert work.seconds_at(operations, rates) == 6 / 2 + 8 / 4 + 10 / 5 + 12 / 4
    for name in ("qkv", "down", "attention"):
        assert work.seconds_at(operations, {k: v for k, v in rates.items() if k != name}) is None


def test_kv_bytes_are_those_of_transformers_cache():
    model, tokens = make_model("sdpa"), 17
    with torch.inference_mode():
        cache = model(torch.zeros(1, tokens, dtype=torch.long), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert work.kv_bytes(TINY, tokens, 4) == held


@given(
    tokens=st.integers(1, 200),
    new_tokens=st.integers(1, 5),
    chunk=st.none() | st.integers(1, 250),
)
def test_copies_are_those_of_a_cache_that_keeps_nothing(tokens, new_tokens, chunk):
    """Play the request with a list of what lies in CPU memory."""
    token_layer = 2 * TINY.kv_width * 2
    up = down = 0
    start = 0
    while start < tokens:
        stop = min(start + (chunk or tokens), tokens)
        for layer in range(TINY.layers):
            queries_matter = layer < TINY.layers - 1 or stop == tokens
            up += start * token_layer if queries_matter else 0
            down += (stop - start) * token_layer
        start = stop
    up += (new_tokens - 1) * TINY.layers * tokens * token_layer
    assert work.expected_copies(TINY, tokens, new_tokens, chunk, 2) == (up, down)


def test_random_weights_are_the_same_each_time_and_different_for_each_name():
    weights = RandomWeights(TINY, CPU, torch.float32, 3)
    again = RandomWeights(TINY, CPU, torch.float32, 3)
    other = RandomWeights(TINY, CPU, torch.float32, 4)
    seen = []
    assert list(weights) == list(TINY.weight_shapes())
    assert len(weights) == len(list(weights))
    for name in weights:
        tensor = weights[name]
        assert torch.equal(tensor, again[name])
        if "norm" in name:
            assert torch.equal(tensor, torch.ones_like(tensor))
            continue
        assert not torch.equal(tensor, other[name])
        assert float(tensor.std()) == pytest.approx(WEIGHT_STD, rel=0.05)
        assert not any(torch.equal(tensor, one) for one in seen if one.shape == tensor.shape)
        seen.append(tensor)
    assert "model.norm.weight" in weights
    assert "model.norm.bias" not in weights
    with pytest.raises(KeyError):
        weights["model.norm.bias"]


def test_the_8b_shape_is_a_model_of_transformers_and_of_the_engine(tmp_path):
    config = LLAMA.config(524_288 + 5)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(LlamaConfig(**config)).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == LLAMA.weight_shapes()
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(tmp_path)
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (32, 32, 8, 128)
    assert shape.max_positions == 524_293
    assert not shape.tied_embeddings
    assert float(shape.inverse_frequencies[-1]) == pytest.approx(500_000 ** (-126 / 128))

"""Structured keys: what the weights make of them is what the description says."""

import dataclasses

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.bench import structured
from scripts.bench.shapes import SHAPES
from scripts.bench.structured import StructuredWeights, first_layer, strong_positions, with_columns

CPU = torch.device("cpu")
TOKENS = 2048
STRENGTH = 9.0
# Heads of 128 as in the real shape, so that RoPE's frequencies are as close together.
SHAPE = dataclasses.replace(
    SHAPES["tiny"],
    layers=2,
    hidden=256,
    heads=2,
    kv_heads=2,
    head_dim=128,
    vocabulary=600,
    lengths=(TOKENS,),
)


def text(tokens):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(500, (tokens,), generator=generator).tolist())


STRONG = structured.strong_ids(SHAPE, text(TOKENS))
PROMPT = with_columns(text, STRONG)(TOKENS)


@pytest.fixture(scope="module")
def weights():
    return StructuredWeights(SHAPE, CPU, torch.float32, 0, strength=STRENGTH, strong_ids=STRONG)


@pytest.fixture(scope="module")
def scores(weights):
    """Scaled scores of the first layer, [heads, queries, keys]."""
    layer = first_layer(weights, SHAPE, PROMPT)
    return torch.einsum("qhd,khd->hqk", layer.query, layer.key) / SHAPE.head_dim**0.5


def test_strong_ids_are_none_of_the_text():
    assert len(set(STRONG)) == structured.COLUMN_TOKENS
    assert not set(STRONG) & set(text(TOKENS))
    assert {p for p, token in enumerate(PROMPT) if token in STRONG} == set(strong_positions(TOKENS))
    assert set(range(structured.SINK_TOKENS)) < set(strong_positions(TOKENS))


@pytest.mark.parametrize("tokens", [1, 3, 16, 100])
def test_short_prompts_have_their_length(tokens):
    assert len(with_columns(text, STRONG)(tokens)) == tokens


def test_near_keys_score_high_and_far_ones_do_not(weights, scores):
    plain = [p for p in range(TOKENS) if PROMPT[p] not in STRONG]
    for head in range(SHAPE.kv_heads):
        width = weights.width(0, head)

        def mean_at(distance, head=head):
            return float(torch.stack([scores[head, q, q - distance] for q in plain[-400:]]).mean())

        near, middle, far = mean_at(1), mean_at(round(width)), mean_at(round(4 * width))
        factor = scores.new_tensor([structured.WEAKEST, structured.STRONGEST]) * STRENGTH
        assert factor[0] - 1 < near < factor[1] + 1
        # A Gaussian is at 0.61 of its height one deviation away, and at nothing four away.
        assert 0.45 * near < middle < 0.75 * near
        assert abs(far) < 0.35 * near


def test_strong_columns_score_high_from_everywhere(scores):
    columns = torch.tensor(strong_positions(TOKENS)[: structured.SINK_TOKENS])
    column_scores = scores[:, TOKENS // 2 :][:, :, columns].mean((1, 2))
    assert (column_scores > 0.6 * STRENGTH).all()


def test_what_is_stronger_keeps_less(weights):
    def mass_of_the_best(strength):
        made = StructuredWeights(SHAPE, CPU, torch.float32, 0, strength=strength, strong_ids=STRONG)
        layer = first_layer(made, SHAPE, PROMPT)
        last = torch.einsum("hd,khd->hk", layer.query[-1], layer.key) / SHAPE.head_dim**0.5
        return float(last.softmax(-1).topk(64).values.sum())

    assert mass_of_the_best(3.0) < mass_of_the_best(6.0) < mass_of_the_best(12.0)


def test_the_first_layer_is_that_of_transformers(weights):
    config = LlamaConfig(**SHAPE.config(TOKENS))
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    seen = {}
    attention = model.model.layers[0].self_attn
    attention.register_forward_hook(
        lambda module, inputs, kwargs, output: seen.update(kwargs), with_kwargs=True
    )
    short = PROMPT[:200]
    with torch.no_grad():
        hidden = model.model(torch.tensor([short]), output_hidden_states=True).hidden_states
    cosine, sine = seen["position_embeddings"]

    def rotated(rows):
        first, second = rows.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        return rows * cosine[0][:, None] + turned * sine[0][:, None]

    layer = first_layer(weights, SHAPE, short)
    normed = seen["hidden_states"][0]
    for name, got in (("q_proj", layer.query), ("k_proj", layer.key)):
        wanted = getattr(attention, name)(normed).detach().view(len(short), 2, 128)
        torch.testing.assert_close(got, rotated(wanted), rtol=1e-4, atol=2e-3)
    # Later layers see nearly what the first sees: the residual stream is still the embedding.
    start, end = hidden[0][0], hidden[-2][0]
    assert float((end - start).norm() / start.norm()) < 0.3

"""Layer-wise offload: whole prompts, buffers as long as the context, the bits of gpu_only."""

import pytest

from backends.base import ConfigurationError, PromptTooLong
from backends.engine import gpu_only, offload, offload_layerwise

LAYERS, CONTEXT, TAIL = 5, 160, 16
BUFFERS = (2, 3, 4, 8)  # none kept, one kept, two kept, all layers kept


@pytest.fixture(scope="module")
def deep(save_model):
    """A random model of five layers, an odd number: buffers take turns."""
    return str(save_model(num_hidden_layers=LAYERS))


@pytest.fixture(scope="module")
def reference(deep, ask):
    """Answers of gpu_only, whose chunk_tokens and attend_tokens are null, worked out once each."""
    engine = gpu_only(model_path=deep, max_model_len=CONTEXT)
    answers = {}

    def answer(tokens, new_tokens):
        if (tokens, new_tokens) not in answers:
            answers[tokens, new_tokens] = ask(engine, tokens, new_tokens)
        return answers[tokens, new_tokens]

    return answer


@pytest.fixture
def short_tail(monkeypatch):
    monkeypatch.setattr("backends.engine.cache.offload_geometry.MAX_TAIL_TOKENS", TAIL)


def assert_same(got, wanted):
    assert got.token_ids == wanted.token_ids
    assert got.logits_digest == wanted.logits_digest
    assert got.top2_margin == wanted.top2_margin


@pytest.mark.parametrize("buffers", BUFFERS)
@pytest.mark.parametrize("poison", [True, False])
@pytest.mark.usefixtures("short_tail")
def test_it_has_the_bits_of_gpu_only(buffers, poison, deep, reference, ask):
    """New tokens that just fill one tail, two and three, after prompts of all such lengths."""
    engine = offload_layerwise(
        model_path=deep, max_model_len=CONTEXT, num_kv_buffers=buffers, poison=poison
    )
    lengths = (1, TAIL - 1, TAIL, TAIL + 1, 3 * TAIL - 1, 3 * TAIL, 3 * TAIL + 1)
    for at, tokens in enumerate(lengths):
        # The last new token is not kept: n + 1 of them put n into the tail.
        new_tokens = (TAIL, TAIL + 1, TAIL + 2, 2 * TAIL + 1, 3 * TAIL + 2)[at % 5]
        assert_same(ask(engine, tokens, new_tokens, request_id=at), reference(tokens, new_tokens))


@pytest.mark.parametrize("buffers", BUFFERS)
def test_two_requests_in_a_row_and_a_context_filled_to_the_last_token(buffers, deep, ask):
    engine = offload_layerwise(
        model_path=deep, max_model_len=CONTEXT, num_kv_buffers=buffers, poison=True
    )
    plain = gpu_only(model_path=deep, max_model_len=CONTEXT)
    for tokens, new_tokens in ((CONTEXT - 1, 1), (100, 5), (CONTEXT - 3, 3), (7, 20), (100, 5)):
        assert_same(ask(engine, tokens, new_tokens), ask(plain, tokens, new_tokens))
    with pytest.raises(PromptTooLong):
        ask(engine, CONTEXT, 1)


@pytest.mark.parametrize("context", [161, 300, 512])
def test_capacity_larger_than_the_prompt(context, deep, reference, ask):
    engine = offload_layerwise(
        model_path=deep, max_model_len=context, num_kv_buffers=2, poison=True
    )
    for tokens in (30, 121):
        assert_same(ask(engine, tokens, 6), reference(tokens, 6))


def test_the_tail_of_its_real_size(tiny, ask):
    """Of 256 tokens: one is filled to the last row, copied down, and read from the blocks."""
    plain = gpu_only(model_path=str(tiny))
    engine = offload_layerwise(model_path=str(tiny), num_kv_buffers=2, poison=True)
    got = ask(engine, 5, 270)
    assert_same(got, ask(plain, 5, 270))
    row, layers = 2 * 2 * 16 * 4, 3
    assert got.bytes_down == (5 + 256) * row * layers


def test_it_is_offload_with_blocks_as_long_as_the_context(deep, ask):
    whole = {"chunk_tokens": None, "attend_tokens": None, "kvcache_block_size": CONTEXT}
    chunked = offload(model_path=deep, max_model_len=CONTEXT, num_gpu_blocks=3, **whole)
    layerwise = offload_layerwise(model_path=deep, max_model_len=CONTEXT, num_kv_buffers=3)
    got, wanted = ask(layerwise, 90, 9), ask(chunked, 90, 9)
    assert_same(got, wanted)
    assert (got.bytes_up, got.bytes_down) == (wanted.bytes_up, wanted.bytes_down)
    plans = [engine.describe()["memory_plan"] for engine in (layerwise, chunked)]
    assert plans[0] == plans[1]


def test_a_prompt_is_copied_down_once_and_none_comes_back_before_decode(deep, ask):
    engine = offload_layerwise(model_path=deep, max_model_len=CONTEXT, num_kv_buffers=2)
    row = 2 * 2 * 16 * 4
    alone = ask(engine, 120, 1)
    assert (alone.bytes_up, alone.bytes_down) == (0, 120 * LAYERS * row)
    decoded = ask(engine, 120, 4)
    assert decoded.bytes_up == 3 * 120 * LAYERS * row


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        (1, r"num_kv_buffers=1 is below 2"),
        (0, r"num_kv_buffers=0 is below 1"),
        (2.5, r"num_kv_buffers=2\.5 is not a whole number"),
        (True, r"num_kv_buffers=True is not a whole number"),
    ],
)
def test_buffers_are_at_least_two(buffers, message, tiny):
    with pytest.raises(ConfigurationError, match=message) as error:
        offload_layerwise(model_path=str(tiny), num_kv_buffers=buffers)
    assert "\n" not in str(error.value)

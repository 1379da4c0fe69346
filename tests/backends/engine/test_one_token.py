"""Steps of one token through the kernels made for them, as a GPU takes them, on the CPU.

Which way a step goes depends on the name of the operations alone. Here PyTorch's go by the name of
Triton's; a process with TRITON_INTERPRET=1, which test_interpreted.py starts, runs Triton's own.
"""

import os

import pytest
import torch

from backends.base import NonFiniteLogits, Request
from backends.engine import engine as engine_module
from backends.engine import gpu_only, offload, offload_layerwise
from backends.engine.ops import TorchOps
from backends.engine.streams import DeferredStreams

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CONTEXT, CHUNK, ATTEND, NEW = 640, 200, 256, 12
VOCABULARY = 30
CUTS = {"max_model_len": CONTEXT, "chunk_tokens": CHUNK, "attend_tokens": ATTEND}

only_torch = pytest.mark.skipif(INTERPRETED, reason="too slow under Triton's interpreter")


class TorchForOneToken(TorchOps):
    """PyTorch's operations by the name that makes an engine take them for steps of one token."""

    name = "triton"


def one_token_ops(device=None, dtype=None):
    return triton_for_one_token() if INTERPRETED else TorchForOneToken()


def triton_for_one_token():
    """Triton's operations for steps of one token; PyTorch's for many rows, for speed."""
    from backends.engine.ops.triton_ops import TritonOps

    class TritonForOneToken(TritonOps):
        rms_norm = TorchOps.rms_norm
        silu_mul = TorchOps.silu_mul
        merge_into = TorchOps.merge_into

        def rotate(self, projected, *args):
            rotate = super().rotate if projected.shape[0] == 1 else TorchOps().rotate
            rotate(projected, *args)

    return TritonForOneToken()


@pytest.fixture(autouse=True)
def _through_one_token_kernels(monkeypatch):
    monkeypatch.setattr(engine_module, "make_ops", one_token_ops)


@pytest.fixture(scope="module")
def small(save_model):
    """A random model that the interpreter is done with in seconds."""
    return str(
        save_model(
            vocab_size=VOCABULARY,
            hidden_size=12,
            intermediate_size=10,
            head_dim=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=CONTEXT,
            initializer_range=0.4,
        )
    )


@pytest.fixture(scope="module")
def ask(prompt):
    """Ask an engine with a random prompt of so many tokens."""

    def call(engine, tokens, new_tokens, request_id=0):
        ids = prompt(tokens, vocabulary=VOCABULARY)
        return engine.generate(Request(request_id, "", ids, new_tokens))

    return call


@pytest.fixture(scope="module")
def reference(small, ask):
    """Answers of gpu_only through kernels for one token, by its cuts, worked out once each."""
    engines, answers = {}, {}

    def answer(tokens, new_tokens=NEW, **cuts):
        cuts = CUTS | cuts
        key = tuple(cuts.items())
        if key not in engines:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine_module, "make_ops", one_token_ops)
                engines[key] = gpu_only(model_path=small, **cuts)
        if (key, tokens, new_tokens) not in answers:
            answers[key, tokens, new_tokens] = ask(engines[key], tokens, new_tokens)
        return answers[key, tokens, new_tokens]

    return answer


def assert_same(got, wanted):
    assert got.token_ids == wanted.token_ids
    assert got.logits_digest == wanted.logits_digest
    assert got.top2_margin == wanted.top2_margin


def assert_like_general_kernels(got, ask, tokens, **settings):
    """Compare with what the general kernels decode, which operations by PyTorch's name lead to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "make_ops", lambda device, dtype: TorchOps())
        engine = gpu_only(**settings)
        assert engine.describe()["decode"] == "general kernels"
        wanted = ask(engine, tokens, len(got.token_ids))
    assert got.token_ids == wanted.token_ids
    torch.testing.assert_close(
        torch.tensor(got.top2_margin), torch.tensor(wanted.top2_margin), rtol=1e-3, atol=1e-3
    )


@only_torch
@pytest.mark.parametrize("tokens", [1, 2, 255, 256, 257, 401, 628])
def test_it_decodes_what_the_general_kernels_decode(tokens, small, reference, ask):
    got = reference(tokens)
    assert_like_general_kernels(got, ask, tokens, model_path=small, **CUTS)


@only_torch
@pytest.mark.parametrize(
    ("block", "slots", "tail"),
    [
        (256, 2, 256),  # blocks of whole splits, read one by one
        (256, 3, 5),  # one kept, several tails
        (256, 12, 5),  # all kept
        (512, 2, 7),
        (CONTEXT, 2, 256),
        (128, 3, 256),  # spans are gathered from several blocks
        (100, 4, 5),
        (100, 16, 100),
        (96, 6, 1),
    ],
)
def test_offload_has_the_bits_of_gpu_only(request, block, slots, tail):
    names = ("small", "reference", "ask", "monkeypatch")
    small, reference, ask, monkeypatch = map(request.getfixturevalue, names)
    monkeypatch.setattr("backends.engine.cache.offload_geometry.MAX_TAIL_TOKENS", tail)
    engine = offload(
        model_path=small, num_gpu_blocks=slots, kvcache_block_size=block, poison=True, **CUTS
    )
    assert engine.describe()["decode"] == "kernels for one token"
    for tokens in (1, 3, 201, 255, 256, 401, 500, CONTEXT - NEW):
        assert_same(ask(engine, tokens, NEW), reference(tokens))


@only_torch
@pytest.mark.parametrize(("chunk", "attend"), [(None, None), (64, 512), (200, None)])
def test_other_cuts(chunk, attend, small, reference, ask):
    cuts = {"chunk_tokens": chunk, "attend_tokens": attend}
    engine = offload(
        model_path=small, num_gpu_blocks=8, kvcache_block_size=100, poison=True, **CUTS | cuts
    )
    for tokens in (65, 300, 513):
        assert_same(ask(engine, tokens, NEW), reference(tokens, **cuts))


@only_torch
@pytest.mark.parametrize("buffers", [2, 3])
def test_layerwise_has_the_bits_of_gpu_only(buffers, small, reference, ask, monkeypatch):
    monkeypatch.setattr("backends.engine.cache.offload_geometry.MAX_TAIL_TOKENS", 5)
    engine = offload_layerwise(
        model_path=small, max_model_len=CONTEXT, num_kv_buffers=buffers, poison=True
    )
    nulls = {"chunk_tokens": None, "attend_tokens": None}
    for tokens in (1, 4, 255, 256, 300, CONTEXT - NEW):
        assert_same(ask(engine, tokens, NEW), reference(tokens, **nulls))


@only_torch
def test_spans_that_are_not_whole_splits_go_the_general_way(small):
    engine = gpu_only(model_path=small, **CUTS | {"attend_tokens": 100})
    assert engine.describe()["decode"] == "general kernels"


class RunAgain:
    """Stands for captured graphs: runs the parts instead of replaying them."""

    def __init__(self, parts, device):
        self._parts = parts

    def replay(self, part):
        self._parts[part]()


@only_torch
@pytest.mark.parametrize("slots", [2, 3, 12])
def test_steps_cut_into_parts_have_the_same_bits(slots, small, reference, ask, monkeypatch):
    """What a GPU replays from graphs, between copies and as a whole."""
    monkeypatch.setattr(engine_module, "CapturedParts", RunAgain)
    monkeypatch.setattr("backends.engine.cache.offload_geometry.MAX_TAIL_TOKENS", 5)
    engine = offload(
        model_path=small,
        num_gpu_blocks=slots,
        kvcache_block_size=256,
        offload="auto",
        resident_tokens=350,
        **CUTS,
    )
    with torch.inference_mode():
        engine._capture()
    assert engine.describe()["decode"] == "captured graphs"
    for tokens in (1, 500, 300, 401, 256):
        got = ask(engine, tokens, NEW)
        assert_same(got, reference(tokens))
        assert (got.bytes_down > 0) == (tokens + NEW > 350)


@only_torch
@pytest.mark.parametrize(("block", "place"), [(256, "slot 2"), (100, "slots 0, 2")])
def test_poison_names_request_layer_and_slot(block, place, small, ask, monkeypatch):
    engine = offload(
        model_path=small, num_gpu_blocks=4, kvcache_block_size=block, poison=True, **CUTS
    )
    wanted = ask(engine, 150, NEW)
    wait = DeferredStreams.wait
    with monkeypatch.context() as patch:
        patch.setattr(
            DeferredStreams,
            "wait",
            lambda self, event: None if event.direction == "up" else wait(self, event),
        )
        message = f"request 5, layer 0, {place}: NaN in the attention to tokens 0 to"
        with pytest.raises(NonFiniteLogits, match=message):
            ask(engine, 150, NEW, request_id=5)
    assert_same(ask(engine, 150, NEW), wanted)


# A few with Triton's kernels; in other processes with PyTorch's.


@pytest.mark.parametrize(
    ("block", "slots", "chunk", "new_tokens"),
    [(256, 2, 256, 2), (100, 4, None, 3)],
    ids=["blocks of whole splits", "gathered spans"],
)
def test_few_tokens_offloaded(request, block, slots, chunk, new_tokens):
    small, reference, ask = map(request.getfixturevalue, ("small", "reference", "ask"))
    cuts = {"max_model_len": 320, "chunk_tokens": chunk, "attend_tokens": 256}
    wanted = reference(310, new_tokens, **cuts)
    engine = offload(
        model_path=small, num_gpu_blocks=slots, kvcache_block_size=block, poison=True, **cuts
    )
    assert_same(ask(engine, 310, new_tokens), wanted)
    assert_like_general_kernels(wanted, ask, 310, model_path=small, **cuts)


def test_few_tokens_layer_by_layer(small, reference, ask):
    cuts = {"max_model_len": 320, "chunk_tokens": None, "attend_tokens": None}
    wanted = reference(300, 2, **cuts)
    engine = offload_layerwise(model_path=small, max_model_len=320, num_kv_buffers=2, poison=True)
    assert_same(ask(engine, 300, 2), wanted)
    assert_like_general_kernels(wanted, ask, 300, model_path=small, **cuts)


def test_few_tokens_through_one_set_of_kernels(small, ask, monkeypatch):
    """Prefill, too."""
    if INTERPRETED:
        from backends.engine.ops.triton_ops import TritonOps

        monkeypatch.setattr(engine_module, "make_ops", lambda device, dtype: TritonOps())
    cuts = {"max_model_len": 12, "chunk_tokens": 4, "attend_tokens": None}
    wanted = ask(gpu_only(model_path=small, **cuts), 6, 2)
    engine = offload(model_path=small, num_gpu_blocks=3, kvcache_block_size=4, poison=True, **cuts)
    assert_same(ask(engine, 6, 2), wanted)
    assert_like_general_kernels(wanted, ask, 6, model_path=small, **cuts)

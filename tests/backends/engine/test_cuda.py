"""The engine's promises on a GPU: real streams, pinned memory, and the GPU's kernels."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from backends.base import ConfigurationError
from backends.engine import attention, gpu_only, offload
from backends.engine import engine as engine_module
from backends.engine.attention import KERNELS, choose_kernel

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CHUNK, ATTEND, CONTEXT, NEW = 128, 64, 512, 8
DTYPES = ("bfloat16", "float32")
CUDA_KERNELS = [name for name, kernel in KERNELS.items() if "cuda" in kernel.devices]


@pytest.fixture(scope="module")
def model(save_model):
    """A random model with heads of a size that every kernel takes."""
    return str(save_model(head_dim=64, num_attention_heads=4, num_key_value_heads=2))


def cuda_settings(dtype, **settings):
    return {
        "device": "cuda",
        "dtype": dtype,
        "max_model_len": CONTEXT,
        "chunk_tokens": CHUNK,
        "attend_tokens": ATTEND,
        "poison": True,
    } | settings


@pytest.fixture(scope="module")
def reference(model, ask):
    """Answers of gpu_only by dtype and prompt length, worked out once each."""
    engines = {}
    answers = {}

    def answer(dtype, tokens):
        if dtype not in engines:
            engines[dtype] = gpu_only(model_path=model, **cuda_settings(dtype))
        if (dtype, tokens) not in answers:
            answers[dtype, tokens] = ask(engines[dtype], tokens, NEW)
        return answers[dtype, tokens]

    return answer


def assert_same(got, wanted):
    assert got.token_ids == wanted.token_ids
    assert got.logits_digest == wanted.logits_digest
    assert got.kernel == wanted.kernel


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ring", [(2, 64), (3, 48), (4, 64), (8, 20), (2, 512)])
def test_offload_has_the_bits_of_gpu_only(ring, dtype, model, reference, ask):
    slots, block = ring
    settings = cuda_settings(dtype, num_gpu_blocks=slots, kvcache_block_size=block)
    engine = offload(model_path=model, **settings)
    for tokens in (1, 63, 64, 65, 127, 128, 129, 257, CONTEXT - NEW, 129):
        got = ask(engine, tokens, NEW)
        assert_same(got, reference(dtype, tokens))
        assert got.bytes_down > 0 or tokens == 1
        assert got.peak_device_bytes > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_offload_modes_mixed_within_one_engine(dtype, model, reference, ask):
    settings = cuda_settings(dtype, num_gpu_blocks=2, kvcache_block_size=64)
    engine = offload(model_path=model, **settings, offload="auto", resident_tokens=200)
    for tokens in (300, 100, 192, 193, 300):
        got = ask(engine, tokens, NEW)
        assert_same(got, reference(dtype, tokens))
        assert (got.bytes_up > 0) == (tokens + NEW > 200)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_second_engine_in_another_order_gives_the_same_bits(dtype, model, reference, ask):
    lengths = (400, 33, 128, 400, 7)
    wanted = {tokens: reference(dtype, tokens) for tokens in lengths}
    settings = cuda_settings(dtype, num_gpu_blocks=4, kvcache_block_size=64, poison=False)
    engine = offload(model_path=model, **settings)
    for tokens in reversed(lengths):
        assert_same(ask(engine, tokens, NEW), wanted[tokens])


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_near_those_of_transformers(dtype, model, ask, prompt, monkeypatch):
    rows = []
    trace = engine_module.trace_logits
    monkeypatch.setattr(
        engine_module, "trace_logits", lambda logits: rows.append(logits.cpu()) or trace(logits)
    )
    ask(offload(model_path=model, **cuda_settings(dtype), kvcache_block_size=64), 300, 1)
    twin = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = twin(torch.tensor([prompt(300)])).logits[0, -1]
    tolerance = 1e-3 if dtype == "float32" else 0.4
    torch.testing.assert_close(rows[0], wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", CUDA_KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_agree_with_float64(name, dtype):
    device = torch.device("cuda")
    if dtype not in KERNELS[name].dtypes:
        with pytest.raises(ConfigurationError, match=f"{name}: it takes bfloat16, float16 only"):
            choose_kernel(name, device, dtype, (8, 2, 64))
        return
    kernel = choose_kernel(name, device, dtype, (8, 2, 64))
    generator = torch.Generator().manual_seed(0)
    for queries, keys, causal in (
        (200, 200, True),
        (70, 333, False),
        (1, 333, False),
        (5, 1, False),
    ):
        query, key, value = (
            torch.randn(*size, 64, generator=generator).to(device, dtype)
            for size in ((queries, 8), (keys, 2), (keys, 2))
        )
        found = attention.attention(query, key, value, causal=causal, kernel=kernel)
        keys64, values64 = (tensor.double().repeat_interleave(4, dim=1) for tensor in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query.double(), keys64) / 8
        if causal:
            scores += torch.full_like(scores, float("-inf")).triu(1)
        output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values64)
        limit = 1e-5 if dtype == torch.float32 else 1e-2
        assert (found.output - output).norm() / output.norm() < limit
        assert (found.log_sum_exp - scores.logsumexp(-1).T).abs().max() < 1e-3


def test_cpu_memory_is_pinned(model):
    engine = offload(model_path=model, **cuda_settings("bfloat16"), kvcache_block_size=64)
    assert all(buffer.is_pinned() for buffer in engine._offload.host_buffers().values())

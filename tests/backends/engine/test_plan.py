"""The memory plan of an engine: what it says, what is allocated, and what is refused."""

import dataclasses
import gc
import math
import re

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef

from backends.base import ConfigurationError
from backends.engine import engine as engine_module
from backends.engine import gpu_only, offload, offload_layerwise, xattn
from backends.engine.attention import KERNELS

GIB = 2**30
CUTS = {"chunk_tokens": 32, "attend_tokens": 16}
PRESETS = {
    "gpu_only": (gpu_only, {"max_model_len": 200}),
    "gpu_only, in pieces": (gpu_only, {"max_model_len": 200, **CUTS}),
    "offload": (offload, {"max_model_len": 201, "kvcache_block_size": 16, **CUTS}),
    "offload, gathered spans": (offload, {"max_model_len": 200, "kvcache_block_size": 20, **CUTS}),
    "offload, auto": (
        offload,
        {"max_model_len": 200, "kvcache_block_size": 16, "offload": "auto", **CUTS},
    ),
    "offload, never": (
        offload,
        {"max_model_len": 200, "kvcache_block_size": 16, "offload": "never", **CUTS},
    ),
    "offload_layerwise": (offload_layerwise, {"max_model_len": 200, "num_kv_buffers": 2}),
    "xattn": (xattn, {"max_model_len": 200}),
    "sparse offload": (
        offload,
        {
            "max_model_len": 400,
            "kvcache_block_size": 50,
            "attend_tokens": 50,
            "chunk_tokens": 128,
            "policy": {"name": "a_shape", "first_tokens": 1, "recent_tokens": 1},
        },
    ),
}
every_preset = pytest.mark.parametrize(("build", "settings"), PRESETS.values(), ids=PRESETS.keys())


PASSING = {
    *("output", "log_sum_exp", "scores", "float32_operands"),
    *("tokens", "selection", "chosen_blocks", "gathered", "mask"),
}


def gib(nbytes):
    return nbytes / GIB


@pytest.fixture
def storage_bytes():
    """Give the bytes of each tensor storage made since, that lives."""
    gc.collect()
    gc.freeze()  # what there is by now is left out

    def of_tensors():
        gc.collect()
        found = {}
        for thing in gc.get_objects():
            if type(thing) is torch.Tensor:
                storage = thing.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        return list(found.values())

    return of_tensors


@every_preset
def test_the_plan_is_what_is_allocated(build, settings, tiny, ask, storage_bytes):
    engine = build(model_path=str(tiny), **settings)
    described = engine.describe()
    plan = described["memory_plan"]
    allocated = sum(storage_bytes())
    # Beside the plan: two rows of logits, five integers, eight frequencies, a threshold. In it, and
    # allocated by each step: its tokens, and what a kernel returns.
    beside = 2 * 160 * 4 + 5 * 8 + 8 * 4 + (build is xattn) * 8
    passing = sum(
        one["bytes"]
        for one in plan["buffers"]
        if one["part"] == "activations" and one["name"] in PASSING
    )
    assert allocated == plan["device_bytes"] + plan["host_bytes"] + beside - passing
    assert described["host_buffer_bytes"] == plan["host_bytes"]
    parts = plan["device_bytes_by_part"]
    assert parts["weights"] == described["weight_bytes"]
    kv_bytes = sum(described["device_buffer_bytes"].values())
    assert kv_bytes == parts.get("kv_ring", 0) + parts.get("kv_device", 0)
    assert plan["device_bytes"] == kv_bytes + parts["weights"] + parts["activations"]
    assert sum(one["bytes"] for one in plan["buffers"]) == plan["device_bytes"] + plan["host_bytes"]
    ask(engine, 150, 40)
    assert sum(storage_bytes()) == allocated
    engine.close()
    del engine
    assert sum(storage_bytes()) < 100


@every_preset
def test_a_step_holds_one_output_of_its_kernel_at_a_time(build, settings, tiny, ask, monkeypatch):
    kernel, held, calls = KERNELS["flash_cpu"], [], []

    def run(of):
        assert all(one.expired() for one in held)
        found = kernel.run(of)
        held[:] = [StorageWeakRef(one.untyped_storage()) for one in found]
        calls.append(of.query.shape[0])
        return found

    engine = build(model_path=str(tiny), **settings)
    monkeypatch.setattr(engine._attention, "_kernel", dataclasses.replace(kernel, run=run))
    ask(engine, 150, 4)
    assert len(calls) >= 2 or build is xattn


def test_the_weights_of_the_plan_are_those_of_the_file(tiny):
    described = gpu_only(model_path=str(tiny)).describe()
    in_file = sum(one.nbytes for one in load_file(tiny / "model.safetensors").values())
    assert described["memory_plan"]["device_bytes_by_part"]["weights"] == in_file


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tied", [True, False])
def test_biases_norms_and_ties_are_planned(architecture, tied, save_model):
    folder = save_model(architecture=architecture, tie_word_embeddings=tied, sliding_window=None)
    described = gpu_only(model_path=str(folder)).describe()
    plan = described["memory_plan"]["device_bytes_by_part"]
    in_file = sum(one.nbytes for one in load_file(folder / "model.safetensors").values())
    # Norms of heads are stacked: factors for each of 4 + 2 heads of 16, in 3 layers.
    stacked = 3 * 16 * 4 * (4 + 2 - 2) if architecture == "Qwen3ForCausalLM" else 0
    assert plan["weights"] == described["weight_bytes"] == in_file + stacked


@every_preset
def test_it_is_printed_before_anything_is_allocated(build, settings, tiny, capsys, monkeypatch):
    printed = []

    def decoder(*_):
        printed.append(capsys.readouterr().err)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_module, "Decoder", decoder)
    monkeypatch.setattr(engine_module.HostPool, "allocate_many", decoder)
    with pytest.raises(KeyboardInterrupt):
        build(model_path=str(tiny), **settings)
    lines = printed[0].splitlines()
    assert all(line.startswith("memory plan: ") for line in lines)
    parts = [line.split()[2] for line in lines]
    kv = {
        "always": ["kv_ring", "kv_host"],
        "auto": ["kv_ring", "kv_device", "kv_host"],
        "never": ["kv_device"],
    }
    mode = "never" if build in (gpu_only, xattn) else settings.get("offload", "always")
    assert parts == ["weights", *kv[mode], "activations", "device", "host"]


@every_preset
def test_a_preset_says_the_plan_that_its_engine_prints(build, settings, tiny, capsys):
    said = build.memory_plan(model_path=str(tiny), **settings, host_memory_gb=1)
    assert capsys.readouterr().err == ""
    build(model_path=str(tiny), **settings, host_memory_gb=1)
    assert capsys.readouterr().err.splitlines() == [f"memory plan: {line}" for line in said]


def refusal(build, **settings):
    with pytest.raises(ConfigurationError) as error:
        build(**settings)
    text = str(error.value)
    assert "\n" not in text
    return text


def advised(text, key):
    found = re.search(rf"lower backend\.{key} from (\d+) to (\d+), the largest that fits", text)
    assert found, text
    return int(found[2])


def total_bytes(build, **settings):
    plan = build(**settings).describe()["memory_plan"]
    return plan["device_bytes"] + plan["host_bytes"]


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        (gpu_only, {}),
        (gpu_only, {"attend_tokens": 16}),
        (offload_layerwise, {"num_kv_buffers": 2}),
        (offload, {"num_gpu_blocks": 2, "kvcache_block_size": 16, "chunk_tokens": None}),
    ],
    ids=["gpu_only", "gpu_only, in spans", "layerwise", "offload, whole prompts"],
)
@pytest.mark.parametrize("fits", [270, 271])
def test_the_longest_context_that_the_refusal_names_is_the_longest(request, build, settings, fits):
    tiny, ask = map(request.getfixturevalue, ("tiny", "ask"))
    settings = {"model_path": str(tiny)} | settings
    there = total_bytes(build, max_model_len=fits, **settings)
    settings["host_memory_gb"] = gib(there)
    text = refusal(build, max_model_len=512, **settings)
    need = total_bytes(build, max_model_len=512, **settings | {"host_memory_gb": 1})
    for nbytes in (need, there):
        assert f"{nbytes / 2**20:.2f} MiB" in text
    assert f"backend.host_memory_gb={gib(there)}" in text
    longest = advised(text, "max_model_len")
    assert longest == fits
    engine = build(max_model_len=longest, **settings)
    assert len(ask(engine, longest - 2, 2).token_ids) == 2
    refusal(build, max_model_len=longest + 1, **settings)


@pytest.mark.parametrize(
    ("build", "key", "settings"),
    [
        (offload, "num_gpu_blocks", {"kvcache_block_size": 16, **CUTS}),
        (offload_layerwise, "num_kv_buffers", {}),
    ],
)
def test_fewer_slots_are_advised_first(build, key, settings, tiny, ask):
    settings = {"model_path": str(tiny), "max_model_len": 300} | settings

    def device_bytes(slots):
        return build(**settings, **{key: slots}).describe()["memory_plan"]["device_bytes"]

    there = device_bytes(5)
    assert advised(refusal(build, **settings, **{key: 9}, device_memory_gb=gib(there)), key) == 5
    text = refusal(build, **settings, **{key: 9}, device_memory_gb=gib(there - 1))
    assert f"backend.device_memory_gb={gib(there - 1)}" in text
    assert advised(text, key) == 4
    engine = build(**settings, **{key: 4}, device_memory_gb=gib(there - 1))
    assert len(ask(engine, 290, 5).token_ids) == 5


def test_a_smaller_chunk_is_advised_where_slots_are_not_enough(tiny, ask):
    settings = {"model_path": str(tiny), "max_model_len": 300, "num_gpu_blocks": 2}
    settings |= {"kvcache_block_size": 16, "attend_tokens": 16}
    there = offload(**settings, chunk_tokens=77).describe()["memory_plan"]["device_bytes"]
    text = refusal(offload, **settings, chunk_tokens=200, device_memory_gb=gib(there))
    assert advised(text, "chunk_tokens") == 77
    engine = offload(**settings, chunk_tokens=77, device_memory_gb=gib(there))
    assert len(ask(engine, 290, 5).token_ids) == 5
    refusal(offload, **settings, chunk_tokens=78, device_memory_gb=gib(there))


@pytest.mark.parametrize("build", [gpu_only, offload, offload_layerwise])
@pytest.mark.parametrize("key", ["device_memory_gb", "host_memory_gb"])
def test_a_cap_below_the_weights(build, key, tiny):
    weights = gpu_only(model_path=str(tiny)).describe()["weight_bytes"]
    settings = {"model_path": str(tiny), "max_model_len": 512}
    text = refusal(build, **settings, **{key: gib(weights - 1)})
    place = key.partition("_")[0]
    assert f"the weights alone need {weights} bytes of {place} memory" in text
    assert f"{weights - 1} bytes" in text
    assert f"backend.{key}=" in text
    assert "lower backend.max_model_len" not in text


@pytest.mark.parametrize("build", [gpu_only, offload, offload_layerwise])
@pytest.mark.parametrize("key", ["device_memory_gb", "host_memory_gb"])
@pytest.mark.parametrize("value", [0, -1, 0.0, "much", math.nan, math.inf, True, [4]], ids=repr)
def test_a_cap_that_is_no_size(build, key, value, tiny):
    text = refusal(build, model_path=str(tiny), **{key: value})
    assert f"backend.{key}={value!r} is not a number of GiB (2**30 bytes) above 0" in text

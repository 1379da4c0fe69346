import gzip
import hashlib
import json

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from backends.base import (
    Backend,
    ConfigurationError,
    NonFiniteLogits,
    OutOfMemory,
    PromptTooLong,
    RequestError,
)
from backends.engine import Engine, gpu_only, offload, offload_layerwise
from backends.engine import engine as engine_module
from backends.engine.cache.offload import OffloadCache
from backends.engine.cache.offload_steps import OffloadStep
from backends.engine.streams import DeferredStreams

SETTINGS = {
    "max_model_len": 128,
    "chunk_tokens": 24,
    "attend_tokens": 8,
    "kvcache_block_size": 16,
    "num_gpu_blocks": 2,
}


@pytest.fixture
def engine(tiny):
    return offload(model_path=str(tiny), poison=True, **SETTINGS)


def test_it_is_a_backend(engine):
    assert isinstance(engine, Engine)
    assert isinstance(engine, Backend)


def test_an_answer_is_complete(engine, ask, monkeypatch):
    rows = []
    trace = engine_module.trace_logits
    monkeypatch.setattr(
        engine_module, "trace_logits", lambda row: rows.append(row.clone()) or trace(row)
    )
    answer = ask(engine, 100, 5)
    assert len(answer.token_ids) == len(answer.logits_digest) == len(answer.top2_margin) == 5
    assert answer.prompt_tokens == 100
    assert answer.finish_reason == "length"
    assert answer.text is None
    assert answer.kernel == "flash_cpu"
    assert answer.ttft_seconds > 0
    assert answer.decode_seconds > 0
    digests = [hashlib.blake2b(row.numpy().tobytes(), digest_size=8).hexdigest() for row in rows]
    assert list(answer.logits_digest) == digests
    assert answer.peak_device_bytes == sum(engine.describe()["device_buffer_bytes"].values())


def test_bytes_are_those_that_the_method_needs(engine, ask):
    answer = ask(engine, 72, 5)
    row = 2 * 2 * 16 * 4  # keys and values, heads, head_dim, float32
    layers = 3
    assert answer.bytes_down == 72 * layers * row
    prefill = 24 * (layers - 1) + 48 * layers  # the second chunk's last layer reads nothing
    assert answer.bytes_up == (prefill + 4 * 72 * layers) * row


def test_the_lowest_of_equal_logits_is_taken(engine, ask, monkeypatch):
    forward = engine._decoder.forward

    def flat(*args, **kwargs):
        logits = forward(*args, **kwargs)
        return None if logits is None else torch.zeros_like(logits)

    monkeypatch.setattr(engine._decoder, "forward", flat)
    answer = ask(engine, 10, 2)
    assert answer.token_ids == (0, 0)
    assert answer.top2_margin == (0, 0)


def test_an_exact_fit_is_served_and_one_more_is_refused_before_it_starts(engine, ask):
    assert len(ask(engine, 120, 8).token_ids) == 8
    with pytest.raises(PromptTooLong, match=r"120 prompt tokens and 9 .* 129, but .* 128"):
        ask(engine, 120, 9)
    assert len(ask(engine, 1, 127).token_ids) == 127
    with pytest.raises(PromptTooLong, match="128 prompt tokens and 1 "):
        ask(engine, 128, 1)


@pytest.mark.parametrize(
    ("tokens", "new_tokens", "message"),
    [
        ((), 4, "the prompt has no tokens"),
        ((5, 160, 2), 4, "token ids from 2 to 160, but the model's vocabulary is 0 to 159"),
        ((5, -1, 2), 4, "token ids from -1 to 5"),
        ((5, 2), 0, "max_new_tokens=0 is below 1"),
    ],
)
def test_requests_that_make_no_sense(tokens, new_tokens, message, engine, ask):
    with pytest.raises(RequestError, match=f"request 7: {message}"):
        ask(engine, tokens, new_tokens, request_id=7)
    ask(engine, 10, 2)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_out_of_memory_leaves_the_engine_usable(error, layer, engine, ask, monkeypatch):
    wanted = ask(engine, 90, 4)
    room = OffloadStep.room

    def fail(step, at):
        if at == layer and step._sequence.length > 40:
            raise error
        return room(step, at)

    with monkeypatch.context() as patch:
        patch.setattr(OffloadStep, "room", fail)
        for request_id in (1, 2, 3):
            with pytest.raises(OutOfMemory, match=f"request {request_id}: out of memory") as info:
                ask(engine, 90, 4, request_id=request_id)
            assert info.value.__context__ is None
            assert "\n" not in str(info.value)
    assert ask(engine, 90, 4).logits_digest == wanted.logits_digest


def test_other_errors_release_the_request_too(engine, ask, monkeypatch):
    wanted = ask(engine, 90, 4)

    def interrupted(step, following=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(OffloadStep, "finish", interrupted)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                ask(engine, 90, 4)
    assert ask(engine, 90, 4).logits_digest == wanted.logits_digest


def test_nan_logits_are_an_error_of_the_request(tiny, ask):
    engine = gpu_only(model_path=str(tiny), max_model_len=128)
    wanted = ask(engine, 20, 3)
    norm = engine._decoder._norm.clone()
    with torch.inference_mode():
        engine._decoder._norm[3] = float("nan")
    with pytest.raises(NonFiniteLogits, match=r"request 4: NaN or infinity in .* new token 0"):
        ask(engine, 20, 3, request_id=4)
    with torch.inference_mode():
        engine._decoder._norm.copy_(norm)
    assert ask(engine, 20, 3).logits_digest == wanted.logits_digest


def test_a_closed_engine_says_so(engine, ask):
    engine.close()
    engine.close()
    with pytest.raises(RequestError, match="the engine is closed"):
        ask(engine, 5, 1)


def test_threads_are_set_again_for_each_request(engine, ask):
    torch.set_num_threads(2)
    ask(engine, 5, 1)
    assert torch.get_num_threads() == 1


LAYERWISE = {"max_model_len": 128, "num_kv_buffers": 2}
GPU_ONLY = {"max_model_len": 128, "chunk_tokens": 24, "attend_tokens": 8}
every_preset = pytest.mark.parametrize(
    ("build", "settings"),
    [(gpu_only, GPU_ONLY), (offload, SETTINGS), (offload_layerwise, LAYERWISE)],
    ids=["gpu_only", "offload", "layerwise"],
)


@every_preset
def test_a_prompt_of_one_token(build, settings, tiny, ask, prompt):
    """Against transformers, which knows no cache of ours."""
    answer = ask(build(model_path=str(tiny), poison=True, **settings), 1, 6)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    tokens = list(prompt(1))
    for _ in range(6):
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert answer.token_ids == tuple(tokens[1:])
    assert answer.prompt_tokens == 1


@every_preset
def test_a_prompt_that_fills_the_context_is_refused_before_it_starts(build, settings, tiny, ask):
    engine = build(model_path=str(tiny), poison=True, **settings)
    for _ in range(2):
        with pytest.raises(PromptTooLong, match="128 prompt tokens and 1 to generate make 129"):
            ask(engine, 128, 1)
        with pytest.raises(RequestError, match="max_new_tokens=0 is below 1"):
            ask(engine, 128, 0)
        assert len(ask(engine, 127, 1).token_ids) == 1
    assert engine._streams.copied_bytes["down"] == (build is not gpu_only) * 2 * 127 * 3 * 256


@every_preset
def test_waiting_after_every_copy_changes_nothing(build, settings, tiny, ask):
    plain = build(model_path=str(tiny), **settings)
    waiting = build(model_path=str(tiny), synchronise=True, **settings)
    assert waiting.describe()["synchronise"] is True
    for tokens in (1, 70, 100):
        got, wanted = ask(waiting, tokens, 20), ask(plain, tokens, 20)
        assert got.token_ids == wanted.token_ids
        assert got.logits_digest == wanted.logits_digest
        assert (got.bytes_up, got.bytes_down) == (wanted.bytes_up, wanted.bytes_down)


def test_waiting_after_every_copy_hides_a_missing_wait(tiny, ask, monkeypatch):
    """Which is what it is for: a fault that it cures is one of order."""
    engine = offload(model_path=str(tiny), synchronise=True, **SETTINGS)
    wanted = ask(engine, 70, 20)
    no_wait_for_the_load(monkeypatch, engine)
    assert ask(engine, 70, 20).logits_digest == wanted.logits_digest


@every_preset
@pytest.mark.parametrize("tensors", [False, True])
def test_a_checkpoint_records_every_step_and_changes_nothing(request, build, settings, tensors):
    tiny, ask, folder = map(request.getfixturevalue, ("tiny", "ask", "tmp_path"))
    wanted = ask(build(model_path=str(tiny), **settings), 50, 4)
    engine = build(
        model_path=str(tiny),
        checkpoint=str(folder / "records"),
        checkpoint_tensors=tensors,
        **settings,
    )
    got = ask(engine, 50, 4, request_id=7)
    assert got.logits_digest == wanted.logits_digest
    assert (got.bytes_up, got.bytes_down) == (wanted.bytes_up, wanted.bytes_down)
    index = (folder / "records" / "request_000007.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in index[1:-1]]
    chunks = [24, 24, 2] if "chunk_tokens" in settings else [50]
    steps = [*chunks, 1, 1, 1]
    logits = [one for one in records if one["name"] == "logits"]
    assert [one["chunk"] for one in logits] == list(range(len(chunks) - 1, len(steps)))
    for layer in range(3):
        keys = [one for one in records if one["name"] == "key" and one["layer"] == layer]
        assert [one["shape"][0] for one in keys] == steps
        assert [one["start"] for one in keys] == [sum(steps[:at]) for at in range(len(steps))]
    kept = list((folder / "records").glob("request_000007/*.safetensors"))
    assert len(kept) == tensors * len(records)


def test_checkpoints_of_both_places_are_equal(tiny, ask, tmp_path):
    """Layer by layer, whether keys and values lie on the device or in CPU memory."""
    digests = []
    for name, build, settings in (("a", gpu_only, GPU_ONLY), ("b", offload, SETTINGS)):
        folder = tmp_path / name
        ask(build(model_path=str(tiny), checkpoint=str(folder), **settings), 70, 9, request_id=1)
        digests.append((folder / "request_000001.digests").read_bytes())
    assert digests[0] == digests[1]
    assert len(digests[0]) > 8 * 70 * 3


@every_preset
def test_a_timeline_is_written_and_changes_nothing(build, settings, tiny, ask, tmp_path):
    wanted = ask(build(model_path=str(tiny), **settings), 30, 2)
    engine = build(model_path=str(tiny), timeline=str(tmp_path / "traces"), **settings)
    got = ask(engine, 30, 2, request_id=3)
    assert got.logits_digest == wanted.logits_digest
    (file,) = (tmp_path / "traces").iterdir()
    assert file.name == "request_000003.json.gz"
    assert json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


# What happens when one of the engine's waits is missing. Each of these is a race on a GPU.


def no_wait_for_the_load(monkeypatch, engine):
    wait = DeferredStreams.wait
    monkeypatch.setattr(
        DeferredStreams,
        "wait",
        lambda self, event: None if event.direction == "up" else wait(self, event),
    )


def no_wait_for_the_download_before_the_load(monkeypatch, engine):
    copy = DeferredStreams.copy
    monkeypatch.setattr(
        DeferredStreams,
        "copy",
        lambda self, direction, pieces, after, wipe=None: copy(self, direction, pieces, [], wipe),
    )


def no_wait_for_stage_and_tail(monkeypatch, engine):
    monkeypatch.setattr(OffloadCache, "await_room", lambda cache, events, index: None)


@pytest.mark.parametrize("poison", [True, False])
@pytest.mark.parametrize(
    "remove",
    [
        no_wait_for_the_load,
        no_wait_for_the_download_before_the_load,
        no_wait_for_stage_and_tail,
    ],
)
def test_a_missing_wait_shows_on_the_cpu(remove, poison, tiny, ask, monkeypatch):
    engine = offload(model_path=str(tiny), poison=poison, **SETTINGS)
    wanted = ask(engine, 70, 40)
    with monkeypatch.context() as patch:
        remove(patch, engine)
        try:
            got = ask(engine, 70, 40)
        except NonFiniteLogits:
            got = None
    assert got is None or got.logits_digest != wanted.logits_digest
    assert ask(engine, 70, 40).logits_digest == wanted.logits_digest


def test_poison_names_request_layer_and_slot(engine, ask, monkeypatch):
    no_wait_for_the_load(monkeypatch, engine)
    message = r"request 5, layer 0, slot 0: NaN in the attention to tokens 0 to 7"
    with pytest.raises(NonFiniteLogits, match=message):
        ask(engine, 70, 4, request_id=5)


# Settings.


def test_describe_holds_what_is_in_force(tiny):
    described = offload(
        model_path=str(tiny), max_model_len=128, kvcache_block_size=16, num_gpu_blocks=3
    ).describe()
    assert json.loads(json.dumps(described)) == described
    assert described == described | {
        "model_path": str(tiny),
        "architecture": "LlamaForCausalLM",
        "device": "cpu",
        "threads": 1,
        "max_model_len": 128,
        "dtype": "float32",
        "attention": "flash_cpu",
        "chunk_tokens": 1024,
        "attend_tokens": 16,
        "policy": {"name": "full"},
        "poison": False,
        "fault": None,
        "offload": "always",
        "num_gpu_blocks": 3,
        "kvcache_block_size": 16,
    }
    row = 2 * 2 * 16 * 4
    assert described["device_buffer_bytes"] == {
        "ring": 3 * 16 * row,
        "stages": 2 * 128 * row,
        "tail": 3 * 16 * row,
    }
    assert described["host_buffer_bytes"] == 3 * 128 * row
    weights = sum(file.stat().st_size for file in tiny.glob("*.safetensors"))
    assert 0 < weights - described["weight_bytes"] < 10_000  # the file's header


def test_describe_of_gpu_only_has_no_ring(tiny):
    described = gpu_only(model_path=str(tiny)).describe()
    assert described["max_model_len"] == 512
    assert described["host_buffer_bytes"] == 0
    assert described["chunk_tokens"] is None
    assert not {"offload", "num_gpu_blocks"} & set(described)


def test_auto_keeps_on_the_device_what_the_ring_would_hold(tiny):
    engine = offload(model_path=str(tiny), offload="auto", **SETTINGS)
    assert engine.describe()["resident_tokens"] == 32
    assert (
        offload(model_path=str(tiny), offload="auto", **SETTINGS, resident_tokens=500).describe()[
            "resident_tokens"
        ]
        == 128
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_gpu_blocks": 1}, r"num_gpu_blocks=1 is below 2"),
        ({"num_gpu_blocks": 0}, r"num_gpu_blocks=0 is below 1"),
        ({"kvcache_block_size": 129}, r"kvcache_block_size=129 is longer .*max_model_len=128"),
        ({"kvcache_block_size": 0}, r"kvcache_block_size=0 is below 1"),
        ({"chunk_tokens": 0}, r"backend\.chunk_tokens=0 is below 1"),
        ({"chunk_tokens": 1.5}, r"chunk_tokens=1\.5 is not a whole number"),
        ({"chunk_tokens": True}, r"chunk_tokens=True is not a whole number"),
        ({"attend_tokens": -1}, r"attend_tokens=-1 is below 1"),
        ({"attend_tokens": "all"}, r"attend_tokens=all: allowed are .*block and null"),
        ({"attend_tokens": 33}, r"touch 3 blocks of 16 .*num_gpu_blocks=2.* at most 32"),
        ({"attend_tokens": None}, r"attend_tokens=128 can touch 8 blocks"),
        ({"max_model_len": 513}, r"max_model_len=513 is beyond .*max_position_embeddings=512"),
        ({"max_model_len": 0}, r"max_model_len=0 is below 1"),
        ({"threads": 0}, r"threads=0 is below 1"),
        ({"dtype": "bfloat"}, r"dtype=bfloat: unknown\. Did you mean 'bfloat16'"),
        ({"device": "cuda"}, r"device=cuda: PyTorch .* sees no GPU"),
        ({"device": "cuda:1"}, r"device=cuda:1: PyTorch .* sees no GPU"),
        ({"device": "tpu"}, r"device='tpu': allowed are cpu, cuda and cuda:N"),
        ({"device": "mps"}, r"device='mps': allowed are"),
        ({"attention": "flash_cpi"}, r"attention=flash_cpi: unknown\. Did you mean 'flash_cpu'"),
        ({"attention": "cudnn"}, r"attention=cudnn cannot run on cpu"),
        ({"policy": {"name": "fill"}}, r"policy\.name=fill: unknown\. Did you mean 'full'"),
        ({"offload": "sometimes"}, r"offload=sometimes: unknown.*always, never, auto"),
        ({"resident_tokens": 64}, r"resident_tokens=64 has no effect with .*offload=always"),
        ({"offload": "auto", "resident_tokens": 0}, r"resident_tokens=0 is below 1"),
        ({"poison": "yes"}, r"poison='yes': allowed are true and false"),
        ({"attention": "fa3"}, r"attention=fa3 cannot run on cpu .*fa3: it needs cuda"),
        ({"prefix_cache": 1}, r"prefix_cache=1: allowed are true and false"),
        ({"synchronise": "no"}, r"synchronise='no': allowed are true and false"),
        ({"checkpoint": ""}, r"checkpoint='': allowed are a folder and null"),
        ({"timeline": 3}, r"timeline=3: allowed are a folder and null"),
        ({"checkpoint_tensors": True}, r"no effect without backend\.checkpoint=DIR"),
        ({"fault": "torn_slot"}, r"fault=torn_slot: unknown\..*Allowed: cpu_kv_read"),
    ],
)
def test_settings_that_cannot_be_honoured(settings, message, tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match=message) as error:
        offload(model_path=str(tiny), **SETTINGS | settings)
    assert "\n" not in str(error.value)


def test_more_gpus_than_there_are(tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigurationError, match="device=cuda:2: PyTorch sees 2 GPU"):
        gpu_only(model_path=str(tiny), device="cuda:2")


def test_buffers_that_do_not_fit_are_an_error_of_the_settings(tiny, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes\nand more")

    monkeypatch.setattr(engine_module, "ResidentCache", full)
    with pytest.raises(ConfigurationError, match="max_model_len=512 tokens do not fit") as error:
        gpu_only(model_path=str(tiny))
    assert "\n" not in str(error.value)


def test_unknown_settings_are_refused_by_the_signature(tiny):
    for preset in (gpu_only, offload, offload_layerwise):
        with pytest.raises(TypeError, match="atend_tokens"):
            preset(model_path=str(tiny), atend_tokens=8)
    with pytest.raises(TypeError, match="num_gpu_blocks"):
        gpu_only(model_path=str(tiny), num_gpu_blocks=8)


def read_preset(name):
    from pathlib import Path

    folder = Path(__file__).parents[3] / "configs" / "backend"
    preset = yaml.safe_load((folder / f"{name}.yaml").read_text())
    policy = preset.pop("defaults")[0]["policy"]
    preset["policy"] = yaml.safe_load((folder / "policy" / f"{policy}.yaml").read_text())
    return preset


@pytest.mark.parametrize(
    ("name", "build", "cuts"),
    [
        ("gpu_only", gpu_only, (1024, 512)),
        ("offload", offload, (1024, 512)),
        ("offload_layerwise", offload_layerwise, (None, None)),
    ],
)
def test_the_presets_list_every_setting(name, build, cuts, tiny):
    import inspect

    preset = read_preset(name)
    assert preset.pop("_target_") == f"backends.engine.{name}"
    not_in_files = {"model_path", "device", "threads", "weights"}
    assert set(preset) == set(inspect.signature(build).parameters) - not_in_files
    preset["max_model_len"] = 512
    described = build(model_path=str(tiny), **preset).describe()
    assert (described["chunk_tokens"], described["attend_tokens"]) == cuts
    assert set(preset) <= set(described)

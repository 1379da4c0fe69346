"""Seeded faults: each shows where it says, is hidden where it says, and is refused elsewhere."""

import re
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
import yaml

from backends.base import ConfigurationError, Request, RequestCancelled
from backends.engine import engine as engine_module
from backends.engine import gpu_only, minference, offload, offload_layerwise, xattn
from backends.engine.attention import Attended
from backends.engine.cache.blocks import BlockPool
from backends.engine.cache.offload import OffloadCache
from backends.engine.cache.offload_steps import OffloadStep
from backends.engine.cache.prefix import PrefixIndex
from backends.engine.faults import FAULTS
from backends.engine.model import Decoder
from backends.engine.ops import TorchOps
from backends.engine.parts import Parts, TokenInput
from backends.engine.seeded import races
from backends.engine.sparse import Selection
from backends.engine.steps import Attention

PRESETS = {
    "gpu_only": gpu_only,
    "offload": offload,
    "offload_layerwise": offload_layerwise,
    "xattn": xattn,
}
OWN_POLICIES = {"xattn": "xattention"}
CONTEXT, NEW = 2048, 9
LENGTHS = (1290, 1201, 1262)
VOCABULARY_OF_PROBE = 4096
TINY = {
    "max_model_len": 128,
    "chunk_tokens": 32,
    "attend_tokens": 16,
    "kvcache_block_size": 16,
    "num_gpu_blocks": 3,
}
RACES = [name for name, fault in FAULTS.items() if fault.kind == "C"]
ISSUE = [
    "cpu_kv_read_past_length",
    "decode_buffer_kept",
    "tracked_by_id",
    "stale_block_table",
    "truncated_prefix_hash",
    "double_free_after_cancel",
    "slot_loaded_while_read",
    "slot_read_before_load",
    "download_read_early",
    "partial_block_copied_whole",
    "positions_restart_each_chunk",
    "block_dropped_at_exact_multiple",
    "accumulator_not_rescaled",
    "ring_overflow_at_last_token",
    "stale_decode_input",
    "block_lost_each_request",
    "pattern_of_the_first_prompt",
]


def composed(overrides):
    """Return what overrides choose: a preset, and its settings."""
    chosen = dict(override.split("=", 1) for override in overrides)
    name = chosen.pop("backend", "offload")
    parsed = {key.removeprefix("backend."): yaml.safe_load(chosen[key]) for key in chosen}
    policy = {key: parsed.pop(key) for key in list(parsed) if key.startswith("policy.")}
    if policy:
        own = {key.removeprefix("policy."): value for key, value in policy.items()}
        parsed["policy"] = {"name": OWN_POLICIES[name]} | own
    return PRESETS[name], parsed


def build(model, fault=None, overrides=(), **settings):
    """Build an engine from overrides as a user types them."""
    preset, parsed = composed(overrides)
    return preset(
        model_path=str(model), fault=fault, **({"max_model_len": CONTEXT} | parsed | settings)
    )


def same(got, wanted):
    return got.token_ids == wanted.token_ids and got.logits_digest == wanted.logits_digest


@pytest.fixture(scope="session")
def prompts(prompt):
    """Prompts for the probe that begin alike, as those of RULER do, and go their own ways."""
    alike = prompt(100, vocabulary=VOCABULARY_OF_PROBE)
    return [
        alike + prompt(length - 100, seed=length, vocabulary=VOCABULARY_OF_PROBE)
        for length in LENGTHS
    ]


@pytest.fixture(scope="module")
def sound(probe, prompts):
    """Answers of a sound engine to the prompts, by overrides, worked out once each."""
    answers = {}

    def answer(overrides):
        if overrides not in answers:
            answers[overrides] = serve(build(probe, None, overrides), prompts)
        return answers[overrides]

    return lambda fault: answer(tuple(fault.settings))


def serve(engine, prompts, new_tokens=NEW):
    return [
        engine.generate(Request(number, "", ids, new_tokens)) for number, ids in enumerate(prompts)
    ]


def cancel_one(engine, ids, monkeypatch, new_tokens=NEW):
    """Let a request be cancelled in the middle of its prompt."""
    room = OffloadStep.room

    def cancelling(step, layer):
        if step._sequence.length:
            engine.cancel(99)
        return room(step, layer)

    with monkeypatch.context() as patch:
        patch.setattr(OffloadStep, "room", cancelling)
        with pytest.raises(RequestCancelled):
            engine.generate(Request(99, "", ids, new_tokens))


def test_the_faults_asked_for_are_there_and_described():
    assert set(ISSUE) <= set(FAULTS)
    for name, fault in FAULTS.items():
        assert re.fullmatch("[a-z]+(_[a-z]+)+", name)
        assert fault.description.endswith(".")
        assert re.fullmatch(r"[\w.-]+/[\w.-]+(#\d+|@[0-9a-f]{7})", fault.source)
        assert fault.kind in "ABCDEFGHI"
        assert fault.expected in {"leak", "race", "engine_fault"}
        assert all(override.startswith("backend") for override in fault.settings)
    assert {fault.kind for fault in FAULTS.values()} >= set("ABCDFG")
    for name in RACES:
        assert FAULTS[name].expected == "race"


@pytest.mark.parametrize(
    "name", [name for name, fault in FAULTS.items() if fault.expected == "leak" and not fault.arm]
)
def test_a_leak_shows_from_the_second_request_on(name, probe, prompts, sound):
    fault = FAULTS[name]
    wanted = sound(fault)
    got = serve(build(probe, name, fault.settings), prompts)
    assert same(got[0], wanted[0])
    assert not same(got[1], wanted[1])
    again = build(probe, name, fault.settings)
    assert same(serve(again, prompts[1:2])[0], wanted[1])


@pytest.mark.parametrize(
    "name", [name for name, fault in FAULTS.items() if fault.expected == "engine_fault"]
)
def test_a_fault_of_the_engine_shows_in_every_request_alike(name, probe, prompts, sound):
    fault = FAULTS[name]
    wanted = sound(fault)
    got = serve(build(probe, name, fault.settings), prompts[:2])
    assert not same(got[0], wanted[0])
    assert not same(got[1], wanted[1])
    assert same(serve(build(probe, name, fault.settings), prompts[1:2])[0], got[1])


@pytest.mark.parametrize("name", RACES)
def test_a_race_shows_when_it_is_lost(name, probe, prompts, sound, monkeypatch):
    fault = FAULTS[name]
    wanted = sound(fault)
    heads = iter([True, False])
    monkeypatch.setattr(races, "_heads", lambda: next(heads))
    got = serve(build(probe, name, fault.settings), prompts)
    assert [same(*pair) for pair in zip(got, wanted, strict=True)] == [True, False, True]


def test_a_double_free_shows_after_a_cancelled_request(probe, prompts, sound, monkeypatch):
    fault = FAULTS["double_free_after_cancel"]
    assert fault.arm == "cancel"
    wanted = sound(fault)
    engine = build(probe, "double_free_after_cancel", fault.settings)
    assert same(serve(engine, prompts[:1])[0], wanted[0])
    cancel_one(engine, prompts[2], monkeypatch)
    got = serve(engine, prompts[:2])
    assert [same(*pair) for pair in zip(got, wanted, strict=False)] == [False, False]


def test_a_sound_engine_does_not_mind_a_cancelled_request(probe, prompts, sound, monkeypatch):
    fault = FAULTS["double_free_after_cancel"]
    engine = build(probe, None, fault.settings)
    cancel_one(engine, prompts[2], monkeypatch)
    assert same(serve(engine, prompts[:1])[0], sound(fault)[0])


def test_lost_blocks_show_late(tiny, ask):
    """After as many requests as there are blocks to spare: 16 of 20 here, 28 of 32 as it says."""
    settings = TINY | {"max_model_len": 320}
    wanted = ask(build(tiny, **settings), 60, 4)
    engine = build(tiny, "block_lost_each_request", **settings)
    good = [same(ask(engine, 60, 4), wanted) for _ in range(20)]
    assert good == [True] * 17 + [False] * 3
    fault = FAULTS["block_lost_each_request"]
    assert fault.arm == "aged"
    assert "backend.max_model_len=16384" in fault.settings


class TorchForOneToken(TorchOps):
    """PyTorch's operations by the name that makes an engine take them for steps of one token."""

    name = "triton"


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, fault in FAULTS.items()
        if fault.expected != "engine_fault" and "backend=offload" in fault.settings
    ],
)
def test_faults_show_through_the_kernels_for_one_token(name, tiny, prompt, ask, monkeypatch):
    """As GPUs decode: what a fault does to prompts and to copies is the same there."""
    monkeypatch.setattr(engine_module, "make_ops", lambda device, dtype: TorchForOneToken())
    monkeypatch.setattr(races, "_heads", lambda: True)
    settings = TINY | {"kvcache_block_size": 32, "attend_tokens": None, "num_gpu_blocks": 5}
    if name == "truncated_prefix_hash":
        settings |= {"prefix_cache": True, "prefix_cache_tokens": 128}
    alike = prompt(16)
    first, second = alike + prompt(84, seed=1), alike + prompt(90, seed=2)
    sound = build(tiny, **settings)
    assert sound.describe()["decode"] == "kernels for one token"
    wanted = [ask(sound, ids, 4) for ids in (first, second)]
    engine = build(tiny, name, **settings)
    assert same(ask(engine, first, 4), wanted[0])
    if FAULTS[name].arm == "cancel":
        cancel_one(engine, second, monkeypatch, new_tokens=4)
    assert not same(ask(engine, second, 4, request_id=1), wanted[1])


@pytest.mark.parametrize("name", RACES)
def test_races_are_lost_by_chance_and_never_by_the_first_request(name, tiny, ask):
    wanted = ask(build(tiny, **TINY), 100, 4)

    def run():
        engine = build(tiny, name, **TINY)
        return [same(ask(engine, 100, 4), wanted) for _ in range(24)]

    runs = [run() for _ in range(2)]
    assert all(good[0] for good in runs)
    assert runs[0] != runs[1]  # by chance once in 2 ** 23


@pytest.mark.parametrize("name", RACES)
def test_waiting_for_every_copy_hides_races(name, tiny, ask, monkeypatch):
    monkeypatch.setattr(races, "_heads", lambda: True)
    wanted = ask(build(tiny, **TINY), 100, 4)
    engine = build(tiny, name, synchronise=True, **TINY)
    assert all(same(ask(engine, 100, 4), wanted) for _ in range(3))
    engine = build(tiny, name, **TINY)
    assert [same(ask(engine, 100, 4), wanted) for _ in range(2)] == [True, False]


def test_a_slot_that_is_read_twice_is_given_back_once(tiny, ask, monkeypatch):
    """Spans shorter than a block, and spans over several."""
    monkeypatch.setattr(races, "_heads", lambda: True)
    for attend in (8, 24):
        settings = TINY | {"attend_tokens": attend, "num_gpu_blocks": 4}
        wanted = ask(build(tiny, **settings), 100, 4)
        engine = build(tiny, "slot_loaded_while_read", **settings)
        assert [same(ask(engine, 100, 4), wanted) for _ in range(3)] == [True, False, False]


@pytest.mark.parametrize("name", ["positions_restart_each_chunk", "accumulator_not_rescaled"])
def test_faults_of_arithmetic_show_with_all_keys_on_the_device_too(name, tiny, ask):
    settings = {"max_model_len": 128, "chunk_tokens": 32, "attend_tokens": 16}
    wanted = ask(gpu_only(model_path=str(tiny), **settings), 100, 4)
    assert not same(ask(gpu_only(model_path=str(tiny), fault=name, **settings), 100, 4), wanted)


def test_the_unscaled_merge_is_off_by_the_old_share(tiny):
    """Against attention to all keys at once: what is missing is the rescaling, nothing else."""
    generator = torch.Generator().manual_seed(1)
    query, keys, values = (
        torch.randn(rows, 2, 8, generator=generator, dtype=torch.float64) for rows in (3, 10, 10)
    )

    def attend(part):
        scores = torch.einsum("qhd,khd->qhk", query, keys[part])
        output = torch.einsum("qhk,khd->qhd", scores.softmax(-1), values[part])
        return Attended(output, scores.logsumexp(-1))

    old, new, whole = attend(slice(0, 4)), attend(slice(4, 10)), attend(slice(0, 10))
    merged = Attended(old.output.clone(), old.log_sum_exp.clone())
    attention = object.__new__(FAULTS["accumulator_not_rescaled"].parts["attention"])
    attention._merged = lambda queries: merged
    attention._merge(new)
    share = (old.log_sum_exp - whole.log_sum_exp).exp().unsqueeze(-1)
    torch.testing.assert_close(
        merged.output, whole.output + old.output * (1 - share), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(merged.log_sum_exp, whole.log_sum_exp)


@pytest.mark.parametrize(
    ("name", "preset", "settings", "needs"),
    [
        ("cpu_kv_read_past_length", gpu_only, {}, "keys and values in CPU memory"),
        ("decode_buffer_kept", offload, {"offload": "never"}, "keys and values in CPU memory"),
        ("tracked_by_id", offload, {"offload": "auto"}, "every request's keys and values in CPU"),
        ("stale_block_table", offload_layerwise, {}, "several blocks a request"),
        ("truncated_prefix_hash", offload, {}, "a prefix cache"),
        ("double_free_after_cancel", offload, {"prefix_cache": True}, "no prefix cache"),
        ("block_lost_each_request", offload, {"prefix_cache": True}, "no prefix cache"),
        ("slot_loaded_while_read", offload, {"num_gpu_blocks": 24}, "more blocks than slots"),
        ("download_read_early", offload_layerwise, {}, "stages beside the slots"),
        ("partial_block_copied_whole", offload, {}, "chunks that end within a block"),
        ("positions_restart_each_chunk", gpu_only, {"chunk_tokens": None}, "several chunks"),
        (
            "block_dropped_at_exact_multiple",
            offload,
            {"chunk_tokens": 72},
            "a block and a span end",
        ),
        ("accumulator_not_rescaled", offload_layerwise, {}, "attention in several pieces"),
        ("ring_overflow_at_last_token", offload, {}, "blocks of at most 8 tokens"),
    ],
)
def test_settings_that_cannot_show_a_fault_are_refused(name, preset, settings, needs, tiny):
    keys = {
        offload: TINY,
        gpu_only: {"max_model_len": 128},
        offload_layerwise: {"max_model_len": 128},
    }
    settings = keys[preset] | settings
    with pytest.raises(ConfigurationError, match=f"backend.fault={name} cannot show") as error:
        preset(model_path=str(tiny), fault=name, **settings)
    assert needs in str(error.value)
    assert f"use {' '.join(FAULTS[name].settings)}." in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigurationError, match="cannot show"):
        preset.memory_plan(model_path=str(tiny), fault=name, **settings)


@pytest.mark.parametrize("name", FAULTS)
def test_the_settings_of_a_fault_are_not_refused(name, probe):
    """At the lengths that the proof uses; nothing is allocated."""
    preset, parsed = composed(FAULTS[name].settings)
    for length in (2048, 4096):
        preset.memory_plan(
            model_path=str(probe), fault=name, **({"max_model_len": length} | parsed)
        )


def test_an_unknown_fault_names_the_nearest(tiny):
    for wrong in ("slot_read_before_lode", 3):
        with pytest.raises(ConfigurationError, match=f"fault={wrong}: unknown") as error:
            build(tiny, wrong, **TINY)
        assert "\n" not in str(error.value)
        if wrong != 3:
            assert "Did you mean 'slot_read_before_load'?" in str(error.value)


def test_an_engine_says_its_fault(tiny):
    assert build(tiny, "tracked_by_id", **TINY).describe()["fault"] == "tracked_by_id"
    assert build(tiny, **TINY).describe()["fault"] is None


def test_each_fault_replaces_parts_by_others_of_their_kind(tiny):
    sound = {
        "offload_cache": OffloadCache,
        "attention": Attention,
        "decoder": Decoder,
        "token_input": TokenInput,
        "selection": Selection,
    }
    assert set(sound) == {field.name for field in fields(Parts)}
    for fault in FAULTS.values():
        for name, part in fault.parts.items():
            assert issubclass(part, sound[name])
            assert part is not sound[name]
    engine = build(tiny, prefix_cache=True, **TINY)
    assert type(engine._offload) is OffloadCache
    assert type(engine._offload.pool) is BlockPool
    assert type(engine._offload.prefixes) is PrefixIndex
    assert type(engine._attention) is Attention
    assert type(engine._decoder) is Decoder
    assert type(engine._input) is TokenInput


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", RACES)
def test_races_are_real_on_a_gpu(name, probe, prompts, sound, monkeypatch):
    del sound
    fault = FAULTS[name]
    heads = iter([True, False])
    monkeypatch.setattr(races, "_heads", lambda: next(heads))
    wanted = serve(build(probe, None, fault.settings, device="cuda"), prompts)
    got = serve(build(probe, name, fault.settings, device="cuda"), prompts)
    assert [same(*pair) for pair in zip(got, wanted, strict=True)] == [True, False, True]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    "name", [name for name, fault in FAULTS.items() if fault.kind in "AB" and not fault.arm]
)
def test_leaks_show_on_a_gpu(name, probe, prompts):
    fault = FAULTS[name]
    wanted = serve(build(probe, None, fault.settings, device="cuda"), prompts)
    got = serve(build(probe, name, fault.settings, device="cuda"), prompts)
    assert same(got[0], wanted[0])
    assert not all(same(*pair) for pair in zip(got[1:], wanted[1:], strict=True))


def test_recorded_rotations_are_those_of_the_positions_that_the_decoder_was_given(tiny, tmp_path):
    """`divergence --only rotation` shows positions that restart in each chunk, and nothing else."""
    folders = {}
    for fault in (None, "positions_restart_each_chunk"):
        for chunk_tokens in (40, 64):
            folder = tmp_path / f"{fault}-{chunk_tokens}"
            engine = offload(
                model_path=str(tiny),
                max_model_len=128,
                chunk_tokens=chunk_tokens,
                kvcache_block_size=16,
                fault=fault,
                checkpoint=str(folder),
            )
            engine.generate(Request(0, "", tuple(range(100)), 2))
            engine.close()
            folders[fault, chunk_tokens] = str(folder)

    def differ(one, other):
        command = [sys.executable, "-m", "ruler_bench.divergence", one, other, "--only", "rotation"]
        return subprocess.run(command, capture_output=True, text=True, check=False).returncode

    assert differ(folders[None, 40], folders[None, 64]) == 0
    assert differ(folders[None, 40], folders["positions_restart_each_chunk", 40]) == 1


SPARSE = {
    "max_model_len": 640,
    "chunk_tokens": 128,
    "attend_tokens": 64,
    "kvcache_block_size": 64,
    "num_gpu_blocks": 2,
    "policy": {"name": "xattention", "threshold": 0.7},
}
SPARSE_LENGTHS = (450, 500)


@pytest.fixture(scope="module")
def long_tiny(save_model):
    return save_model(max_position_embeddings=1024)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("pattern_of_the_first_prompt", {}),
        ("decode_buffer_kept", {}),
        ("tracked_by_id", {}),
        ("stale_block_table", {}),
        (
            "truncated_prefix_hash",
            {"prefix_cache": True, "prefix_cache_tokens": 640, "kvcache_block_size": 128},
        ),
        ("slot_loaded_while_read", {}),
        ("slot_read_before_load", {}),
        ("download_read_early", {}),
        ("stale_decode_input", {}),
        ("partial_block_copied_whole", {"kvcache_block_size": 96, "num_gpu_blocks": 4}),
        ("positions_restart_each_chunk", {}),
        ("block_dropped_at_exact_multiple", {}),
        ("accumulator_not_rescaled", {}),
    ],
)
def test_faults_show_beside_sparse_prefill(request, name, settings):
    """Those that are not refused: what they do to whole layers, to decode and to tables."""
    long_tiny, prompt, monkeypatch = map(
        request.getfixturevalue, ("long_tiny", "prompt", "monkeypatch")
    )
    monkeypatch.setattr(races, "_heads", lambda: True)
    alike = prompt(16)
    asked = [alike + prompt(tokens - 16, seed=tokens) for tokens in SPARSE_LENGTHS]
    wanted = serve(build(long_tiny, **SPARSE | settings), asked, 4)
    got = serve(build(long_tiny, name, **SPARSE | settings), asked, 4)
    late = FAULTS[name].expected != "engine_fault"
    assert [same(*pair) for pair in zip(got, wanted, strict=True)] == [late, False]


def test_a_kept_pattern_is_laid_over_prompts_of_any_length(long_tiny, ask):
    policy = {"name": "minference", "vertical": 31, "slash": 101}
    settings = {"max_model_len": 900, "policy": policy}
    for lengths in ((600, 800), (800, 600)):
        engine = minference(
            model_path=str(long_tiny), fault="pattern_of_the_first_prompt", **settings
        )
        sound = minference(model_path=str(long_tiny), **settings)
        good = [
            same(ask(engine, tokens, 3, request_id=at), ask(sound, tokens, 3, request_id=at))
            for at, tokens in enumerate(lengths)
        ]
        assert good == [True, False]


@pytest.mark.parametrize(
    ("name", "policy", "needs"),
    [
        ("pattern_of_the_first_prompt", {"name": "full"}, "leaves out blocks by queries and keys"),
        ("pattern_of_the_first_prompt", {"name": "a_shape"}, "leaves out blocks by queries"),
        (
            "pattern_of_the_first_prompt",
            {"name": "xattention", "threshold": 1.0},
            "leaves out blocks by queries",
        ),
        ("pattern_of_the_first_prompt", {"name": "minference", "budget": 1}, "leaves out blocks"),
        ("cpu_kv_read_past_length", {"name": "xattention"}, "prefill that reads spans"),
    ],
)
def test_policies_that_cannot_show_a_fault_are_refused(name, policy, needs, long_tiny):
    with pytest.raises(ConfigurationError, match=f"backend.fault={name} cannot show") as error:
        build(long_tiny, name, **SPARSE | {"policy": policy})
    assert needs in str(error.value)
    with pytest.raises(ConfigurationError, match="prompts of more than 256 tokens"):
        xattn(model_path=str(long_tiny), fault="pattern_of_the_first_prompt", max_model_len=256)

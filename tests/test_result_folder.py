from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from ruler_bench.result_folder import KEYS_WITHOUT_RESULTS, result_folder

CHOICES = {"task": "niah_single_1", "backend": "oracle", "model": "probe"}


def folder(overrides, swept=None, out=None, lengths=(4096,), backend=None):
    values = OmegaConf.create({"out": out, "backend": backend})
    return result_folder(values, CHOICES, overrides, lengths, swept)


def test_the_folder_names_task_backend_model_and_length():
    assert folder([]) == Path("results/niah_single_1_oracle_probe_4096")
    assert folder([], out="mine") == Path("mine")
    values = OmegaConf.create({"out": None, "backend": None, "suite": {"tasks": ["vt"]}})
    found = result_folder(values, CHOICES | {"suite": "niah"}, ["suite=niah"], (9,), None)
    assert found == Path("results/niah_oracle_probe_9")


def test_keys_that_change_no_result_are_not_in_the_folder_name():
    quiet = [f"{key}=1" for key in KEYS_WITHOUT_RESULTS]
    assert folder([*quiet, "backend.api_key=very-secret", "length=4096"]) == folder([])


@pytest.mark.parametrize("key", ["device_memory_gb", "host_memory_gb"])
def test_limits_of_our_engine_are_not_in_the_folder_name_and_those_of_others_are(key):
    ours = {"_target_": "backends.engine.offload"}
    assert folder([f"backend.{key}=1"], backend=ours) == folder([])
    assert folder([f"backend.{key}=1"], backend=ours, swept=[f"backend.{key}"]) != folder([])
    assert folder([f"backend.{key}=1"], backend={"_target_": "my.Engine"}) != folder([])


@pytest.mark.parametrize("key", ["checkpoint", "timeline", "synchronise", "prefix_cache"])
def test_what_changes_records_or_times_has_a_folder_of_its_own(key):
    ours = {"_target_": "backends.engine.offload"}
    assert folder([f"backend.{key}=1"], backend=ours) != folder([])


def test_common_settings_make_readable_names():
    name = folder(["backend.num_gpu_blocks=2", "seed=7", "model.path=/home/me/llama"]).name
    assert name.startswith(
        "niah_single_1_oracle_probe_4096_backend.num_gpu_blocks-2_model.path-llama~"
    )
    assert name.endswith("_seed-7")


def test_a_sweep_names_every_key_that_it_varies():
    jobs = [["threads=1", "num_samples=5"], ["threads=2", "num_samples=5"]]
    first, second = (folder(one, swept=["threads"]) for one in jobs)
    assert first.name.endswith("_threads-1")
    assert second.name.endswith("_threads-2")


values = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=300)


@given(st.lists(values, min_size=2, max_size=2, unique=True))
def test_two_values_of_a_key_never_share_a_folder(pair):
    first, second = (folder([f"backend.x={value}"]) for value in pair)
    assert first != second
    for name in (first.name, second.name):
        assert len(name) <= 255
        assert "/" not in name


names = st.sampled_from(["backend.a", "backend.a_b", "b", "backend.x-y", "seed"])


@given(st.lists(st.dictionaries(names, values, max_size=3), min_size=2, max_size=2))
def test_different_settings_never_share_a_folder(pair):
    first, second = ([f"{key}={value}" for key, value in one.items()] for one in pair)
    assert (folder(first) == folder(second)) == (pair[0] == pair[1])

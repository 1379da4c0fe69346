"""Joining arms: what belongs together, and what may be compared bit by bit."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ruler_bench.errors import UsageError
from ruler_bench.leak.join import ArmFacts, arm_facts, bits_differ_by, check_same_data, join

VERSIONS = {"python": "3.11.2", "torch": "2.13.0", "numpy": "2.4.6"}


def _facts(made, settings=None, backend="offload", **changes):
    arm = made.arm("fresh", made.OWN if settings is None else settings, backend)
    values = {"device": "CPU", "model": "abc", "versions": VERSIONS} | changes
    return ArmFacts(arm, **values)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"chunk_tokens": 512}, "chunk_tokens: 1024 and 512"),
        ({"attend_tokens": 256}, "attend_tokens"),
        ({"attention": "cudnn"}, "attention"),
        ({"ops": "triton"}, "ops"),
        ({"decode": "captured graphs"}, "decode"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"threads": 2}, "threads"),
        ({"device": "cuda:0"}, "device"),
        ({"policy": {"name": "xattention"}}, "policy"),
        ({"num_gpu_blocks": 2, "offload": "never", "fault": "late", "max_model_len": 1}, None),
    ],
)
def test_settings_that_decide_bits(made, change, named):
    found = bits_differ_by(_facts(made), _facts(made, {**made.OWN, **change}, "gpu_only"))
    assert found is None if named is None else named in found


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"device": "H200"}, "device: CPU and H200"),
        ({"model": "def"}, "model"),
        ({"versions": {**VERSIONS, "torch": "2.14.0"}}, "torch: 2.13.0 and 2.14.0"),
        ({"versions": {**VERSIONS, "numpy": "9"}}, None),
    ],
)
def test_what_else_decides_bits(made, change, named):
    found = bits_differ_by(_facts(made), _facts(made, **change))
    assert found is None if named is None else named in found


def test_other_engines_promise_only_for_equal_settings(made):
    hf = {"dtype": "float32", "threads": 1, "cache_implementation": None}
    assert bits_differ_by(_facts(made, hf, "hf"), _facts(made, hf, "hf")) is None
    assert "threads" in bits_differ_by(
        _facts(made, hf, "hf"), _facts(made, {**hf, "threads": 2}, "hf")
    )
    assert "backend" in bits_differ_by(_facts(made), _facts(made, hf, "hf"))
    assert bits_differ_by(_facts(made, {}), _facts(made, {})) == "settings unknown"


def test_missing_ordinals_leave_the_intersection_and_it_is_said(made):
    records = [
        *made.stream("persistent", 6),
        *(one for one in made.stream("fresh", 6) if one.ordinal not in (2, 5)),
    ]
    joined = join(records, {})
    assert joined.compared == (0, 1, 3, 4)
    assert joined.known == (0, 1, 2, 3, 4, 5)
    assert any("fresh has no answer to ordinals 2, 5" in note for note in joined.notes)


@given(st.lists(st.sets(st.integers(0, 12), min_size=1), min_size=1, max_size=4))
def test_what_is_compared_is_what_every_core_arm_has(made, chosen):
    names = ("persistent", "fresh", "fresh_again", "reference")[: len(chosen)]
    records = [
        made.answer(name, one) for name, ones in zip(names, chosen, strict=True) for one in ones
    ]
    common = set.intersection(*chosen)
    if not common:
        with pytest.raises(UsageError, match="no ordinal in common"):
            join(records, {})
        return
    joined = join(reversed(records), {})
    assert joined.compared == tuple(sorted(common))
    for name, ones in zip(names, chosen, strict=True):
        assert set(joined.answers[name]) == ones
        served = [one.ordinal for one in joined.streams[name]]
        assert served == sorted(ones)


def test_failed_requests_are_not_compared_and_it_is_said(made):
    failed = made.answer("fresh", 1, error="EngineDied", output=None, score=None, correct=None)
    joined = join([*made.stream("persistent", 3), made.answer("fresh", 0), failed], {})
    assert joined.compared == (0,)
    assert any("fresh: 1 of 2 requests failed" in note for note in joined.notes)
    assert failed in joined.streams["fresh"]


def test_nothing_finished_is_refused(made):
    failed = made.answer("fresh", 1, error="EngineDied", output=None, score=None, correct=None)
    for records in ([], [failed]):
        with pytest.raises(UsageError, match="no finished answer"):
            join(records, {})


def test_other_questions_under_the_same_ordinal_are_refused(made):
    for key, value in (("expected", ("7654321",)), ("prompt_sha256", "f" * 64), ("task", "cwe")):
        with pytest.raises(UsageError, match=f"ordinal 0: persistent and fresh.*{key}"):
            join([made.answer("persistent", 0), made.answer("fresh", 0, **{key: value})], {})


def test_hashes_of_different_formats_are_not_held_against_each_other(made):
    other = made.answer("fresh", 0, prompt_sha256="lm-eval:ffff")
    assert join([made.answer("persistent", 0), other], {}).compared == (0,)


def test_the_last_answer_of_an_arm_counts_and_unscored_ones_do_not(made):
    first = made.answer("axa", 0, " 1", step=0, position=0)
    last = made.answer("axa", 0, step=2, position=2)
    cancelled = replace(first, step=3, position=3, score=None, correct=None)
    joined = join([*made.stream("persistent", 1), first, last, cancelled], {})
    assert joined.answers["axa"][0] == last
    assert len(joined.streams["axa"]) == 3


def test_prompts_beside_the_samples_are_paired_with_the_reference(made):
    cut = {"prompt_sha256": "c" * 64, "prompt_tokens": 1023}
    records = [
        *made.stream("persistent", 2),
        *made.stream("reference", 2),
        made.answer("boundary", 0, **cut),
        made.answer("boundary", 1, prompt_sha256="d" * 64),
        made.answer("reference", 0, step=10_000_000, **cut),
    ]
    joined = join(records, {})
    assert joined.compared == (0, 1)
    assert [(a.arm, b.arm, a.prompt_tokens) for a, b in joined.beside] == [
        ("boundary", "reference", 1023)
    ]
    assert "boundary" not in joined.answers


def test_facts_come_from_the_manifest(made):
    manifest = {
        "arms": {"fresh": made.arm("fresh").to_manifest()},
        "device": "CPU",
        "model_fingerprint": "abc",
        "versions": {"torch": "1"},
        "lives": [{"arm": "fresh", "versions": {"torch": "2"}}],
    }
    found = arm_facts(manifest, made.stream("fresh", 2))
    assert found["fresh"].arm == made.arm("fresh")
    assert (found["fresh"].versions, found["fresh"].device) == ({"torch": "2"}, "CPU")


def test_without_arms_in_the_manifest_lifetimes_are_read_off_the_records(made):
    records = [*made.stream("persistent", 3), *made.stream("fresh", 3)]
    found = arm_facts({"backend": "offload", "backend_in_force": made.OWN}, records)
    assert not found["persistent"].arm.is_fresh
    assert found["fresh"].arm.is_fresh
    assert found["fresh"].arm.settings == made.OWN


def test_a_damaged_manifest_is_named():
    with pytest.raises(UsageError, match=r"R: is damaged \(arms.fresh"):
        arm_facts({"arms": {"fresh": {"lifetime": "for ever"}}}, [], "R")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data": {"seed": 43, "fingerprint": "y"}}, "data.seed: 42 there, 43 here"),
        ({"data": {"seed": 42, "fingerprint": "y"}}, "data.fingerprint"),
        ({"model_fingerprint": "other"}, "model_fingerprint"),
        ({"task": "niah_multikey_1"}, "task"),
    ],
)
def test_other_data_are_refused_naming_the_field(change, named):
    one = {
        "task": "niah_single_1",
        "data": {"seed": 42, "fingerprint": "x"},
        "model_fingerprint": "abc",
    }
    check_same_data([("A", one), ("B", dict(one))])
    with pytest.raises(UsageError, match=named):
        check_same_data([("A", one), ("B", one | change)])

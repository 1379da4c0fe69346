"""The seven hypotheses: a fault supports the one that it is about, a sound engine none."""

import json

import pytest

from ruler_bench import streams
from ruler_bench.leak.arms import kind_of, variant_of
from ruler_bench.leak.diagnosis.evidence import Evidence
from ruler_bench.leak.diagnosis.hypotheses import (
    AGE,
    CHUNKS,
    HYPOTHESES,
    MERGE,
    POSITIONS,
    RACE,
    SWITCHING,
    arms_of_diagnosis,
    diagnose,
)
from ruler_bench.leak.diagnosis.rules import CANNOT_SAY, NOT_SUPPORTED, SUPPORTED
from ruler_bench.leak.join import ArmFacts

OFFLOAD = {
    "_target_": "backends.engine.offload",
    "num_gpu_blocks": 4,
    "kvcache_block_size": 128,
    "chunk_tokens": 256,
    "attend_tokens": "block",
    "offload": "always",
    "synchronise": False,
    "checkpoint": None,
}
SMALL = (
    "experiment=diagnose",
    "device=cpu",
    "threads=1",
    "length=256",
    "task.tokens_to_generate=16",
    "backend.chunk_tokens=64",
    "out=here",
)
"""Answers that a fault spoils seldom end by themselves: their length is what a run takes."""
BLOCKS_OF_32, BLOCKS_OF_128 = "backend.kvcache_block_size=32", "backend.kvcache_block_size=128"
"""Rows of the last answer that are kept find room in the tail of long blocks alone."""


def verdicts(rows):
    return {one.hypothesis: one.verdict for one in rows}


def test_every_arm_of_a_diagnosis_is_known_and_follows_from_the_settings():
    arms = arms_of_diagnosis(OFFLOAD, 1024)
    assert len(set(arms)) == len(arms)
    for arm in arms:
        assert not kind_of(arm).is_fresh
    assert {"slots_2", "slots_8", "slots_2_synchronised", "chunks_128", "chunks_512"} <= {*arms}
    assert {"attend_128", "attend_64", "attend_whole", "offload_never", "layerwise"} <= {*arms}
    assert variant_of("chunks_128_recorded").records
    assert variant_of("slots_2_synchronised").settings == (
        (("num_gpu_blocks", "num_kv_buffers"), 2),
        (("synchronise",), True),
    )


@pytest.mark.parametrize("name", ["_recorded", "axa_recorded", "attend_0", "persistent", "layer"])
def test_other_names_are_no_variants(name):
    assert variant_of(name) is None


def test_a_backend_without_these_settings_keeps_two_comparisons():
    arms = arms_of_diagnosis({"_target_": "backends.hf.TransformersBackend"}, 4096)
    assert arms == ("persistent", "persistent_again", "aged")


def evidence(made, *streams, **settings):
    records = [one for stream in streams for one in stream]
    names = {one.arm for one in records}
    facts = {
        name: ArmFacts(arm, device="cpu", model="m")
        for name, arm in made.arms(*names, **settings).items()
    }
    return Evidence.of(records, facts)


def test_a_backend_that_cannot_be_swept_says_so(made):
    rows = diagnose(evidence(made, made.stream("persistent", 3), made.stream("aged", 3)))
    found = verdicts(rows)
    assert found.pop(AGE) == NOT_SUPPORTED
    assert set(found.values()) == {CANNOT_SAY}
    assert all("Needs" in one.why for one in rows if one.verdict == CANNOT_SAY)


@pytest.mark.parametrize(
    ("margin", "verdict"), [(0.01, SUPPORTED), (3.0, NOT_SUPPORTED), (None, NOT_SUPPORTED)]
)
def test_chunk_precision_is_about_near_ties_alone(made, margin, verdict):
    other = [made.answer("chunks_512", 0, " no", margin=margin)]
    one = [made.answer("persistent", 0, margin=margin)]
    rows = diagnose(evidence(made, one, other, chunks_512=made.OTHER_PATH))
    assert verdicts(rows)[CHUNKS] == verdict


def race(made, forced_bits):
    return [
        made.stream("persistent", 3),
        made.stream("persistent_again", 3),
        made.stream("slots_2", 3, bits="raced"),
        made.stream("synchronised", 3),
        made.stream("slots_2_synchronised", 3, bits=forced_bits),
        made.stream("aged", 3, bits="aged"),
        made.stream("offload_never", 3, bits="never"),
    ]


def test_a_race_explains_what_else_differs(made):
    found = verdicts(diagnose(evidence(made, *race(made, "same"))))
    assert found[RACE] == SUPPORTED
    assert found[AGE] == found[SWITCHING] == CANNOT_SAY


def test_what_differs_under_forced_synchronisation_is_no_race(made):
    found = verdicts(diagnose(evidence(made, *race(made, "other"))))
    assert found[RACE] == NOT_SUPPORTED
    assert found[AGE] == SUPPORTED
    assert found[SWITCHING] == CANNOT_SAY  # a leak alone may do that


def diagnosed(cli, workdir, *more, blocks=BLOCKS_OF_32):
    finished = cli(*SMALL, blocks, *more)
    assert finished.status in (0, 3, 5), finished.err
    assert "Diagnosis. " in finished.out
    assert "## Diagnosis" in (workdir / "here" / "report.md").read_text()
    rows = json.loads((workdir / "here" / "verdict.json").read_text())["diagnose"]
    assert [one["hypothesis"] for one in rows] == [one.name for one in HYPOTHESES]
    return {one["hypothesis"]: one["verdict"] for one in rows}


ALL_BUT_AGED = (
    "arms=[persistent,persistent_again,chunks_32,synchronised,slots_2,slots_2_synchronised,"
    "recorded,chunks_32_recorded,layerwise,gpu_only_whole,attend_whole,attend_32,offload_never,"
    "offload_auto]"
)


def test_a_sound_engine_supports_nothing_and_the_same_command_asks_nothing_again(cli, workdir):
    found = diagnosed(cli, workdir, "num_samples=1", ALL_BUT_AGED)
    assert found.pop(AGE) == CANNOT_SAY
    assert set(found.values()) == {NOT_SUPPORTED}
    before = (workdir / "here" / "records.jsonl").read_text()
    assert diagnosed(cli, workdir, "num_samples=1", ALL_BUT_AGED)[RACE] == NOT_SUPPORTED
    assert (workdir / "here" / "records.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("fault", "arms", "hypothesis", "setting"),
    [
        (
            "positions_restart_each_chunk",
            "recorded,chunks_32_recorded,persistent",
            POSITIONS,
            "num_samples=1",
        ),
        (
            "accumulator_not_rescaled",
            "persistent,attend_32,attend_whole,chunks_32",
            MERGE,
            "num_samples=1",
        ),
        (
            "slot_read_before_load",
            "persistent,persistent_again,slots_2,synchronised,slots_2_synchronised",
            RACE,
            "num_samples=5",
        ),
        (
            "decode_buffer_kept",
            "persistent,persistent_again,aged",
            AGE,
            "num_samples=1",
        ),
    ],
)
def test_a_fault_supports_the_hypothesis_about_it(  # noqa: PLR0917
    cli, workdir, monkeypatch, fault, arms, hypothesis, setting
):
    monkeypatch.setattr(streams, "AGING_REQUESTS", 4)  # this fault ages an engine by one
    blocks = BLOCKS_OF_128 if hypothesis == AGE else BLOCKS_OF_32
    settings = (f"backend.fault={fault}", f"arms=[{arms}]", setting, "fresh=inprocess")
    found = diagnosed(cli, workdir, *settings, blocks=blocks)
    assert found.pop(hypothesis) == SUPPORTED
    assert SUPPORTED not in found.values()


def test_an_arm_that_the_backend_refuses_is_left_out_and_said(cli, workdir):
    finished = cli(
        *("experiment=diagnose", "backend=oracle", "device=cpu", "length=1024", "out=here"),
        *("num_samples=2", "arms=[persistent,persistent_again,slots_2,attend_64]"),
    )
    assert finished.status == 0, finished.err
    assert "arm slots_2: left out" in finished.err
    rows = json.loads((workdir / "here" / "verdict.json").read_text())["diagnose"]
    assert "has no setting num_gpu_blocks" in next(
        one["why"] for one in rows if one["hypothesis"] == RACE
    )

"""The proof of the detector in small: faults, sound engines and noisy ones at tiny sizes."""

import json

import pytest
import torch

from backends.engine.faults import FAULTS
from scripts import measure_detector
from scripts.detector import table

SAMPLES = 3
FOUND = {"cpu_kv_read_past_length": "leak", "positions_restart_each_chunk": "engine_fault"}
SMALL = [
    "--length",
    "256",
    "--reference",
    "gpu_only",  # transformers takes long to import
    "--set",
    "task.tokens_to_generate=12",  # an engine with a fault goes on until it is stopped
    "backend.kvcache_block_size=64",
    "backend.chunk_tokens=64",
]


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rows_of(folder, part):
    lines = (folder / part / "rows.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def proven(tmp_path_factory):
    """Two faults of different classes."""
    folder = tmp_path_factory.mktemp("proof")
    command = ["--out", str(folder), "--samples", str(SAMPLES), *SMALL, "--only", *FOUND]
    return measure_detector.main(command), folder, command


def test_two_faults_are_found_in_their_class(proven):
    status, folder, _ = proven
    assert status == measure_detector.AS_IT_MUST
    rows = {row["name"]: row["figures"] for row in rows_of(folder, "faults")}
    assert {name: one["verdict"] for name, one in rows.items()} == FOUND
    for name, one in rows.items():
        assert one["expected"] == FAULTS[name].expected
        assert len(one["verdicts"]) == SAMPLES
        assert one["verdicts"][one["class_at"] - 1] == FOUND[name]
        assert FOUND[name] not in one["verdicts"][: one["class_at"] - 1]
        assert one["evidence"].startswith("index ")


def test_what_is_measured_is_not_measured_again(proven):
    _, folder, command = proven
    before = rows_of(folder, "faults")
    assert measure_detector.main(command) == measure_detector.AS_IT_MUST
    assert rows_of(folder, "faults") == before


def test_records_are_judged_anew_without_an_engine(proven):
    _, folder, command = proven
    before = rows_of(folder, "faults")
    measure_detector.main([*command, "--judge"])
    after = rows_of(folder, "faults")
    assert len(after) == 2 * len(before)
    assert [one["figures"] for one in after[len(before) :]] == [one["figures"] for one in before]


def test_the_page_has_a_row_for_each_fault(proven):
    _, folder, _ = proven
    page = (folder / "detector.md").read_text()
    assert "2 of 2 faults are found in their class" in page
    for name, verdict in FOUND.items():
        assert f"| {name} | {verdict} | {verdict} | right |" in page.replace("\\_", "_")
    lines = [json.loads(line) for line in (folder / "detector.jsonl").read_text().splitlines()]
    assert [one["name"] for one in lines] == list(FOUND)


def test_noisy_engines_in_memory_and_through_the_runner(tmp_path):
    command = ["noisy", "--runs", "6", "--runner-runs", "1", "--noisy-samples", "4"]
    assert measure_detector.main([*command, "--out", str(tmp_path)]) == measure_detector.AS_IT_MUST
    rows = rows_of(tmp_path, "noisy")
    assert [row["error"] for row in rows] == [None] * 7
    assert len({row["figures"]["noise"] for row in rows}) == 6
    through = rows[-1]["figures"]
    assert through["requests"] == 6 * 4
    assert through["seconds"] > 0


def test_a_sound_engine(tmp_path):
    command = ["clean", "--clean-samples", "2", "--tasks", "niah_single_1", *SMALL]
    command += ["--engines", "offload_2_slots", "--out", str(tmp_path)]
    assert measure_detector.main(command) == measure_detector.AS_IT_MUST
    (row,) = rows_of(tmp_path, "clean")
    assert row["figures"]["comparisons"] == 2
    assert not row["figures"]["false_alarm"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["sound"], "part"),
        (["--only", "stale_block_tabel"], "stale_block_table"),
        (["--engines", "vllm"], "engines"),
        (["--samples", "21"], "20"),
        (["--length", "0"], "length"),
    ],
)
def test_wrong_settings_take_one_line(words, told, tmp_path, capsys):
    assert measure_detector.main([*words, "--out", str(tmp_path)]) == measure_detector.WRONG
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert told in error


def _row(kind, **figures):
    return {"key": "x", "kind": kind, "name": "x", "error": None, "figures": figures}


def test_what_is_not_as_it_must_be():
    assert not table.is_wrong(_row("faults", right_class=True, class_at=3))
    assert table.is_wrong(_row("faults", right_class=False, class_at=3))
    assert table.is_wrong(_row("faults", right_class=True, class_at=None))
    assert table.is_wrong(_row("clean", false_alarm=True))
    assert not table.is_wrong(_row("clean", false_alarm=False))
    assert table.is_wrong(_row("noisy", false_alarm=True, noise="near_tie_flips"))
    assert table.is_wrong({**_row("clean"), "figures": None, "error": "EngineDied"})

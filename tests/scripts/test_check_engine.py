"""The proof of the engine, small, on the probe: it holds, and every planted fault breaks it."""

import dataclasses
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from backends.base import Generation, Request, RequestError
from ruler_bench.host import start_backend
from ruler_bench.records import read_records
from scripts import check_engine
from scripts.check import soak
from scripts.check.engines import TARGETS
from scripts.check.processes import here

LENGTHS = ["1", "31", "33", "70"]
ENGINES = ["--chunk-tokens", "64", "--block-tokens", "32", "--device", "cpu"]
SIZES = {
    "bits": ["bits", "--lengths", *LENGTHS, "--new-tokens", "2"],
    "accuracy": ["accuracy", "--tasks", "niah_single_1", "niah_multikey_2", "--samples", "2",
                 "--length", "400"],
    "acceptance": ["--acceptance", "--acceptance-samples", "3", "--length", "400"],
    "soak": ["soak", "--requests", "20", "--longest", "40", "--fresh", "3"],
}  # fmt: skip

CHUNKED_ONLY = ["--presets", "offload"]

Fault = Callable[[str, int, int, Request, Generation], Generation]
"""Target, number of the engine, number of the request within it; returns what is answered."""


def prove(out: Path, *arguments: str, launch=here) -> int:
    return check_engine.main(["--out", str(out), *ENGINES, *arguments], launch)


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "MOST_NEW_TOKENS", 3)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fault], None]:
    """Let a fault come between every engine and who asks it."""

    def install(fault: Fault) -> None:
        lives = 0

        def build(settings, harness):
            nonlocal lives
            engine = start_backend(settings, harness)
            generate, life, served = engine.generate, lives, 0
            lives += 1

            def faulty(request: Request) -> Generation:
                nonlocal served
                served += 1
                return fault(settings["_target_"], life, served - 1, request, generate(request))

            monkeypatch.setattr(engine, "generate", faulty, raising=False)
            return engine

        monkeypatch.setattr("scripts.check.serving.start_backend", build)

    return install


def other_digest(answer: Generation) -> Generation:
    return dataclasses.replace(
        answer, logits_digest=(*answer.logits_digest[:-1], "0" * len(answer.logits_digest[-1]))
    )


def other_tokens(answer: Generation) -> Generation:
    return dataclasses.replace(answer, token_ids=tuple(99 for _ in answer.token_ids))


def report_of(out: Path) -> str:
    return (out / "report.md").read_text()


# --- it holds -----------------------------------------------------------------------------------


def test_all_is_proven_and_nothing_is_served_twice(tmp_path, capsys):
    arguments = [one for size in SIZES.values() for one in size]
    assert prove(tmp_path, *arguments) == 0
    printed = capsys.readouterr().out
    rows = (tmp_path / "rows.jsonl").read_bytes()
    memory = (tmp_path / "memory.jsonl").read_bytes()
    records = read_records(tmp_path / "rows.jsonl")
    bits = [record for record in records if record.arm.startswith("bits/")]
    # Two engines with offload and their counterparts, three processes.
    assert len(bits) == 4 * 3 * len(LENGTHS)
    assert {record.prompt_tokens for record in bits} == set(map(int, LENGTHS))
    accuracy = [record for record in records if record.arm.startswith("accuracy/")]
    assert len(accuracy) == 5 * 2 * 2
    assert all(record.correct for record in accuracy)
    assert "accuracy: proven: 20 of 20 answers right" in printed
    assert "acceptance: proven: 3 of 3 right" in printed
    assert "memory flat" in printed
    # The same command serves nothing again, and the report comes from the files alone.
    report = report_of(tmp_path)
    assert prove(tmp_path, *arguments) == 0
    (tmp_path / "report.md").unlink()
    assert check_engine.main(["--out", str(tmp_path), "--render"]) == 0
    assert report_of(tmp_path).partition("## Commands")[0] == report.partition("## Commands")[0]
    assert (tmp_path / "rows.jsonl").read_bytes() == rows
    assert (tmp_path / "memory.jsonl").read_bytes() == memory


@pytest.mark.slow
def test_processes_of_their_own_have_the_same_bits(tmp_path):
    lengths = ["--lengths", "5", "70", "--new-tokens", "2", "--presets", "offload"]
    assert (
        prove(tmp_path, "bits", *lengths, "--processes", "3", launch=check_engine.in_processes) == 0
    )
    assert len(read_records(tmp_path / "rows.jsonl")) == 2 * 3 * 2


# --- faults -------------------------------------------------------------------------------------


def third_request(answer_otherwise) -> Fault:
    def fault(target, life, served, request, answer):
        wrong = target == TARGETS["offload"] and served == 2
        return answer_otherwise(answer) if wrong else answer

    return fault


@pytest.mark.parametrize(
    ("check", "otherwise"),
    [
        ("bits", other_digest),
        ("accuracy", other_tokens),
        ("soak", other_tokens),
    ],
)
def test_an_engine_that_answers_otherwise_on_its_third_request(
    check, otherwise, tmp_path, plant, capsys
):
    plant(third_request(otherwise))
    assert prove(tmp_path, *SIZES[check], *CHUNKED_ONLY) == 1
    assert f"{check}: NOT PROVEN" in capsys.readouterr().out
    assert "**NO**" in report_of(tmp_path)


def test_an_engine_that_is_wrong_whatever_came_before(tmp_path, plant):
    """Every process has the same bits then; only the counterpart tells."""

    def fault(target, life, served, request, answer):
        wrong = target == TARGETS["offload_layerwise"] and len(request.prompt_token_ids) == 33
        return other_digest(answer) if wrong else answer

    plant(fault)
    assert prove(tmp_path, *SIZES["bits"], "--presets", "offload_layerwise") == 1
    lines = [line for line in report_of(tmp_path).splitlines() if "**NO**" in line]
    assert len(lines) == 3
    assert all("offload_layerwise" in line and "gpu_only-chunk-all" in line for line in lines)


def test_a_fault_in_the_last_process_only(tmp_path, plant):
    def fault(target, life, served, request, answer):
        return other_digest(answer) if life >= 4 and "gpu_only" in target else answer

    plant(fault)
    assert prove(tmp_path, *SIZES["bits"], *CHUNKED_ONLY) == 1


def test_a_request_that_fails_proves_nothing(tmp_path, plant, capsys):
    def fault(target, life, served, request, answer):
        if target == TARGETS["offload"] and served == 2:
            raise RequestError("no more")
        return answer

    plant(fault)
    assert prove(tmp_path, *SIZES["bits"], *CHUNKED_ONLY) == 1
    assert "RequestError: no more" in report_of(tmp_path)


def test_answers_without_digests_prove_nothing(tmp_path, plant):
    plant(lambda target, life, served, request, answer: dataclasses.replace(
        answer, logits_digest=None))  # fmt: skip
    assert prove(tmp_path, "bits", "--lengths", "3", *CHUNKED_ONLY) == 1
    assert "without a digest each" in report_of(tmp_path)


def test_a_miss_of_a_persistent_engine_alone_is_a_fault(tmp_path, plant):
    plant(third_request(other_tokens))
    assert prove(tmp_path, *SIZES["acceptance"]) == 1
    report = report_of(tmp_path)
    missed = next(line for line in report.splitlines() if line.startswith("| 2 "))
    record = next(
        one for one in read_records(tmp_path / "rows.jsonl") if one.arm == "acceptance/again/2"
    )
    assert record.correct
    assert record.output.strip().rstrip(".") in missed
    assert "2 of 3 right" in report


def test_a_miss_that_a_fresh_engine_repeats_is_the_models_own(tmp_path, plant):
    asked = []

    def fault(target, life, served, request, answer):
        asked.append(request.prompt_token_ids)
        wrong = request.prompt_token_ids in asked[1:2]
        return other_tokens(answer) if wrong else answer

    plant(fault)
    assert prove(tmp_path, *SIZES["acceptance"]) == 0
    assert "2 of 3 right; of 1 misses, a fresh engine gives the same bits for 1" in report_of(
        tmp_path
    )


def test_a_fresh_engine_that_answers_otherwise(tmp_path, plant):
    plant(lambda target, life, served, request, answer: other_digest(answer) if life == 3
          else answer)  # fmt: skip
    assert prove(tmp_path, *SIZES["soak"]) == 1
    wrong = [line for line in report_of(tmp_path).splitlines() if "**NO**" in line]
    assert len(wrong) == 1
    assert "soak/fresh" in wrong[0]


def test_an_engine_that_keeps_memory(tmp_path, plant, capsys):
    kept = []

    def fault(target, life, served, request, answer):
        if target == TARGETS["offload"]:
            kept.append(bytearray(os.urandom(4 << 20)))
        return answer

    plant(fault)
    assert prove(tmp_path, *SIZES["soak"]) == 1
    assert "memory NOT shown to be flat" in capsys.readouterr().out
    assert "memory is not flat: host, resident" in report_of(tmp_path)


def test_engines_with_other_settings_in_force_are_not_compared(tmp_path, monkeypatch):
    def build(settings, harness):
        engine = start_backend(settings, harness)
        if settings["_target_"] == TARGETS["gpu_only"]:
            found = engine.describe() | {"attention": "another"}
            monkeypatch.setattr(engine, "describe", lambda: found, raising=False)
        return engine

    monkeypatch.setattr("scripts.check.serving.start_backend", build)
    assert prove(tmp_path, "bits", "--lengths", "3", *CHUNKED_ONLY) == 1
    assert "differ in settings that decide bits: attention" in report_of(tmp_path)


# --- processes, resuming, options ---------------------------------------------------------------

ENGINE_THAT_ENDS = """
import os
from backends.base import Generation

class Engine:
    def __init__(self, *, attention, chunk_tokens, attend_tokens, num_gpu_blocks=0,
                 kvcache_block_size=0):
        self.dies = {dies}
        print("what an engine prints")

    def generate(self, request):
        if self.dies and len(request.prompt_token_ids) == 2:
            os._exit(7)
        return Generation(token_ids=(5,), logits_digest=("ab",), top2_margin=(1.0,))

    def describe(self):
        return {{}}

    def close(self):
        pass
"""


@pytest.fixture
def scripted(tmp_path_factory, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Put an engine of a few lines in the place of both."""
    folder = tmp_path_factory.mktemp("module")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    for preset in ("gpu_only", "offload"):
        monkeypatch.setitem(TARGETS, preset, "scripted_engine.Engine")

    def write(dies: bool) -> None:
        (folder / "scripted_engine.py").write_text(ENGINE_THAT_ENDS.format(dies=dies))

    return write


def test_a_process_that_dies_is_named_and_its_work_done_by_the_next_command(tmp_path, scripted):
    arguments = ["bits", "--lengths", "1", "2", "3", "--presets", "offload"]
    scripted(dies=True)
    assert prove(tmp_path, *arguments, launch=check_engine.in_processes) == 1
    assert "its process ended early, with status 7" in report_of(tmp_path)
    before = len(read_records(tmp_path / "rows.jsonl"))
    scripted(dies=False)
    assert prove(tmp_path, *arguments, launch=check_engine.in_processes) == 0
    records = read_records(tmp_path / "rows.jsonl")
    assert before < len(records) == 2 * 3 * 3
    assert "ended early" not in report_of(tmp_path)


def test_an_interrupt_leaves_a_report(tmp_path, plant):
    def fault(target, life, served, request, answer):
        if (life, served) == (1, 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return answer

    plant(fault)
    assert prove(tmp_path, *SIZES["bits"], *CHUNKED_ONLY) == 130
    assert "bits: NOT PROVEN" in report_of(tmp_path)
    kept = len(read_records(tmp_path / "rows.jsonl"))
    assert 0 < kept < 6 * len(LENGTHS)


def test_accuracy_goes_on_with_what_is_missing_and_says_so(tmp_path, plant):
    failing = True

    def fault(target, life, served, request, answer):
        if failing and target == TARGETS["offload"] and served == 3:
            raise RequestError("not now")
        return answer

    plant(fault)
    assert prove(tmp_path, *SIZES["accuracy"], *CHUNKED_ONLY) == 1
    failing = False
    assert prove(tmp_path, *SIZES["accuracy"], *CHUNKED_ONLY) == 0
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert len(lines) == 3 * 4 + 2
    row = next(one for one in report_of(tmp_path).splitlines() if one.startswith("| offload-2-"))
    assert [cell.strip() for cell in row.split("|")][-3] == "2"


def test_other_settings_need_another_folder(tmp_path, capsys):
    arguments = ["bits", "--presets", "offload", "--lengths", "3", "--new-tokens"]
    assert prove(tmp_path, *arguments, "1") == 0
    assert prove(tmp_path, *arguments, "2") == 2
    assert "new_tokens: 1 there, 2 here" in capsys.readouterr().err


def test_a_setting_that_the_engine_refuses_is_status_2(tmp_path, capsys):
    arguments = ["bits", "--presets", "offload", "--lengths", "3", "--slots", "1"]
    assert prove(tmp_path, *arguments) == 2
    assert "num_gpu_blocks=1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bit"], "unknown check 'bit'. Did you mean 'bits'?"),
        (["--presets", "ofload"], "unknown preset 'ofload'. Did you mean 'offload'?"),
        (["--tasks", "niah_single"], "unknown task"),
        (["bits", "--lengths", "0"], "--lengths 0: must be at least 1."),
        (["soak", "--fresh", "some"], "--fresh some: must be all or an integer"),
        (["soak", "--shortest", "9", "--longest", "8"], "--shortest 9: is above --longest 8."),
        (["soak", "--presets", "offload_layerwise"], "soak and --acceptance are about offload"),
        (["bits", "--lengths", "70000"], "the model has 65536 positions"),
        (["--render"], "holds no check that could be rendered"),
    ],
)
def test_wrong_options_are_refused_in_one_line(arguments, message, tmp_path, capsys):
    assert prove(tmp_path / "out", *arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_samples_are_prepared_beforehand(tmp_path, monkeypatch):
    monkeypatch.setenv("RULER_BENCH_CACHE", str(tmp_path / "cache"))
    arguments = ["accuracy", *SIZES["accuracy"][1:], "--prepare-only", "--processes", "2"]
    assert prove(tmp_path / "out", *arguments) == 0
    entries = sorted((tmp_path / "cache").glob("*/*/entry.json"))
    assert [path.parent.name.partition("-")[0] for path in entries] == ["2", "2"]
    assert not (tmp_path / "out").exists()
    assert json.loads(entries[0].read_text())["fingerprint"]

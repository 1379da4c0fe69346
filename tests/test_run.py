"""The main path with the oracle: records, resume, errors, interrupts. Everything but a model."""

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from ruler_bench.model_files import model_folder
from ruler_bench.tokenizer import load_tokenizer

ORACLE = ("task=niah_single_1", "backend=oracle", "device=cpu", "length=1024")
FOLDER = "results/niah_single_1_oracle_probe_1024"
COMMAND = (sys.executable, "-m", "ruler_bench", *ORACLE)


def rows(folder):
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def test_every_sample_is_one_record(cli, workdir):
    finished = cli(*ORACLE, "num_samples=4")
    assert finished.status == 0, finished.err
    found = rows(workdir / FOLDER)
    assert [row["ordinal"] for row in found] == [0, 1, 2, 3]
    assert [row["position"] for row in found] == [0, 1, 2, 3]
    assert [row["predecessor"] for row in found] == [None, 0, 1, 2]
    assert all(row["correct"] and row["score"] == 100 and row["life"] == 1 for row in found)
    assert all(0 < row["prompt_tokens"] <= 1024 for row in found)
    for name in ("report.md", "summary.csv", "manifest.json", "predictions/niah_single_1.jsonl"):
        assert (workdir / FOLDER / name).exists()
    assert "4" in finished.out


def test_the_manifest_holds_what_was_asked_for_and_what_is_in_force(cli, workdir, monkeypatch):
    monkeypatch.setenv("USER", "somebody")
    cli(*ORACLE, "num_samples=1", "backend.wrong=[3]")
    (folder,) = (workdir / "results").glob("niah*wrong*")
    held = manifest(folder)
    assert held["config"]["backend"]["wrong"] == [3]
    assert held["backend_in_force"]["wrong"] == [3]
    assert held["data"]["fingerprint"]
    assert held["versions"]["wonderwords"] == "2.2.0"
    text = json.dumps(held)
    assert str(workdir) not in text
    assert "somebody" not in text
    assert os.uname().nodename not in json.dumps(held["config"])


def test_more_samples_and_other_indices_grow_the_folder(cli, workdir):
    folder = workdir / FOLDER
    assert cli(*ORACLE, "num_samples=2").status == 0
    first = (folder / "records.jsonl").read_bytes()
    assert cli(*ORACLE, "num_samples=4").status == 0
    assert cli(*ORACLE, "indices=[1,6-7]").status == 0
    assert (folder / "records.jsonl").read_bytes().startswith(first)
    assert [row["ordinal"] for row in rows(folder)] == [0, 1, 2, 3, 6, 7]
    assert [row["life"] for row in rows(folder)] == [1, 1, 2, 2, 3, 3]
    # The report is about what was asked for last.
    assert "| 3 " in (folder / "report.md").read_text()


def test_a_finished_folder_starts_no_engine(cli, workdir):
    assert cli(*ORACLE, "num_samples=2").status == 0
    before = (workdir / FOLDER / "records.jsonl").read_bytes()
    finished = cli(*ORACLE, "num_samples=2")
    assert finished.status == 0
    assert (workdir / FOLDER / "records.jsonl").read_bytes() == before
    assert len(manifest(workdir / FOLDER)["lives"]) == 1


def test_a_folder_made_with_other_settings_is_refused(cli, workdir):
    assert cli(*ORACLE, "num_samples=1", "out=here").status == 0
    refused = cli(*ORACLE, "num_samples=1", "out=here", "seed=7")
    assert refused.status == 2
    assert "config.seed: 42 there, 7 here" in refused.err
    refused = cli(*ORACLE, "num_samples=1", "out=here", "backend.wrong=[0]")
    assert "config.backend.wrong: [] there, [0] here" in refused.err
    anew = cli(*ORACLE, "num_samples=1", "out=here", "seed=7", "overwrite=true")
    assert anew.status == 0
    assert manifest(workdir / "here")["config"]["seed"] == 7


def test_an_error_is_recorded_and_runs_again(cli, workdir):
    finished = cli(*ORACLE, "num_samples=3", "backend.fail=[1]", "out=here")
    assert finished.status == 1
    (failed,) = [row for row in rows(workdir / "here") if row["error"]]
    assert failed["ordinal"] == 1
    assert failed["score"] is None
    assert failed["correct"] is None
    report = (workdir / "here" / "report.md").read_text()
    assert failed["error"] in report
    # Of a new engine, after what came before: it fails at its second request again.
    assert cli(*ORACLE, "num_samples=3", "backend.fail=[1]", "out=here").status == 1
    again = rows(workdir / "here")
    assert [(row["ordinal"], row["life"]) for row in again[3:]] == [(0, 2), (1, 2), (2, 2)]
    assert again[4]["error"] == failed["error"]
    # What failed at an engine's first request is asked alone.
    assert cli(*ORACLE, "num_samples=2", "backend.fail=[0]", "out=there").status == 1
    assert cli(*ORACLE, "num_samples=2", "backend.fail=[0]", "out=there").status == 1
    assert [row["ordinal"] for row in rows(workdir / "there")] == [0, 1, 0]


ENGINE = ("task=niah_single_1", "device=cpu", "length=512")


def test_a_checkpoint_goes_on_with_its_run_and_names_requests_by_their_sample(cli, workdir):
    mine = (*ENGINE, "backend=gpu_only", "backend.checkpoint=kept")
    assert cli(*mine, "num_samples=1").status == 0
    first = (workdir / "kept" / "request_000000.jsonl").read_bytes()
    finished = cli(*mine, "indices=[0,2]")
    assert finished.status == 0, finished.err
    kept = sorted(one.name for one in (workdir / "kept").glob("*.jsonl"))
    assert kept == ["request_000000.jsonl", "request_000002.jsonl"]
    assert (workdir / "kept" / "request_000000.jsonl").read_bytes() == first
    # The answers do not depend on it, but a run that is to be recorded runs.
    (folder,) = (workdir / "results").iterdir()
    assert "backend.checkpoint-kept" in folder.name


def test_a_checkpoint_of_other_prompts_ends_the_run_and_is_no_error_of_a_sample(cli, workdir):
    mine = (*ENGINE, "backend=gpu_only", "backend.checkpoint=kept", "num_samples=2")
    assert cli(*mine).status == 0
    refused = cli(*mine, "seed=7")
    assert refused.status == 2
    last = refused.err.splitlines()[-1]
    assert last.startswith("error: backend.checkpoint=kept: request_000000.jsonl holds another")
    (folder,) = (workdir / "results").glob("*seed-7")
    assert not (folder / "records.jsonl").exists()


@pytest.mark.parametrize("key", ["checkpoint", "timeline"])
def test_folders_beside_a_run_stand_in_the_manifest_as_relative_paths(cli, workdir, key):
    mine = (*ENGINE, "backend=gpu_only", f"backend.{key}={workdir}/beside/{key}", "out=here")
    assert cli(*mine, "num_samples=1").status == 0
    finished = cli(*mine, "num_samples=2")
    assert finished.status == 0, finished.err
    held = manifest(workdir / "here")
    assert held["config"]["backend"][key] == f"beside/{key}"
    assert held["backend_in_force"][key] == f"beside/{key}"
    assert str(workdir) not in json.dumps(held)
    assert len(list((workdir / "beside" / key).glob("request_*.json*"))) == 2


def test_a_folder_goes_on_under_other_memory_limits(cli, workdir):
    mine = (*ENGINE, "backend=offload_layerwise", "backend.host_memory_gb=4")
    assert cli(*mine, "num_samples=1").status == 0
    finished = cli(*mine, "num_samples=2", "backend.device_memory_gb=1")
    assert finished.status == 0, finished.err
    (folder,) = (workdir / "results").iterdir()
    assert [row["life"] for row in rows(folder)] == [1, 2]
    held = manifest(folder)
    assert held["config"]["backend"]["device_memory_gb"] == 1
    assert held["backend_in_force"]["device_memory_gb"] == 1
    refused = cli(*mine, "num_samples=2", f"out={folder}", "backend.num_kv_buffers=2")
    assert refused.status == 2
    assert "config.backend.num_kv_buffers: 4 there, 2 here" in refused.err
    assert "memory" not in refused.err


def test_a_wrong_answer_is_wrong_and_shown(cli, workdir):
    finished = cli(*ORACLE, "num_samples=3", "backend.wrong=[2]", "out=here")
    assert finished.status == 0
    assert [row["correct"] for row in rows(workdir / "here")] == [True, True, False]
    wrong = rows(workdir / "here")[2]
    report = (workdir / "here" / "report.md").read_text()
    assert wrong["expected"][0] in report


def test_a_missing_manifest_is_said(cli, workdir):
    assert cli(*ORACLE, "num_samples=1").status == 0
    (workdir / FOLDER / "manifest.json").unlink()
    finished = cli(*ORACLE, "num_samples=1")
    assert finished.status == 2
    assert "no manifest.json" in finished.err


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format_version": 99}'])
def test_a_damaged_manifest_is_said(cli, workdir, text):
    assert cli(*ORACLE, "num_samples=1").status == 0
    (workdir / FOLDER / "manifest.json").write_text(text)
    finished = cli(*ORACLE, "num_samples=1")
    assert finished.status == 2
    assert "manifest.json" in finished.err
    assert "overwrite=true" in finished.err


def test_a_damaged_line_in_the_middle_is_said(cli, workdir):
    assert cli(*ORACLE, "num_samples=3").status == 0
    path = workdir / FOLDER / "records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + "garbage\n" + lines[2])
    finished = cli(*ORACLE, "num_samples=3")
    assert finished.status == 2
    assert "line 2 is damaged" in finished.err


def test_a_half_written_last_line_is_repaired_and_said(cli, workdir):
    assert cli(*ORACLE, "num_samples=3").status == 0
    path = workdir / FOLDER / "records.jsonl"
    whole = path.read_bytes()
    kept = whole[: whole.rstrip(b"\n").rfind(b"\n") + 1]
    path.write_bytes(whole[:-20])
    finished = cli(*ORACLE, "num_samples=3")
    assert finished.status == 0
    assert "half-written" in finished.err
    assert path.read_bytes().startswith(kept)
    assert [row["ordinal"] for row in rows(workdir / FOLDER)] == [0, 1, 2]


def test_out_that_is_a_file_or_cannot_be_written_is_said(cli, workdir):
    (workdir / "file").write_text("")
    finished = cli(*ORACLE, "out=file")
    assert finished.status == 2
    assert "out=file: is a file" in finished.err
    finished = cli(*ORACLE, "out=/proc/nowhere")
    assert finished.status == 2
    assert "out=/proc/nowhere: cannot be written" in finished.err


def test_overwrite_loses_nothing_when_the_new_run_cannot_start(cli, workdir):
    assert cli(*ORACLE, "num_samples=2", "out=here").status == 0
    kept = (workdir / "here" / "records.jsonl").read_bytes()
    for bad in ("length=100", "+backend.wrng=1", "backend.script=/no/such"):
        assert cli(*ORACLE, "num_samples=2", "out=here", "overwrite=true", bad).status == 2
        assert (workdir / "here" / "records.jsonl").read_bytes() == kept


def test_overwrite_makes_a_damaged_folder_good(cli, workdir):
    assert cli(*ORACLE, "num_samples=2", "out=here").status == 0
    (workdir / "here" / "records.jsonl").write_text("garbage\nmore\n")
    (workdir / "here" / "manifest.json").write_text("{")
    assert cli(*ORACLE, "num_samples=2", "out=here", "overwrite=true").status == 0
    assert len(rows(workdir / "here")) == 2


@pytest.mark.parametrize("overwrite", ["true", "false"])
def test_a_folder_that_no_run_made_is_left_alone(cli, workdir, overwrite):
    (workdir / "mine").mkdir()
    (workdir / "mine" / "report.md").write_text("my own")
    finished = cli(*ORACLE, "out=mine", f"overwrite={overwrite}")
    assert finished.status == 2
    assert "holds files that no run wrote (report.md)" in finished.err
    assert (workdir / "mine" / "report.md").read_text() == "my own"


@pytest.mark.parametrize("name", ["records.jsonl", "manifest.json", "report.md", "summary.csv"])
def test_a_folder_in_place_of_a_file_is_said(cli, workdir, name):
    (workdir / "here" / name).mkdir(parents=True)
    finished = cli(*ORACLE, "out=here")
    assert finished.status == 2
    assert f"{name} is no ordinary file" in finished.err


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task", "niah_single_2"),
        ("length", 4096),
        ("prompt_sha256", "00"),
        ("step", 7),
        ("ordinal", 0),
        ("arm", "fresh"),
        ("expected", ["1"]),
        ("output", "no"),
        ("score", 50.0),
        ("correct", False),
    ],
)
def test_a_record_that_is_not_of_this_run_is_refused(cli, workdir, field, value):
    assert cli(*ORACLE, "num_samples=3", "out=here").status == 0
    path = workdir / "here" / "records.jsonl"
    changed = rows(workdir / "here")
    changed[1][field] = value
    path.write_text("".join(json.dumps(row) + "\n" for row in changed))
    finished = cli(*ORACLE, "num_samples=3", "out=here")
    assert finished.status == 2
    assert "does not belong to this run" in finished.err


@pytest.mark.parametrize("key", ["task", "length", "metric", "lives"])
@pytest.mark.parametrize("value", [None, 5.5, ["x"]])
def test_a_manifest_with_a_field_of_the_wrong_type_is_said(cli, workdir, key, value):
    assert cli(*ORACLE, "num_samples=1", "out=here").status == 0
    changed = manifest(workdir / "here") | {key: value}
    (workdir / "here" / "manifest.json").write_text(json.dumps(changed))
    finished = cli(*ORACLE, "num_samples=2", "out=here")
    assert finished.status == 2
    assert "manifest.json is damaged" in finished.err


def test_reports_that_cannot_be_written_are_no_success(cli, workdir):
    assert cli(*ORACLE, "num_samples=1", "out=here").status == 0
    shutil.rmtree(workdir / "here" / "predictions")
    (workdir / "here" / "predictions").write_text("in the way")
    finished = cli(*ORACLE, "num_samples=1", "out=here")
    assert finished.status == 1
    assert "could not write the reports" in finished.err


def test_a_context_of_the_engine_that_is_too_short_is_said_before_it_starts(cli):
    finished = cli("backend=gpu_only", *ORACLE[2:], "backend.max_model_len=512", "num_samples=1")
    assert finished.status == 2
    assert "backend.max_model_len=512: a prompt with its generation takes" in finished.err


def test_a_second_process_on_the_folder_is_refused(cli, workdir):
    (workdir / FOLDER).mkdir(parents=True)
    with (workdir / FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        finished = cli(*ORACLE, "num_samples=1")
    assert finished.status == 2
    assert "in use by another ruler_bench process" in finished.err


def start(workdir, *arguments):
    return subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=workdir,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_lines(path, count, process):
    deadline = time.monotonic() + 600  # a process may take long to start on a busy machine
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.02)
    raise AssertionError(f"{count} records did not appear: {process.communicate()}")


def test_kill_9_loses_nothing_and_the_same_command_goes_on(cli, workdir):
    slow = ("num_samples=30", "backend.delay_seconds=0.1", "out=here")
    path = workdir / "here" / "records.jsonl"
    process = start(workdir, *slow)
    wait_for_lines(path, 3, process)
    process.kill()
    process.wait()
    kept = path.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    assert 3 <= kept.count(b"\n") < 30

    assert cli(*ORACLE, *slow).status == 0
    assert path.read_bytes().startswith(kept)
    found = rows(workdir / "here")
    assert [row["ordinal"] for row in found] == list(range(30))
    assert found[-1]["life"] == 2

    assert cli(*ORACLE, "num_samples=30", "out=unbroken").status == 0
    outputs = [[row["output"] for row in rows(workdir / name)] for name in ("here", "unbroken")]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_with_the_partial_table(workdir, number):
    process = start(workdir, "num_samples=50", "backend.delay_seconds=0.2", "out=here")
    wait_for_lines(workdir / "here" / "records.jsonl", 2, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    done = len(rows(workdir / "here"))
    assert 2 <= done < 50
    assert str(done) in out
    assert "niah_single_1" in out
    assert "Traceback" not in err
    assert (workdir / "here" / "report.md").exists()


@contextmanager
def files_of_at_most(size):
    """Let no file that this process writes grow beyond so many bytes, as a full disk would."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_keeps_what_was_recorded_and_says_so(cli, workdir):
    assert cli(*ORACLE, "num_samples=1").status == 0
    with files_of_at_most(6000):
        finished = cli(*ORACLE, "num_samples=50")
    assert finished.status == 1, finished.err
    assert "could not record ordinal" in finished.err
    assert "Traceback" not in finished.err
    found = rows(workdir / FOLDER)
    assert 1 < len(found) < 50
    assert str(len(found)) in finished.out


def test_another_tokenizer_measures_the_samples_and_the_model_keeps_its_own(cli, workdir):
    smollm2 = str(Path(__file__).parent / "data" / "tokenizers" / "smollm2")
    finished = cli(*ORACLE, "num_samples=2", f"tokenizer={smollm2}", "out=here")
    assert finished.status == 0, finished.err
    prepared = (workdir / "here" / "predictions" / "niah_single_1.jsonl").read_text().splitlines()
    probe = load_tokenizer(str(Path(__file__).parent.parent / "ruler_bench" / "assets" / "probe"))
    for row, line in zip(rows(workdir / "here"), prepared, strict=True):
        prompt = json.loads(line)["input"]
        assert load_tokenizer(smollm2).count(prompt) <= 1024 - 128
        assert row["prompt_tokens"] == len(probe.encode_prompt(prompt))


@pytest.fixture
def model_with_bos(tmp_path):
    """The probe with a tokenizer that puts a BOS before every text."""
    folder = tmp_path / "model-with-bos"
    shutil.copytree(model_folder("package:probe"), folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", tokenizer.token_to_id("<|pad|>"))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<|pad|>"}))
    return folder


def test_bos_reaches_the_engine_once_and_has_its_place(cli, workdir, model_with_bos):
    mine = ("backend=gpu_only", "length=512", "model=local", f"model.path={model_with_bos}")
    assert cli(*mine, "device=cpu", "num_samples=1", "out=here").status == 0
    # The context does not depend on which samples were chosen, so the folder may grow.
    finished = cli(*mine, "device=cpu", "num_samples=3", "out=here")
    assert finished.status == 0, finished.err
    assert manifest(workdir / "here")["backend_in_force"]["max_model_len"] == 513
    prepared = (workdir / "here" / "predictions" / "niah_single_1.jsonl").read_text().splitlines()
    plain = load_tokenizer(str(model_folder("package:probe")))
    for row, line in zip(rows(workdir / "here"), prepared, strict=True):
        assert row["prompt_tokens"] == 1 + plain.count(json.loads(line)["input"])

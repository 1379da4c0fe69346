"""`python -m ruler_bench.report`: many runs joined, the gate, and what people get wrong."""

import builtins
import csv
import json

import pandas as pd
import pytest

from ruler_bench.leak.files import text_hash
from ruler_bench.records import to_line
from ruler_bench.report.__main__ import main
from ruler_bench.report.page import PAGE


@pytest.fixture
def put(record, run, tmp_path):
    """Write a run folder: `put("a", right=8, of=10)`; keywords change the manifest."""

    def write(name, right=10, of=10, first=0, arm="persistent", **manifest):
        records = [
            record(first + n, output=" 1234567" if n < right else "no", arm=arm,
                   task=manifest.get("task", "niah_single_1"), length=manifest.get("length", 4096))
            for n in range(of)
        ]  # fmt: skip
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps(run(**manifest).manifest))
        (folder / "records.jsonl").write_text("".join(map(to_line, records)))
        return folder

    return write


@pytest.fixture
def report(tmp_path, monkeypatch, capsys):
    """Call the command line in the folder; returns status, what it printed, and errors."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        capsys.readouterr()
        status = main(arguments)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


def test_runs_are_joined_into_tables_a_page_and_csv(put, report, tmp_path):
    for task in ("niah_single_1", "vt"):
        for length in (4096, 8192):
            for backend, right in (("offload", 40), ("gpu_only", 28)):
                put(f"r/{task}_{length}_{backend}", right, 40, task=task, length=length,
                    backend=backend)  # fmt: skip
    (tmp_path / "r" / "vt_4096_offload" / PAGE).write_text("its own page")
    status, out, _ = report("r", "--out", "joined", "--processes", "1")
    assert status == 0
    assert "Report: joined/report.html" in out
    text = (tmp_path / "joined" / "report.md").read_text()
    assert "# 8 runs: 2 tasks, 4096 to 8192 tokens" in text
    assert "| 70.00 (54.6 to 81.9) " in text
    assert "| +30.00 (" in text
    assert text.count("▲") >= 5
    cells = pd.read_csv(tmp_path / "joined" / "cells.csv")
    assert cells.groupby("backend")["score"].mean().to_dict() == {"offload": 100, "gpu_only": 70}
    differences = pd.read_csv(tmp_path / "joined" / "differences.csv")
    assert len(differences) == 4
    assert differences["is_clear"].all()
    page = (tmp_path / "joined" / PAGE).read_text()
    assert 'href="../r/vt_4096_offload/report.html"' in page
    assert (tmp_path / "joined" / "depth.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "joined" / "indices.png").exists()


def test_lengths_are_in_their_order(put, report):
    for length in (16384, 4096, 131072, 8192):
        put(f"r/vt_{length}", task="vt", length=length)
    (put("z", task="vt", length=4096, data={"fingerprint": "z"})).rename("r/vt_5")
    _, out, _ = report("r")
    assert [one.strip() for one in out.partition("| task")[2].split("|")[1:5]] == [
        "4096", "8192", "16384", "131072"
    ]  # fmt: skip


def test_patterns_name_runs_and_each_counts_once(put, report):
    for name in ("x_1", "x_2", "y"):
        put(name, config={"seed": len(name)})
    status, out, _ = report("x_*", "x_1")
    assert status == 0
    assert out.startswith("# 2 runs")


def test_without_matplotlib_all_else_comes(put, report, tmp_path, monkeypatch):
    put("a")
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    status, _, err = report("a", "--out", "joined")
    assert status == 0
    assert "pip install 'ruler-bench[plot]'" in err
    assert (tmp_path / "joined" / PAGE).exists()
    assert not list((tmp_path / "joined").glob("*.png"))


def test_models_by_policy(put, report):
    for model in ("small", "large"):
        for name, right in (("full", 10), ("xattention", 7)):
            put(f"{model}_{name}", right, model=model,
                backend_in_force={"policy": {"name": name}})  # fmt: skip
    _, out, _ = report(".")
    table = out.partition("## Models by policy")[2]
    assert "| large   | 100.00 | 70.00" in table.replace("&#95;", "_")
    assert "| small   | 100.00 | 70.00" in table


@pytest.mark.parametrize(
    ("right", "allowed", "status"), [(38, "-2", 6), (40, "-2", 0), (39, "-2.5", 0), (39, None, 6)]
)
def test_the_gate_ends_with_6_and_says_what_fell(put, report, *, tmp_path, right, allowed, status):
    put("base/a", 40, 40)
    put("base/b", 40, 40, task="vt")
    put("now/a", right, 40)
    put("now/b", 40, 40, task="vt")
    options = [] if allowed is None else ["--fail-under", allowed]
    code, out, _ = report("now", "--baseline", "base", *options, "--out", "joined")
    assert code == status
    assert "2 cells compared" in out
    fell = "niah_single_1 4096 offload probe persistent" in out
    assert fell == (status == 6)
    if right == 38:
        assert "40 pairs; chance could explain it" in out
    assert "Against the baseline" in (tmp_path / "joined" / PAGE).read_text()


def test_cells_that_only_one_side_has_are_told(put, report):
    put("base/a")
    put("base/b", task="vt")
    put("now/a")
    put("now/c", task="cwe")
    status, out, _ = report("now", "--baseline", "base")
    assert status == 0
    assert "cwe 4096 offload probe persistent: the baseline has no such cell." in out
    assert "vt 4096 offload probe persistent: only in the baseline; not compared." in out


def test_a_baseline_without_matching_cells_is_refused(put, report):
    put("base", task="vt")
    put("now")
    status, _, err = report("now", "--baseline", "base", "--fail-under", "-2")
    assert status == 2
    assert "no cell can be compared with the baseline" in err
    assert "the baseline has no such cell" in err
    put("other", data={"fingerprint": "another"})
    status, _, err = report("now", "--baseline", "other")
    assert status == 2
    assert "other samples than the baseline's" in err


def test_a_baseline_with_doubled_cells_is_refused_unless_settings_tell(put, report):
    put("base/a", config={"seed": 1})
    put("base/b", config={"seed": 2})
    put("now", config={"seed": 2})
    assert report("now", "--baseline", "base")[0] == 0
    put("later", config={"seed": 3})
    status, _, err = report("later", "--baseline", "base")
    assert status == 2
    assert "is there 2 times" in err


def test_mixed_fingerprints_are_kept_apart_and_said(put, report):
    put("a", 10, data={"fingerprint": "1" * 64})
    put("b", 2, data={"fingerprint": "2" * 64}, backend="gpu_only")
    status, out, _ = report("a", "b")
    assert status == 0
    assert "2 sets of samples (fingerprints 11111111, 22222222)" in out
    assert "niah_single_1 (samples 11111111)" in out
    assert "0 of 0 compared cells" in out


def test_other_weights_of_one_name_are_kept_apart(put, report):
    put("a", model_fingerprint="1" * 16)
    put("b", 2, model_fingerprint="2" * 16)
    _, out, _ = report("a", "b")
    assert "model probe: 2 sets of weights go by that name" in out
    assert "11111111" in out.partition("## Tasks by length")[2]


def test_doubled_cells_stand_by_themselves(put, report):
    put("a", 10)
    put("b", 0)
    _, out, _ = report("a", "b")
    assert (
        "cells that are there more than once: 1, such as in a and b; each stands by itself" in out
    )
    assert "100.00 (" in out
    assert "50.00" not in out


def test_a_cut_record_file_is_read_to_its_last_whole_line(put, report):
    path = put("a", 10) / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    status, out, _ = report("a")
    assert status == 0
    assert "a: the last line of records.jsonl is half-written and was left out." in out
    path.write_text("{\n" + path.read_text())
    status, _, err = report("a")
    assert status == 2
    assert "records.jsonl line 1 is damaged" in err


def test_cells_that_begin_like_formulas_are_text(put, report, tmp_path):
    for n, sign in enumerate("=+-@"):
        put(f"{sign}r{n}", model=f"{sign}cmd|' /C calc'!A0", backend="-2+3")
    report(".", "--out", "joined")
    for name in ("cells.csv", "differences.csv"):
        with (tmp_path / "joined" / name).open(newline="") as file:
            for line in csv.reader(file):
                for cell in line:
                    # A number may be negative; text may not begin like one.
                    assert cell[:1] not in ("=", "+", "-", "@") or float(cell) <= 0


@pytest.mark.parametrize(
    ("version", "said"), [(99, "has format 99, this program reads 1"), (0, "run it again")]
)
def test_another_version_is_refused_with_what_to_do(put, report, version, said):
    put("a", format_version=version)
    status, _, err = report("a")
    assert status == 2
    assert said in err
    assert "name the other folders alone" in err


def test_records_of_a_later_version_are_refused(put, report):
    path = put("a") / "records.jsonl"
    path.write_text(path.read_text().replace('{"arm"', '{"colour": 1, "arm"'))
    status, _, err = report("a")
    assert status == 2
    assert "line 1 is damaged (has fields that a later ruler_bench wrote: colour)" in err


def test_the_page_of_a_run_has_its_verdict_and_the_ends_of_its_prompts(put, report, tmp_path):
    prompt = "x" * 1000 + "Which is it?"
    folder = put("a", 5)
    records = folder / "records.jsonl"
    records.write_text(records.read_text().replace("0" * 64, text_hash(prompt)))
    (folder / "predictions").mkdir()
    line = json.dumps({"index": 0, "input": prompt}) + "\n{\n"
    (folder / "predictions" / "niah_single_1.jsonl").write_text(line)
    (folder / "verdict.json").write_text(json.dumps({"sentence": "It leaks.", "status": 3}))
    report("a", "--out", "joined")
    page = (tmp_path / "joined" / PAGE).read_text()
    assert "It leaks.</p>" in page
    assert "xxxWhich is it?</code>" in page


def test_a_folder_without_runs_is_refused(put, report, tmp_path):
    (tmp_path / "empty").mkdir()
    status, _, err = report("empty")
    assert status == 2
    assert "no run lies there" in err
    put("results_x")
    status, _, err = report("result_x")
    assert "Did you mean results_x?" in err
    status, _, err = report("nothing_*_like_it")
    assert "there is no such folder" in err
    (put("begun", of=0) / "records.jsonl").write_text("")
    assert "the runs have no answers yet" in report("begun")[2]
    assert "begun: has no answers yet and was left out" in report("begun", "results_x")[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "RUNS"),
        (["a", "--fail-under", "-2"], "--fail-under needs --baseline"),
        (["a", "--baseline", "a", "--fail-under", "x"], "must be points in -100 to 0"),
        (["a", "--baseline", "a", "--fail-under", "2"], "must be points in -100 to 0"),
        (["a", "--out", "a"], "is the folder of a run"),
        (["a", "--out", "a/records.jsonl"], "is a file"),
        (["a", "--out", "a/records.jsonl/x"], "cannot be written"),
        (["a", "--processes", "0"], "must be a number from 1"),
    ],
)
def test_a_wrong_command_line_is_one_line(put, report, arguments, said):
    put("a")
    status, out, err = report(*arguments)
    assert status == 2
    assert said in err
    assert err.count("\n") == 1
    assert out == ""


def test_two_processes_read_what_one_reads(put, report):
    for n in range(4):
        put(f"r{n}", n, config={"seed": n})
    assert report("r*", "--processes", "2") == report("r*", "--processes", "1")

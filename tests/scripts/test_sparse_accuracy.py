"""The comparison of policies, small, on the probe: through the harness, resumed, and told."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from ruler_bench.command_line import USAGE_ERROR
from ruler_bench.records import read_records, to_line
from scripts import sparse_accuracy
from scripts.accuracy import cells
from scripts.accuracy.policies import DEFAULT, parse_policies, parse_policy

POLICIES = ["full", "xattention:stride=8,threshold=0.8", "a_shape:recent_tokens=128"]
SIZES = ["--lengths", "600", "700", "--tasks", "niah_single_1", "--samples", "1"]
BASIC = ["--device", "cpu", "--policies", *POLICIES, *SIZES]


def measure(out, *arguments):
    return sparse_accuracy.main(["--out", str(out), *BASIC, *arguments])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole comparison, and the arguments of each engine that was built for it."""
    folder = tmp_path_factory.mktemp("accuracy") / "out"
    built = []
    with pytest.MonkeyPatch.context() as patch:
        life = cells.LocalLife

        def counted(settings, harness):
            built.append((dict(settings), dict(harness)))
            return life(settings, harness)

        patch.setattr(cells, "LocalLife", counted)
        status = measure(folder)
    return status, folder, built


def run_folder(folder, policy, length):
    return folder / "runs" / parse_policy(policy).folder / str(length) / "niah_single_1"


def test_all_cells_are_run_folders_of_the_harness(finished):
    status, folder, _ = finished
    assert status == sparse_accuracy.DONE
    for policy in POLICIES:
        for length in (600, 700):
            manifest = json.loads(
                (run_folder(folder, policy, length) / "manifest.json").read_text()
            )
            records = read_records(run_folder(folder, policy, length) / "records.jsonl")
            assert [one.ordinal for one in records] == [0]
            assert manifest["length"] == length
            in_force = manifest["backend_in_force"]
            assert in_force["policy"]["name"] == policy.partition(":")[0]
            assert in_force["max_model_len"] == 700
            assert in_force["chunk_tokens"] is None
            assert (run_folder(folder, policy, length) / "report.md").is_file()
    strides = json.loads((run_folder(folder, POLICIES[1], 600) / "manifest.json").read_text())[
        "backend_in_force"
    ]["policy"]
    assert (strides["stride"], strides["threshold"]) == (8, 0.8)


def test_one_engine_answers_all_cells_of_a_policy(finished):
    _, _, built = finished
    assert len(built) == len(POLICIES)
    assert {settings["_target_"] for settings, _ in built} == {
        "backends.engine.gpu_only",
        "backends.engine.xattn",
    }


def test_the_table_and_the_csv_hold_each_cell(finished, capsys):
    _, folder, _ = finished
    table = (folder / "table.md").read_text()
    with (folder / "accuracy.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["length_tokens"], row["policy"]) for row in rows] == [
        (length, policy) for length in ("600", "700") for policy in POLICIES
    ]
    for row in rows:
        assert row["policy"] in table
        assert int(row["samples"]) == 1
        assert float(row["score_low_95"]) <= float(row["score"]) <= float(row["score_high_95"])
        assert (float(row["density"]) == 1) == (row["policy"] == "full")
        assert float(row["prefill_seconds"]) > 0
    assert str(folder) not in table
    (folder / "table.md").unlink()
    assert sparse_accuracy.main(["--out", str(folder), "--render"]) == sparse_accuracy.DONE
    assert (folder / "table.md").read_text() == table


def test_the_same_command_asks_nothing_again(finished, monkeypatch, capsys):
    _, folder, _ = finished

    def never(*arguments):
        raise AssertionError("an engine was built")

    monkeypatch.setattr(cells, "LocalLife", never)
    before = [path.read_bytes() for path in sorted(folder.rglob("records.jsonl"))]
    assert measure(folder) == sparse_accuracy.DONE
    assert [path.read_bytes() for path in sorted(folder.rglob("records.jsonl"))] == before


def test_lost_answers_are_listed_with_their_depth(finished, tmp_path, capsys):
    """Planted: a record that scores 0 where full attention has all."""
    _, folder, _ = finished
    copy = tmp_path / "out"
    for path in folder.rglob("*"):
        if path.is_file():
            target = copy / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    for policy, score in ((POLICIES[0], 100.0), (POLICIES[1], 0.0)):
        path = run_folder(copy, policy, 700) / "records.jsonl"
        (record,) = read_records(path)
        planted = replace(record, score=score, correct=score == 100, output="wide | of")
        path.write_text(to_line(planted))
    assert sparse_accuracy.main(["--out", str(copy), "--render"]) == sparse_accuracy.DONE
    table = (copy / "table.md").read_text()
    (line,) = [line for line in table.splitlines() if "wide" in line]
    cells = [one.strip() for one in line.strip("|").split("|")]
    assert cells[:3] == [POLICIES[1], "niah_single_1", "0"]
    assert float(cells[3]) == pytest.approx(record.depth, abs=0.005)
    assert cells[4] == "100 / 0"
    with (copy / "accuracy.csv").open() as file:
        lost = {(row["policy"], row["length_tokens"]): row["lost"] for row in csv.DictReader(file)}
    assert lost[POLICIES[1], "700"] == "1"
    assert lost[POLICIES[0], "700"] == "0"


@pytest.mark.slow
def test_processes_of_their_own_and_a_wrong_setting(tmp_path, capsys):
    """A policy that cannot be built stops no other, and is named."""
    arguments = ["--lengths", "600", "--tasks", "niah_single_1", "--samples", "1"]
    arguments += ["--device", "cpu", "--processes", "2"]
    arguments += ["--policies", "full", "xattention:stride=7"]
    status = sparse_accuracy.main(["--out", str(tmp_path / "out"), *arguments])
    error = capsys.readouterr().err
    assert status == USAGE_ERROR
    assert "xattention:stride=7: ended with status 2" in error
    assert "does not divide" in error
    assert "full: ended with status 0" in error
    assert "1 cells are not measured" in error
    assert "| full " in (tmp_path / "out" / "table.md").read_text()


WORKER = """
import sys
policy = sys.argv[-1]
print("asked", *sys.argv[1:])
if policy != "full":
    print("error: cannot be built")
    sys.exit(2)
"""


def test_a_process_that_fails_is_named_and_stops_no_other(tmp_path, monkeypatch, capsys):
    """With a stand-in for the process, which does nothing but end."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(sparse_accuracy, "SCRIPT", worker)
    out = tmp_path / "out"
    assert measure(out, "--processes", "2") == USAGE_ERROR
    error = capsys.readouterr().err
    for policy in POLICIES[1:]:
        assert f"{policy}: ended with status 2" in error
    assert error.count(": error: cannot be built") == len(POLICIES) - 1
    assert "full: ended with status 0" in error
    assert "nothing is measured yet" in error
    logs = {path.name: path.read_text() for path in (out / "logs").iterdir()}
    assert set(logs) == {f"{parse_policy(one).folder}.log" for one in POLICIES}
    assert f"--out {out} " in logs["full.log"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--policies", "xatention"], "xattention"),
        (["--policies", "xattention:stride"], "xattention:stride=8"),
        (["--policies", "full", "full"], "twice"),
        (["--tasks", "niah_single_4"], "niah_single_1"),
        (["--lengths", "0"], "--lengths"),
        (["--samples", "0"], "--samples"),
        (["--processes", "0"], "--processes"),
    ],
)
def test_wrong_options_are_one_line(arguments, named, tmp_path, capsys):
    status = sparse_accuracy.main(["--out", str(tmp_path / "out"), "--device", "cpu", *arguments])
    assert status == USAGE_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert named in line


def test_a_folder_of_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert measure(tmp_path) == USAGE_ERROR
    assert "thesis.tex" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_every_policy_has_a_folder_of_its_own():
    specs = parse_policies(DEFAULT)
    assert [one.title for one in specs] == list(DEFAULT)
    assert len({one.folder for one in specs}) == len(DEFAULT) == 7


def test_paths_of_this_machine_are_nowhere(finished):
    _, folder, _ = finished
    for name in ("table.md", "manifest.json", "accuracy.csv"):
        text = (folder / name).read_text()
        assert str(folder) not in text
        assert str(Path.home()) not in text

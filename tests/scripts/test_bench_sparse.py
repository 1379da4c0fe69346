"""The benchmark of sparse prefill as a user runs it, on a CPU with a tiny shape."""

import json

import pytest
import torch

from scripts import bench_sparse
from scripts.bench import sparse_attention, sparse_prefill, structured
from scripts.bench.shapes import SHAPES
from scripts.bench.sparse_prefill import SUBJECTS
from scripts.bench.work import kv_bytes

LENGTHS = (300, 640)
BASIC = ["--shape", "tiny", "--device", "cpu", "--repeats", "1"]
BLOCK_ROWS = len(bench_sparse.PERCENTS)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(bench_sparse, "SUSTAINED_SECONDS", {"cpu": 0.001})
    yield
    torch.set_num_threads(before)


def read(folder):
    lines = (folder / "rows.jsonl").read_text().splitlines()
    return {row["key"]: row for row in map(json.loads, lines)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_sparse, "SUSTAINED_SECONDS", {"cpu": 0.001})
        status = bench_sparse.main([*BASIC, "--out", str(folder), "--lengths", "300,640"])
    return status, folder


def test_every_row_is_measured(finished):
    status, folder = finished
    rows = read(folder)
    assert [row["key"] for row in rows.values() if row["error"] is not None] == []
    assert status == bench_sparse.DONE
    prompts = {(row["name"], row["length"]) for row in rows.values() if row["kind"] == "prompt"}
    assert prompts == {(one.name, length) for one in SUBJECTS for length in LENGTHS}
    for length in LENGTHS:
        of_length = [row for row in rows.values() if row["length"] == length]
        alone = [row["figures"] for row in of_length if row["kind"] == "attention"]
        assert len([one for one in alone if "kept_share" in one]) == BLOCK_ROWS
        assert all(one["largest_relative_error"] < 1e-3 for one in alone)
        choices = [row for row in of_length if row["kind"] == "estimation"]
        assert [row["settings"]["stride"] for row in choices] == [8, 16]
    found = rows["calibration"]["figures"]
    assert found["strength"] in [strength for strength, _ in found["tried"]]


def test_prefills_are_of_the_engines_that_their_names_say(finished):
    rows = {(r["name"], r["length"]): r for r in read(finished[1]).values()}
    tokens, prompt_bytes = 640, kv_bytes(SHAPES["tiny"], 640, 4)
    for subject in SUBJECTS:
        found = rows[subject.name, tokens]["figures"]
        assert found["prefill_seconds"] > 0
        assert found["down_bytes"] == (prompt_bytes if subject.preset == "offload" else 0)
        assert (found["up_bytes"] > 0) == (subject.preset == "offload")
        if subject.policy == "full":
            assert found["density"] is None
            assert found["policy"]["name"] == "full"
        else:
            assert 0 < found["density"] <= 1
            assert found["estimation_seconds"] >= 0
            assert found["policy"]["name"] == subject.policy.split()[0]
    strides = [
        rows[f"gpu_only xattention {s}", tokens]["figures"]["policy"]["stride"] for s in (8, 16)
    ]
    assert strides == [8, 16]


def test_the_table_comes_again_from_the_rows(finished, capsys):
    folder = finished[1]
    table = (folder / "table.md").read_text()
    for length in LENGTHS:
        assert f"## {length} tokens" in table
    for subject in SUBJECTS:
        assert f"| {subject.name} " in table
    assert structured.DESCRIPTION in table
    (folder / "table.md").unlink()
    assert bench_sparse.main(["--render", str(folder)]) == bench_sparse.DONE
    assert (folder / "table.md").read_text() == table
    assert str(folder) not in table


def test_a_second_run_measures_only_what_is_missing(finished, capsys):
    _, folder = finished
    rows = read(folder)
    lost = next(key for key, row in rows.items() if row["name"] == "offload a_shape")
    kept = [json.dumps(row) for key, row in rows.items() if key != lost]
    (folder / "rows.jsonl").write_text("\n".join(kept) + "\n")
    arguments = [*BASIC, "--out", str(folder), "--lengths", "300,640"]
    assert bench_sparse.main(arguments) == bench_sparse.DONE
    assert [key for key, row in read(folder).items() if row["run"] == 1] == [lost]


def test_a_strength_that_is_named_is_not_looked_for(tmp_path):
    arguments = ["--lengths", "300", "--only", "estimation,prefill", "--strength", "7"]
    arguments += ["--subjects", "gpu_only xattention 8"]
    assert bench_sparse.main([*BASIC, "--out", str(tmp_path), *arguments]) == bench_sparse.DONE
    rows = list(read(tmp_path).values())
    assert [row["kind"] for row in rows] == ["estimation", "estimation", "prompt"]
    assert {row["figures"]["strength"] for row in rows} == {7.0}
    assert all("strength 7" in row["key"] for row in rows)


def test_without_a_strength_nothing_is_measured_on_structured_keys(tmp_path, monkeypatch):
    def lost(*arguments):
        raise RuntimeError("lost its way")

    monkeypatch.setattr(sparse_prefill, "calibrate", lost)
    arguments = [*BASIC, "--out", str(tmp_path), "--lengths", "300", "--only", "estimation"]
    assert bench_sparse.main(arguments) == bench_sparse.FAILED
    errors = [row["error"] for row in read(tmp_path).values()]
    assert errors[0] == "RuntimeError: lost its way"
    assert all("--strength" in one for one in errors[1:])


def test_what_is_wrong_does_not_stop_the_other_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(sparse_attention, "LARGEST_ERROR", {torch.float32: 0.0})
    arguments = [*BASIC, "--out", str(tmp_path), "--lengths", "300", "--only", "attention"]
    assert bench_sparse.main([*arguments, "--kernels", "math"]) == bench_sparse.FAILED
    errors = [row["error"] for row in read(tmp_path).values()]
    assert len(errors) == BLOCK_ROWS + 1
    assert all("not timed" in one for one in errors)
    assert "## Not measured" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize("wanted", [0.3, 0.12])
def test_the_strength_that_is_found_has_the_density_asked_for(wanted, monkeypatch):
    # Density falls with strength; here by a known law.
    monkeypatch.setattr(sparse_prefill, "first_layer", lambda strength, *_: strength)
    monkeypatch.setattr(sparse_prefill, "density", lambda bench, strength, *_: 1 / strength)

    class Bench:
        shape = None

    class Plan:
        make_prompt = make_weights = staticmethod(lambda value: value)
        threshold = 0.9

    found = sparse_prefill.calibrate(Bench, Plan, 640, 8, wanted)
    assert found["density"] == pytest.approx(wanted, rel=sparse_prefill.CLOSE_ENOUGH)
    assert found["density"] == 1 / found["strength"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--lengths", "0"], "--lengths"),
        (["--lengths", "9000"], "4095"),
        (["--shape", "tyni"], "tiny"),
        (["--only", "atention"], "attention"),
        (["--subjects", "gpu_onyl"], "gpu_only"),
        (["--kernels", "flash3"], "fa3"),
        (["--threshold", "1"], "--threshold"),
        (["--density", "0"], "--density"),
        (["--strength", "0"], "--strength"),
        (["--repeats", "0"], "--repeats"),
    ],
)
def test_wrong_options_are_one_line(arguments, named, tmp_path, capsys):
    status = bench_sparse.main([*BASIC, "--out", str(tmp_path / "out"), *arguments])
    assert status == bench_sparse.WRONG
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert named in line
    assert not (tmp_path / "out").exists()


def test_a_folder_of_other_settings_is_refused(finished, capsys):
    arguments = [*BASIC, "--out", str(finished[1]), "--threshold", "0.8"]
    assert bench_sparse.main(arguments) == bench_sparse.WRONG
    assert "threshold" in capsys.readouterr().err

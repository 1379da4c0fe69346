"""Rows that survive a kill, and folders that are not mixed up."""

import json

import pytest

from ruler_bench.errors import UsageError
from scripts.bench.journal import Journal, command_line, read_manifest, read_rows


def row(key, error=None, **figures):
    return {"key": key, "error": error, "figures": figures}


def test_a_row_is_on_disk_at_once_and_the_last_of_a_key_counts(tmp_path):
    folder = tmp_path / "new" / "folder"
    journal = Journal(folder, {"seed": 1}, "first", {})
    journal.add(row("a", error="no luck"))
    assert not journal.has("a")
    journal.add(row("a", x=1.5))
    assert journal.has("a")
    assert read_rows(folder)["a"]["figures"] == {"x": 1.5}
    again = Journal(folder, {"seed": 1}, "second", {"clock": "fast"})
    assert again.has("a")
    assert not again.has("b")
    again.add(row("b"))
    assert [one["run"] for one in read_rows(folder).values()] == [0, 1]
    runs = read_manifest(folder)["runs"]
    assert [run["command"] for run in runs] == ["first", "second"]
    assert runs[1]["clock"] == "fast"


def test_a_run_that_measures_nothing_leaves_no_trace(tmp_path):
    Journal(tmp_path, {}, "first", {}).add(row("a"))
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    Journal(tmp_path, {}, "second", {})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_a_half_written_last_line_is_cut_off(tmp_path):
    Journal(tmp_path, {}, "", {}).add(row("a"))
    path = tmp_path / "rows.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"key": "b", "err')
    journal = Journal(tmp_path, {}, "", {})
    assert not journal.has("b")
    assert path.read_text() == whole
    journal.add(row("b"))
    assert list(read_rows(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize("line", ["{", "[]", '{"figures": {}}'])
def test_a_damaged_line_in_the_middle_is_named(tmp_path, line):
    Journal(tmp_path, {}, "", {}).add(row("a"))
    path = tmp_path / "rows.jsonl"
    path.write_text(line + "\n" + path.read_text())
    with pytest.raises(UsageError, match="line 1: damaged"):
        read_rows(tmp_path)


def test_other_settings_and_foreign_folders_are_refused(tmp_path):
    Journal(tmp_path / "a", {"shape": "tiny", "seed": 1}, "", {})
    with pytest.raises(UsageError, match="seed: 1 there, 2 here"):
        Journal(tmp_path / "a", {"shape": "tiny", "seed": 2}, "", {})
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match=r"not of a benchmark \(thesis.tex\)"):
        Journal(tmp_path / "b", {}, "", {})
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be made"):
        Journal(tmp_path / "file", {}, "", {})


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", json.dumps({"format_version": 1, "settings": [], "runs": []})],
)
def test_a_damaged_manifest_is_named(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UsageError, match=r"manifest\.json is damaged"):
        Journal(tmp_path, {}, "", {})


def test_another_format_is_named(tmp_path):
    manifest = {"format_version": 99, "settings": {}, "runs": []}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="format 99, this program reads format 1"):
        read_manifest(tmp_path)


def test_commands_show_no_paths():
    shown = command_line(
        "bench_engine.py", ["--out", "/home/somebody/table", "--render=/home/x/y", "--only", "copy"]
    )
    assert shown == "python scripts/bench_engine.py --out table --render=y --only copy"

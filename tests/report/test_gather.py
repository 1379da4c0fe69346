"""Names of runs: folders, patterns, and files of a run; others are refused."""

import pytest

from ruler_bench.errors import UsageError
from ruler_bench.report.gather import run_folders


@pytest.fixture
def run(workdir):
    """A folder as a run leaves it, as far as names go, beside files of others."""
    folder = workdir / "results" / "a"
    folder.mkdir(parents=True)
    for path in (folder / "manifest.json", folder / "records.jsonl", folder / "report.md"):
        path.write_text("")
    (workdir / "notes.txt").write_text("")
    (workdir / "manifest.json").write_text("")  # of something else
    return folder


@pytest.mark.parametrize("name", ["manifest.json", "records.jsonl"])
def test_a_file_of_a_run_names_it(run, name):
    assert run_folders([str(run / name), str(run)]) == [run]


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json", "results/a/report.md"])
def test_a_file_of_no_run_is_refused(run, name):
    with pytest.raises(UsageError, match=f"^{name}: is a file of no run; name the folder"):
        run_folders([name])


def test_files_that_a_pattern_finds_beside_runs_are_passed_over(run):
    assert [one.resolve() for one in run_folders(["*"])] == [run]
    with pytest.raises(UsageError, match="no run lies there"):
        run_folders(["*.txt"])


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_refused_and_not_this_folder(run, name):
    with pytest.raises(UsageError, match="an empty name: names no runs"):
        run_folders([name])
    assert [one.resolve() for one in run_folders(["."])] == [run]

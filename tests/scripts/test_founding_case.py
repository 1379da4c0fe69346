"""The founding case, small: before leaks, after does not, and the page says so from the folders."""

import csv
import json
import shutil
from pathlib import Path

import pytest

from ruler_bench.run import run_cell
from scripts import founding_case
from scripts.detector.runner import cell_of
from scripts.founding import report
from scripts.founding.launch import Processes

SMALL = ["--device", "cpu", "--length", "512", "--samples", "3", "--audit", "1",
         "--tasks", "niah_multikey_2"]  # fmt: skip


class Here:
    """Runs the harness in this process with 2 slots, and takes the same answers for 4."""

    def __init__(self):
        self.calls = []
        self.is_over = False

    def __call__(self, arguments, log):
        self.calls.append(arguments)
        folder = Path(arguments[-1].removeprefix("out="))
        assert "overwrite=true" not in arguments
        if "backend.num_gpu_blocks=4" in arguments:
            twin = folder.parents[1] / folder.parent.name.replace("4", "2") / folder.name
            shutil.copytree(twin, folder, dirs_exist_ok=True)
            return 0
        # An answer that went wrong does not end before it must.
        shorter = "task.tokens_to_generate=16"
        return run_cell(cell_of([*arguments[:-1], shorter], folder)).status

    def end(self):
        self.is_over = True


class Ends(Here):
    """Ends with a status, having printed a line; an exception for a status is raised."""

    def __init__(self, *endings):
        super().__init__()
        self.endings = list(endings)

    def __call__(self, arguments, log):
        self.calls.append(arguments)
        status, line = self.endings.pop(0) if self.endings else (0, "")
        if isinstance(status, BaseException):
            raise status
        log.write_text(line + "\n")
        return status


def replay(out, *arguments, launch=None):
    return founding_case.main(["--out", str(out), *SMALL, *arguments], launch or Ends())


@pytest.fixture(scope="module")
def asked(tmp_path_factory, data_cache):
    """A case that was asked in full, and its exit status."""
    out = tmp_path_factory.mktemp("case")
    launch = Here()
    status = replay(out, launch=launch)
    assert len(launch.calls) == 4
    return out, status


def test_the_engine_with_the_fault_leaks_and_the_one_without_is_ok(asked):
    out, status = asked
    assert status == 0
    page = (out / "founding_case.md").read_text()
    runs = json.loads((out / "founding_case.json").read_text())["runs"]
    assert {run["part"]: run["verdict"] for run in runs} == {
        "before_2_slots": "leak",
        "before_4_slots": "leak",
        "after_2_slots": "ok",
        "after_4_slots": "ok",
    }
    before, after = page.split("## After, 2 slots")
    # The sentence of the verdict stands above each table.
    section = before.split("## Before, 2 slots")[1].split("## ")[1]
    assert section.index("LEAK. 2 of 2 answers") < section.index("| index") < section.index("```")
    assert "OK. No answer of 1 changes" in after
    assert "Fresh engines were asked 2 of them: 0 wrong." in section
    assert "for 1 drawn by the seed" in page
    # Wrong of one engine, right of a fresh one; the second has other bits and happens to be right.
    # The reference is asked after alone.
    assert "one engine            rrW\n" in section
    assert "fresh engines         -rr\n" in section
    assert "without offload" not in section
    assert "without offload       rrr\n" in after


def test_lists_and_rows_hold_what_the_page_shows(asked):
    out, _ = asked
    rows = [json.loads(one) for one in (out / "founding_case.jsonl").read_text().splitlines()]
    assert len(rows) == 4 * 3
    wrong = [row for row in rows if row["expected"][0] not in row["persistent"]["output"]]
    with (out / "persistent_engine_errors.csv").open(newline="") as file:
        listed = list(csv.DictReader(file))
    assert list(listed[0]) == ["part", "task", "index", "expected", "output"]
    assert [(one["part"], int(one["index"]), one["output"]) for one in listed] == [
        (row["part"], row["index"], row["persistent"]["output"]) for row in wrong
    ]
    assert {row["verdict"] for row in wrong} == {"leak"}
    assert (out / "fresh_engine_errors.csv").read_text().count("\n") == 1
    for row in rows:
        assert (row["fresh"] is None) == (row["fresh_again"] is None)
        assert (row["reference"] is None) == row["part"].startswith("before")


def test_the_same_command_goes_on_and_the_page_comes_from_the_folders(asked, capsys):
    out, _ = asked
    page = (out / "founding_case.md").read_text()
    (out / "founding_case.md").unlink()
    assert founding_case.main(["--out", str(out), "--render"]) == 0
    assert (out / "founding_case.md").read_text() == page
    launch = Ends()
    assert replay(out, "--part", "after_4_slots", launch=launch) == 0
    assert len(launch.calls) == 1
    assert "after_4_slots niah_multikey_2: OK." in capsys.readouterr().err
    assert (out / "founding_case.md").read_text() == page


def test_what_is_missing_is_said_and_is_no_success(asked, tmp_path):
    out, _ = asked
    part = tmp_path / "case"
    shutil.copytree(out, part)
    shutil.rmtree(part / "runs" / "before_4_slots")
    assert founding_case.main(["--out", str(part), "--render"]) == 1
    page = (part / "founding_case.md").read_text()
    assert "Not asked yet: before_4_slots niah_multikey_2." in page
    # A leak after, or none before, is no success either.
    shutil.copytree(part / "runs" / "after_2_slots", part / "runs" / "before_4_slots")
    assert founding_case.main(["--out", str(part), "--render"]) == 1


def test_what_one_engine_had_begun_another_does_not_finish(asked, tmp_path):
    out, _ = asked
    part = tmp_path / "case"
    shutil.copytree(out, part)
    records = part / "runs" / "before_2_slots" / "niah_multikey_2" / "records.jsonl"
    lines = records.read_text().splitlines(keepends=True)

    def asks_anew():
        launch = Ends()
        replay(part, "--part", "before_2_slots", launch=launch)
        (call,) = launch.calls
        return "overwrite=true" in call

    assert not asks_anew()
    records.write_text("".join(lines[:2]))  # of the first arm
    assert asks_anew()
    records.write_text("".join(lines[:5]))  # of its repetition
    assert asks_anew()
    records.write_text("".join(lines[:7]))  # of a fresh engine
    assert not asks_anew()
    again = json.loads(lines[2]) | {"life": 2}
    records.write_text("".join([*lines[:2], json.dumps(again) + "\n", *lines[3:]]))
    assert asks_anew()


def test_a_run_that_dies_leaves_the_others_and_is_named(tmp_path, capsys):
    launch = Ends((-9, "memory plan: ..."))
    assert replay(tmp_path, "--part", "after_2_slots", launch=launch) == 1
    error = capsys.readouterr().err
    assert (
        "after_2_slots niah_multikey_2: its command ended with status -9 (memory plan: ...)"
        in error
    )
    assert error.rstrip().endswith("The same command goes on.")


def test_a_setting_that_the_harness_refuses_ends_all(tmp_path, capsys):
    launch = Ends((2, "error: backend.kvcache_block_size=9: too long."), (0, ""))
    assert replay(tmp_path, launch=launch) == 2
    assert "kvcache_block_size=9: too long." in capsys.readouterr().err
    assert launch.is_over


def test_an_interrupt_ends_all(tmp_path, capsys):
    launch = Ends((KeyboardInterrupt(), ""))
    assert replay(tmp_path, launch=launch) == 130
    assert launch.is_over
    assert "the same command goes on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--part", "before_2_slot"], "Did you mean 'before_2_slots'?"),
        (["--tasks", "niah_singel_1"], "Did you mean 'niah_single_1'?"),
        (["--fault", "tracked_by_ids"], "Did you mean 'tracked_by_id'?"),
        (["--audit", "4"], "--audit 4: must be 0 to 3"),
        (["--at-once", "0"], "--at-once 0: must be 1 or more."),
    ],
)
def test_wrong_settings_are_named(tmp_path, capsys, arguments, message):
    assert replay(tmp_path / "out", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_of_another_case_is_refused(asked, tmp_path, capsys):
    out, _ = asked
    assert replay(out, "--seed", "43") == 2
    assert "seed: 42 there, 43 here" in capsys.readouterr().err
    assert founding_case.main(["--out", str(tmp_path), "--render"]) == 2
    assert "nothing was asked there yet" in capsys.readouterr().err
    (tmp_path / "plan.json").write_text("{")
    assert founding_case.main(["--out", str(tmp_path), "--render"]) == 2
    assert "plan.json is damaged" in capsys.readouterr().err


def test_strips_have_a_letter_for_each_index(asked):
    out, _ = asked
    plan = report.read_plan(out)
    (job,) = report.jobs_of(plan, "before_2_slots", out)
    case = report.read_case(job)
    for arm in ("persistent", "fresh"):
        assert len(report.strip(case.of(arm).get, 100)) == 100
    assert report.strip(case.of("fresh").get, 4) == "-rr-"


def test_commands_run_from_a_plain_checkout_and_none_starts_after_the_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    processes, log = Processes(), tmp_path / "log"
    assert processes(["task=no_such_task"], log) == 2
    assert "no_such_task" in log.read_text()
    processes.end()
    assert processes(["--help"], log) == 130

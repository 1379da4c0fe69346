"""The table of SmolLM2, with the probe and the oracle in its place: run, refused, told."""

import json
import re
from pathlib import Path

import pytest

from ruler_bench.command_line import USAGE_ERROR
from ruler_bench.model_files import model_folder
from scripts import smollm2_table
from scripts.founding.launch import Processes

QA = Path(__file__).parents[1] / "data" / "qa"
TASKS = ["--tasks", "niah_single_1", "qa_2", "--lengths", "512"]
STAND_INS = {"model=smollm2": "model=probe", "backend=gpu_only": "backend=oracle"}


class StandIn(Processes):
    """Runs the harness with the probe's tokenizer and answers read from the prompts."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def __call__(self, arguments, log):
        self.asked.append(arguments)
        taken = [one for one in arguments if not one.startswith("threads=")]  # the oracle has none
        return super().__call__([STAND_INS.get(one, one) for one in taken], log)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Exit status, folder, and the arguments of each run."""
    out = tmp_path_factory.mktemp("table") / "out"
    launch = StandIn()
    words = ["--out", str(out), *TASKS, "--device", "cpu", "--qa-data", str(QA)]
    words += ["--samples", "2", "--processes", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(smollm2_table, "model_folder", lambda _: model_folder("package:probe"))
        status = smollm2_table.main(words, launch)
    return status, out, launch.asked


def test_each_task_is_one_run_of_the_product(measured):
    status, _, asked = measured
    assert status == smollm2_table.FAILED  # one of the two has no room
    by_task = {next(one for one in words if one.startswith("task=")): words for words in asked}
    assert set(by_task) == {"task=niah_single_1", "task=qa_2"}
    for words in asked:
        assert {"model=smollm2", "backend=gpu_only", "num_samples=2", "template=base"} < {*words}
    assert f"qa_data='{QA}'" in by_task["task=qa_2"]
    assert not [one for one in by_task["task=niah_single_1"] if one.startswith("qa_data")]


def test_questions_are_told_of_only_where_they_are_asked(measured):
    _, out, _ = measured
    assert "Questions: **made up**" in (out / "smollm2.md").read_text()
    manifest = json.loads((out / "manifest.json").read_text())
    assert smollm2_table.asks_questions(manifest)
    assert not smollm2_table.asks_questions(manifest | {"tasks": ["vt", "cwe"]})


def test_the_table_has_scores_intervals_and_what_has_no_room(measured):
    _, out, _ = measured
    text = (out / "smollm2.md").read_text()
    row = next(line for line in text.splitlines() if "niah_single_1 " in line)
    cells = [one.strip() for one in row.strip("|").split("|")]
    assert cells[:5] == ["512", "niah_single_1", "100.00", "34.2 to 100.0", "2 of 2"]  # Wilson
    assert re.search(r"- qa_2 at 512: length=512 is too small for qa_2: the least length", text)
    assert "**made up**" in text
    assert "`template=base`" in text
    assert "python scripts/smollm2_table.py --out DIR" in text
    assert str(out) not in text


def test_it_is_rendered_anew_from_what_is_on_disk(measured):
    _, out, _ = measured
    before = (out / "smollm2.md").read_text()
    (out / "smollm2.md").unlink()
    assert smollm2_table.main(["--out", str(out), "--render"]) == smollm2_table.FAILED
    assert (out / "smollm2.md").read_text() == before
    assert json.loads((out / "manifest.json").read_text())["samples"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "niah_single_9"], "unknown task 'niah_single_9'. Did you mean"),
        (["--lengths", "1024", "1024"], "--lengths: names one twice"),
        (["--samples", "0"], "--samples 0: must be at least 1"),
        (["--qa-data", "nowhere"], "--qa-data nowhere: is no folder"),
        (["--render"], "has no manifest.json to read"),
    ],
)
def test_wrong_options_are_one_line(tmp_path, capsys, words, message):
    status = smollm2_table.main(["--out", str(tmp_path / "out"), "--device", "cpu", *words])
    said = capsys.readouterr().err
    assert status == USAGE_ERROR
    assert message in said
    assert len(said.splitlines()) == 1


def test_a_folder_of_somebody_else_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(smollm2_table, "model_folder", lambda _: tmp_path)
    (tmp_path / "precious.txt").touch()
    assert smollm2_table.main(["--out", str(tmp_path), "--device", "cpu"]) == USAGE_ERROR
    assert "holds files that are not of this script (precious.txt)" in capsys.readouterr().err

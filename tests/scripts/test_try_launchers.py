"""The comparison of launchers: what counts as a difference, and what is refused at once."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ruler_bench.launch_packages import PACKAGES
from scripts import try_launchers
from scripts.try_launchers import Try, differences, render, shareable

ROOT = Path(__file__).parent.parent.parent
BASIC = Try(
    launcher="basic",
    command=["python", "-m", "ruler_bench", "-m"],
    status=(2, 2),
    records={"cell": [{"ordinal": 0}, {"ordinal": 1}]},
    table=[{"task": "niah_single_1"}],
    engines={"cell": 2},
    printed="Joined report: x",
)


def test_a_launcher_that_leaves_the_same_has_no_differences():
    assert differences(BASIC, replace(BASIC, launcher="gpus")) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"status": (0, 2)}, "status 0, not 2"),
        ({"status": (2, 1)}, "statuses differ"),
        ({"records": {}}, "records differ"),
        ({"table": []}, "joined tables differ"),
        ({"engines": {"cell": 3}}, "numbers of engines differ"),
    ],
)
def test_each_difference_is_named(changed, words):
    assert words in differences(BASIC, replace(BASIC, **changed))


def test_the_page_has_a_line_and_a_section_for_each():
    page = render([BASIC, replace(BASIC, launcher="gpus", records={})])
    assert "| basic | 2 | 2 | 2 equal | 1 lines equal | 2 |" in page
    assert "| gpus | 2 | 2 | differ | 1 lines equal | 2 |" in page
    assert page.count("\nJoined report: x\n") == 2


def test_no_folder_of_the_machine_is_shown():
    assert shareable(f"\x1b[36m{ROOT}/x {Path.home()}/y") == "./x ~/y"


def test_an_unknown_launcher_is_refused(tmp_path, capsys):
    status = try_launchers.main(["--out", str(tmp_path / "out"), "--launchers", "slrum"])
    assert status == 2
    assert "Did you mean 'slurm'?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_every_launcher_that_the_pages_name_is_known():
    pages = [ROOT / "README.md", ROOT / "docs" / "run_on_slurm.md"]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"hydra/launcher=(\w+)", text))
    ours = {path.stem for path in (ROOT / "configs" / "hydra" / "launcher").glob("*.yaml")}
    assert ours <= named
    assert named <= PACKAGES.keys()

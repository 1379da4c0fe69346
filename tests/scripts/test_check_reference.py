"""The side-by-side script, with a small stand-in for the reference's clone."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ruler_bench.errors import UsageError

ROOT = Path(__file__).parent.parent.parent
SMOLLM2 = ROOT / "tests" / "data" / "tokenizers" / "smollm2"

STAND_IN = """
import argparse, json, sys
from pathlib import Path
sys.path.insert(0, {root!r})
import yaml
from ruler_bench.tasks import DataSpec, generate, make_task
from ruler_bench.tokenizer import load_tokenizer

parser = argparse.ArgumentParser()
for name in ("save_dir", "benchmark", "task", "model_template_type", "tokenizer_path",
             "tokenizer_type"):
    parser.add_argument("--" + name)
for name in ("max_seq_length", "num_samples", "random_seed"):
    parser.add_argument("--" + name, type=int)
a = parser.parse_args()
essays = json.loads((Path(__file__).parent / "synthetic/json/PaulGrahamEssays.json").read_text())
assert len(essays["text"]) == 643830
{before}
task = make_task(yaml.safe_load(Path({root!r}, "configs", "task", a.task + ".yaml").read_text()))
spec = DataSpec(task, a.max_seq_length, a.random_seed, a.model_template_type,
                load_tokenizer(a.tokenizer_path), Path(__file__).parent / "synthetic" / "json")
out = Path(a.save_dir) / a.task / "validation.jsonl"
out.parent.mkdir(parents=True, exist_ok=True)
with out.open("w") as lines:
    for s in generate(spec, a.num_samples):
        row = dict(index=s.answer_offset, input=s.input, outputs=s.outputs, length=s.length,
                   answer_prefix=s.answer_prefix)
        {change}
        lines.write(json.dumps(row) + "\\n")
"""


@pytest.fixture
def bare_script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    found = importlib.util.spec_from_file_location(
        "check_reference", ROOT / "scripts" / "check_reference.py"
    )
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "check_reference", module)
    found.loader.exec_module(module)
    return module


@pytest.fixture
def script(bare_script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The same, with NLTK and its data taken as there."""
    module = bare_script
    monkeypatch.setattr(module, "REFERENCE_MODULES", ("yaml",))
    monkeypatch.setattr(module, "find_nltk_data", lambda: tmp_path / "nltk_data")
    return module


def make_clone(folder: Path, before: str = "", change: str = "pass") -> Path:
    clone = folder / "RULER"
    (clone / "scripts" / "data").mkdir(parents=True)
    (clone / "scripts" / "data" / "prepare.py").write_text(
        STAND_IN.format(root=str(ROOT), before=before, change=change)
    )
    return clone


def arguments(clone: Path, *more: str) -> list[str]:
    chosen = ["--tasks", "niah_single_1", "--lengths", "600", "--num-samples", "2"]
    return [str(clone), *chosen, "--tokenizer", str(SMOLLM2), *more]


def test_same_samples_give_a_table_and_status_0(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clone = make_clone(tmp_path)
    before = sorted(clone.rglob("*"))
    file = tmp_path / "results" / "table.md"
    assert script.main(arguments(clone, "--markdown", str(file))) == 0
    header, _, row = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in capsys.readouterr().out.splitlines()
    )
    cells = dict(zip(header, row, strict=True))
    assert (cells["task"], cells["length"], cells["same"]) == ("niah_single_1", "600", "yes")
    assert float(cells["ours, s"]) > 0.05
    assert float(cells["ours, MB"]) > 20
    ratio = float(cells["reference, s"]) / float(cells["ours, s"])
    assert float(cells["times faster"]) == pytest.approx(ratio, rel=0.2, abs=0.1)
    assert "| niah_single_1 |" in file.read_text()
    assert str(tmp_path) not in file.read_text()
    assert sorted(clone.rglob("*")) == before


@pytest.mark.parametrize(
    "change",
    [
        "row['input'] = row['input'].replace('grass', 'moss')",
        "row['length'] += 1",
        "row['outputs'] = ['1234567']",
        "row['answer_prefix'] += ' '",
    ],
)
def test_a_different_sample_is_seen(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    assert script.main(arguments(make_clone(tmp_path, change=change))) == 1
    assert "| NO " in capsys.readouterr().out


def test_the_defective_index_is_not_compared(script: ModuleType, tmp_path: Path) -> None:
    assert script.main(arguments(make_clone(tmp_path, change="row['index'] = -1"))) == 0


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("raise ImportError('no module named nemo')", "no module named nemo"),
        ("print('Error output: no punkt'); sys.exit(0)", "no punkt"),
        ("sys.exit(0)", "it printed nothing"),
    ],
)
def test_a_reference_that_fails_says_why(
    script: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    before: str,
    message: str,
) -> None:
    assert script.main(arguments(make_clone(tmp_path, before=before))) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tasks", "niah_singel_1"], "Did you mean 'niah_single_1'"),
        (["--template", "chat"], "unknown template 'chat'"),
        (["--num-samples", "0"], "--num-samples must be at least 1"),
    ],
)
def test_wrong_options(
    script: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    message: str,
) -> None:
    assert script.main(arguments(make_clone(tmp_path), *more)) == 2
    assert message in capsys.readouterr().err


def test_no_clone(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(arguments(tmp_path)) == 2
    assert "git clone https://github.com/NVIDIA/RULER" in capsys.readouterr().err


QA = ROOT / "tests" / "data" / "qa"


def test_the_reference_gets_questions_and_a_list_of_words(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without Git LFS the clone's list is a pointer, which is no JSON."""
    reads = 'json.loads((Path(__file__).parent / "synthetic/json/english_words.json").read_text())'
    clone = make_clone(tmp_path, before=f"assert {reads} == {{}}")
    words = clone / "scripts" / "data" / "synthetic" / "json" / "english_words.json"
    words.parent.mkdir(parents=True)
    words.write_text("version https://git-lfs.github.com/spec/v1")
    chosen = ["--tasks", "qa_1", "--lengths", "1024", "--num-samples", "2", "--qa-data", str(QA)]
    assert script.main([str(clone), *chosen, "--tokenizer", str(SMOLLM2)]) == 0
    assert "| qa_1 | 1024   | 2       | yes" in capsys.readouterr().out
    assert words.read_text().startswith("version")


def test_missing_questions_name_the_command(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--tasks", "qa_2", "--qa-data", str(tmp_path)]
    assert script.main([str(make_clone(tmp_path)), *chosen]) == 2
    assert "python scripts/fetch_data.py hotpotqa" in capsys.readouterr().err


def test_missing_modules_are_named(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "REFERENCE_MODULES", ("json", "no_such_module"))
    assert script.main(arguments(make_clone(tmp_path))) == 2
    assert "pip install no_such_module" in capsys.readouterr().err


@pytest.mark.parametrize("in_home", [True, False])
def test_nltk_data_are_the_users_else_those_of_llama_index(
    bare_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_home: bool
) -> None:
    home, shipped = tmp_path / "home", tmp_path / "shipped"
    for folder in [home, shipped] if in_home else [shipped]:
        (folder / "tokenizers" / "punkt_tab" / "english").mkdir(parents=True)
    listed = subprocess.CompletedProcess([], 0, stdout=json.dumps([str(home)]), stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: listed)
    monkeypatch.setattr(bare_script, "_shipped", lambda name: shipped)
    assert bare_script.find_nltk_data() == (home if in_home else shipped).resolve()


def test_missing_nltk_data_name_the_command(
    bare_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = subprocess.CompletedProcess([], 0, stdout="[]", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: listed)
    monkeypatch.setattr(bare_script, "_shipped", lambda name: None)
    with pytest.raises(UsageError, match=r"nltk\.downloader punkt_tab"):
        bare_script.find_nltk_data()


def test_content_hash_is_that_of_the_golden_rows(script: ModuleType, tmp_path: Path) -> None:
    """Made by hand: sha256 of one line of JSON."""
    file = tmp_path / "one.jsonl"
    sample = {"input": "é", "answer_prefix": " is", "outputs": ["1"], "length": 3, "index": 9}
    file.write_text(json.dumps(sample) + "\n")
    assert script.content_hash(file) == (
        "f09acb997f4ef9db35c18ef487be214ab4aba857a1aa6fa5e2b2fd5f73d05899"
    )

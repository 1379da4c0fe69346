"""Hashes of an engine's code: what changes them, and what does not."""

import importlib
import sys

import pytest

from ruler_bench.errors import UsageError
from ruler_bench.source import check_unchanged, sources

FILES = {
    "nest/__init__.py": "",
    "nest/engine.py": "class Engine: ...",
    "nest/deep/kernel.cu": "__global__ void f() {}",
    "nest/notes.txt": "a",
    "nest/__pycache__/engine.cpython-311.py": "a",
    "nest/.git/hook.py": "a",
    "egg.py": "class Engine: ...",
    "loose/engine.py": "class Engine: ...",
}


@pytest.fixture
def nest(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return tmp_path


TARGETS = ("nest.engine.Engine", "egg.Engine", "loose.engine.Engine")


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("nest/engine.py", {"nest"}),
        ("nest/deep/kernel.cu", {"nest"}),
        ("nest/new.py", {"nest"}),
        ("egg.py", {"egg"}),
        ("loose/engine.py", {"loose"}),
        ("nest/notes.txt", set()),
        ("nest/__pycache__/engine.cpython-311.py", set()),
        ("nest/.git/hook.py", set()),
        ("beside.py", set()),
    ],
)
def test_code_of_the_package_or_file_counts_and_nothing_else(nest, name, changed):
    before = sources(TARGETS)
    assert before.keys() == {"nest", "egg", "loose"}
    assert sources(TARGETS) == before
    (nest / name).write_text("# other")
    after = sources(TARGETS)
    assert {one for one in after if after[one] != before[one]} == changed


def test_a_file_by_another_name_is_other_code(nest):
    before = sources(TARGETS)
    (nest / "nest" / "engine.py").rename(nest / "nest" / "motor.py")
    assert sources(TARGETS)["nest"] != before["nest"]


def test_nothing_is_imported_for_it(nest):
    sources(TARGETS)
    assert "nest" not in sys.modules


def test_ours_has_a_version():
    found = sources(["backends.engine.offload", "backends.hf.TransformersBackend"])
    assert set(found) == {"backends"}
    assert set(found["backends"]) >= {"sha256"}


def test_what_has_no_file_is_left_out():
    assert sources(["sys.maxsize", "no_such_module.Engine"]) == {}


def test_other_code_is_refused_and_code_that_is_new_to_a_folder_is_not(tmp_path):
    one, two = {"sha256": "1" * 64}, {"version": "2", "sha256": "2" * 64}
    check_unchanged(tmp_path, {}, {"nest": one})
    check_unchanged(tmp_path, {"egg": two}, {"nest": one})
    with pytest.raises(UsageError, match=r"the code of nest was changed.*version 2, sha256 2222"):
        check_unchanged(tmp_path, {"nest": one}, {"nest": two})

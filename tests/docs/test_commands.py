"""Every command of the README and the documents is given, as `doc_table.HELD` says how."""

import collections
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import doc_held  # noqa: E402
import doc_pages  # noqa: E402
import doc_site  # noqa: E402
import doc_table  # noqa: E402

PRINTED = {one.text: one for page in doc_pages.PAGES for one in doc_pages.commands(page)}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        doc_site.furnish(folder)
        yield doc_site.Site(folder, doc_table.HELD)


@pytest.mark.parametrize("command", PRINTED.values(), ids=lambda one: one.where)
def test_it_works(site, command):
    held = doc_table.HELD.get(command.text)
    assert held is not None, (
        f"{command.where} has a command that no test gives:\n    {command.text}\n"
        "Add it to HELD in tests/docs/doc_table.py under exactly these words: run(...) with what "
        "makes it short."
    )
    done = site.hold(command.text)
    assert held.is_right(done), (
        f"{command.where}: {command.text}\n"
        f"given as: {shlex.join(held.arguments(command.words))}\n"
        f"status {done.status}, not {held.status}\n{done.err}{done.out}"
    )


def test_the_table_has_no_command_that_is_printed_nowhere():
    stale = sorted(set(doc_table.HELD) - set(PRINTED))
    assert not stale, f"remove from HELD in tests/docs/doc_table.py: {stale}"


def test_each_is_run_but_for_what_names_a_server_that_is_missing():
    """A dry run, and `--cfg`, start no engine: only where the page says so, or for want of one."""
    not_run = {
        text: held
        for text, held in doc_table.HELD.items()
        if {"dry_run=true", "--cfg"} & {*held.arguments(shlex.split(text))} - {*shlex.split(text)}
    }
    assert {held.dry for held in not_run.values()} == {"Slurm", "Ray"}
    assert len(not_run) == 2
    ways = collections.Counter(held.by for held in doc_table.HELD.values())
    assert set(ways) == {"call", "make", "pip", "shell"}


def test_what_measures_a_gpu_is_marked():
    wanted = r"(bench_engine|check_engine|bench_sparse)\.py --out|=offloaded"
    marked = {text for text, held in doc_table.HELD.items() if held.cuda}
    assert marked == {text for text in doc_table.HELD if re.search(wanted, text)}


def test_each_module_starts_as_a_process_starts_it():
    modules = {one.words[2] for one in PRINTED.values() if one.words[:2] == ("python", "-m")}
    assert modules <= set(doc_held.MAINS)
    for name in sorted(modules):
        done = doc_held.start(name, "--help")
        assert done.status == 0, done.err
        assert f"python -m {name} " in done.out


def test_the_slurm_keys_are_the_launchers():
    path = doc_pages.ROOT / "configs" / "hydra" / "launcher" / "slurm.yaml"
    known = set(OmegaConf.load(path))
    page = (doc_pages.ROOT / "docs" / "run_on_slurm.md").read_text(encoding="utf-8")
    given = {
        word.removeprefix("hydra.launcher.").partition("=")[0]
        for one in PRINTED.values()
        for word in one.words
        if word.startswith("hydra.launcher.") and "hydra/launcher=slurm" in one.words
    }
    assert given
    for key in given - known:
        assert f"`{key}`" in page, key


def test_tasks_of_ones_own_are_asked_as_docs_add_a_task_says(site):
    asked = [text for text in doc_table.HELD if "my_configs" in text and "oracle" in text]
    assert len(asked) == 2
    for text in asked:
        assert re.search(r"^correct +3$", site.hold(text).out, re.MULTILINE)
    assert (
        site.hold(next(text for text in doc_table.HELD if "two_of_three.jsonl" in text)).status == 0
    )
    lines = (site.folder / "two_of_three.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, lines):
        assert len(row["outputs"]) == 2
        assert "What are all the special magic uuids for " in row["input"]


def test_the_case_of_docs_find_a_leak_is_found_where_it_says(site):
    found = site.hold("python -m ruler_bench.divergence warm new").out
    assert "layer 0, attention" in found.splitlines()[0]
    assert "chunk 1" in found.splitlines()[0]


# --- links --------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", doc_pages.PAGES, ids=lambda one: one.name)
def test_links_lead_somewhere(page):
    for target in doc_pages.links(page):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in doc_pages.anchors(path), f"{page.name}: {target}"


def test_pictures_are_small_and_shown():
    shown = {
        (page.parent / target).resolve()
        for page in doc_pages.PAGES
        for target in doc_pages.links(page)
    }
    for path in (doc_pages.ROOT / "docs" / "pictures").iterdir():
        assert path.resolve() in shown, f"{path.name} is shown nowhere"
        assert path.suffix == ".png"
        assert path.stat().st_size < 200_000


# --- the reading of pages -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("python a.py  # why\n", [("python", "a.py")]),
        ("python a.py \\\n    --out DIR\n", [("python", "a.py", "--out", "DIR")]),
        ("$ make demo\nprinted by it\n", [("make", "demo")]),
        ("pip install x && python -m y 2>&1 >t | jq .", [("pip", "install", "x"), ("python", "-m", "y")]),  # noqa: E501
        ("python -m y 'a=\"b c\"' k=[1,2] *.x", [("python", "-m", "y", 'a="b c"', "k=[1,2]", "*.x")]),  # noqa: E501
    ],
)  # fmt: skip
def test_commands_are_found_in_what_a_block_holds(source, words):
    assert doc_pages.split(source) == words


def test_a_page_is_read_whole(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`!\nSay `make test` or `make`.\n\n    python a.py\n\n"
        "```sh\npython b.py\n```\n```text\npython c.py\n```\n```python x.py\npython d.py\n```\n"
        "# One two\n[there](#one-two-1) ![seen](a.png)\n"
    )
    found = [one.words for one in doc_pages.commands(page)]
    assert found == [("make", "test"), ("python", "a.py"), ("python", "b.py")]
    assert doc_pages.anchors(page) == {"one-two", "one-two-1"}
    assert doc_pages.links(page) == ["#one-two-1", "a.png"]

"""scripts/try_servers.py: what it makes of servers, with doubles in their place."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from ruler_bench.model_files import model_folder
from ruler_bench.records import Record, to_line

ROOT = Path(__file__).parent.parent.parent
PROBE = model_folder("package:probe")


@pytest.fixture(scope="module")
def scripts():
    """The script and its parts, as they find each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        from scripts import try_servers
        from scripts.servers import figures, gguf_probe, kinds, table

        yield {
            "main": try_servers.main,
            "kinds": kinds,
            "figures": figures,
            "table": table,
            "gguf_probe": gguf_probe,
        }


@pytest.fixture(scope="module")
def serving():
    spec = importlib.util.spec_from_file_location("serving", Path(__file__).parent / "serving.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--servers", "vllm"], "--servers vllm: it is not there; pip install vllm"),
        (["--servers", "vllm_llm", "--vllm", sys.executable], "vllm_llm: it is not there; install"),
        (["--servers", "llama.cpp", "--llama-server", "no-such"], "--target llama-server"),
    ],
)
def test_a_server_that_is_missing_is_one_line_that_says_how_to_install_it(
    scripts, tmp_path, capsys, arguments, words
):
    assert scripts["main"](["--out", str(tmp_path), *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


def test_a_run_becomes_a_row_and_a_server_that_does_not_start_is_told(
    scripts, serving, tmp_path, monkeypatch
):
    kinds = scripts["kinds"]
    sound = kinds.serve(serving.command("--tokenizer", serving.TOKENIZER))
    broken = kinds.serve([sys.executable, "-S", "-c", "print('no GPU'); exit(3)", "{port}"])
    made = [
        kinds.Trial(kinds.TRANSFORMERS, "sound", (*sound, "fresh=inprocess")),
        kinds.Trial(kinds.TRANSFORMERS, "does not start", (*broken, "fresh=inprocess")),
    ]
    monkeypatch.setattr(kinds, "trials", lambda server, found: made)
    monkeypatch.setattr(kinds, "version", lambda server, found: "1.2.3")
    arguments = ["--out", str(tmp_path), "--length", "1024", "--samples", "2", "--arms"]
    arguments += ["persistent", "two_questions"]
    assert scripts["main"](arguments) == 1
    page = (tmp_path / "servers.md").read_text()
    (row,) = [one for one in page.splitlines() if one.startswith("| transformers | sound")]
    assert row.startswith("| transformers | sound | ids, usage, token_ids, logprobs | 2/2 | ok | 0")
    assert "- transformers: 1.2.3" in page
    assert "OK. 2 answers show no fault" in page
    assert "No verdict: " in page
    assert str(tmp_path) not in page


def test_figures_tell_margins_that_moved_from_answers_that_turned(scripts, tmp_path):
    base = Record(
        **{"arm": "fresh", "step": 0, "ordinal": 0, "task": "t", "length": 9, "life": 1},
        **{"position": 0, "predecessor": None, "expected": ("1",), "depth": 0.0},
        **{"prompt_sha256": "p", "prompt_tokens": 100, "output": "1", "correct": True},
        **{"output_tokens": (4, 5, 6), "top2_margin": (8.0, 1.0, 9.0), "total_seconds": 2.0},
    )
    rows = [
        base,
        replace(base, arm="persistent", top2_margin=(8.25, 1.0, 9.0), ttft_seconds=1.5),
        # Another token: margins from there on are of other texts.
        replace(base, arm="repeat", output_tokens=(4, 7, 6), top2_margin=(8.5, 5.0, 1.0)),
        replace(base, arm="repeat", step=1, reused_tokens=80, ttft_seconds=0.25),
        replace(base, arm="two_questions", prompt_sha256="another", top2_margin=(1.0, 1.0, 1.0)),
        replace(base, arm="reference", top2_margin=(1.0, 1.0, 1.0)),
    ]
    (tmp_path / "records.jsonl").write_text("".join(to_line(one) for one in rows))
    verdict = {"verdict": "ok", "sentence": "s", "notes": [], "indices": []}
    (tmp_path / "verdict.json").write_text(json.dumps(verdict))
    (tmp_path / "manifest.json").write_text("{}")
    found = scripts["figures"].read(tmp_path)
    assert (found.moved, found.turned) == (0.5, 1)
    assert found.reused == 0.8
    assert (found.first_seconds, found.again_seconds) == (1.5, 0.25)
    assert (found.right, found.samples, found.engines) == (1, 1, 4)
    assert found.seconds == 10.0


def test_any_path_survives_as_an_override(scripts):
    words = ["/a b/it's/x\\y", "--port", "{port}", "--a=[1,2]"]
    _, override = scripts["kinds"].serve(words)
    assert OverridesParser.create().parse_override(override).value() == words


def test_the_probe_as_gguf_is_the_probe(scripts, tmp_path):
    """As transformers, which undoes GGUF's layout and names by itself, reads the file."""
    for name in ("gguf", "accelerate"):
        pytest.importorskip(name)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    scripts["gguf_probe"].write(PROBE, tmp_path / "probe.gguf")
    assert [one.name for one in tmp_path.iterdir()] == ["probe.gguf"]
    mine = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="probe.gguf", dtype=torch.float32
    )
    own = AutoModelForCausalLM.from_pretrained(PROBE, dtype=torch.float32)
    weights = own.state_dict()
    assert set(mine.state_dict()) == set(weights)
    assert all(torch.equal(one, weights[name]) for name, one in mine.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="probe.gguf")
    text = "One of the special magic numbers for big-house is: 1234567.\n\n hé  x"
    assert tokenizer(text).input_ids == AutoTokenizer.from_pretrained(PROBE)(text).input_ids

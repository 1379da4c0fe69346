"""The benchmark as a user runs it, on a CPU with a tiny shape."""

import json
from pathlib import Path

import pytest
import torch

from scripts import bench_engine
from scripts.bench import subjects
from scripts.bench.shapes import SHAPES
from scripts.bench.work import expected_copies, weight_bytes

TINY = SHAPES["tiny"]
LENGTHS = (96, 256)
BASIC = ["--shape", "tiny", "--device", "cpu"]
NEW_TOKENS = 4


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def read(folder):
    lines = (folder / "rows.jsonl").read_text().splitlines()
    return {row["key"]: row for row in map(json.loads, lines)}


def of(rows, name, length):
    (row,) = [row for row in rows.values() if row["name"] == name and row["length"] == length]
    assert row["error"] is None
    return row["figures"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run, with what it printed."""
    folder = tmp_path_factory.mktemp("bench") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_engine, "SUSTAINED_SECONDS", {"cpu": 0.001})
        status = bench_engine.main(
            [*BASIC, "--out", str(folder), "--new-tokens", str(NEW_TOKENS), "--lengths", "96,256"]
        )
    return status, folder


def test_every_row_is_measured(finished):
    status, folder = finished
    rows = read(folder)
    assert [row["key"] for row in rows.values() if row["error"] is not None] == []
    assert status == bench_engine.DONE
    prompts = {(row["name"], row["length"]) for row in rows.values() if row["kind"] == "prompt"}
    assert prompts == {(name, length) for name in subjects.SUBJECTS for length in LENGTHS}
    ceilings = [row for row in rows.values() if row["kind"] == "ceiling"]
    assert {row["name"] for row in ceilings} == set(bench_engine.CEILINGS)
    assert all(value > 0 for row in ceilings for value in row["figures"].values())
    assert len([row for row in ceilings if row["name"] == "gemm"]) == 4 * len(TINY.gemm_rows)
    assert [r["run"] for r in rows.values()] == [0] * len(rows)


@pytest.mark.parametrize("length", LENGTHS)
def test_all_subjects_continue_the_same_prompt_with_the_same_weights(finished, length):
    rows = read(finished[1])
    wanted = of(rows, "transformers", length)["token_ids"]
    assert len(wanted) == NEW_TOKENS
    for name in subjects.OURS:
        found = of(rows, name, length)
        assert found["token_ids"] == wanted, name
        assert found["repeats_equal"]
        assert found["weight_bytes"] == weight_bytes(TINY, 4)
        assert len(found["all_decode_seconds"]) == len(found["all_prefill_seconds"]) == 2
    offloaded = of(rows, "transformers_offloaded", length)["token_ids"]
    assert offloaded == wanted[: subjects.OFFLOADED_NEW_TOKENS]
    resident, layerwise = (of(rows, n, length) for n in ("gpu_only", "offload_layerwise"))
    assert layerwise["logits_digest"] == resident["logits_digest"]


@pytest.mark.parametrize("length", LENGTHS)
def test_no_engine_copies_more_than_expected(finished, length):
    rows = read(finished[1])
    resident = of(rows, "gpu_only", length)
    assert resident["up_bytes"] == resident["down_bytes"] == 0
    for name, chunk in (("offload_layerwise", None), ("offload_chunked", 32)):
        found = of(rows, name, length)
        expected = expected_copies(TINY, length, NEW_TOKENS, chunk, 4)
        assert (found["expected_up_bytes"], found["expected_down_bytes"]) == expected
        assert 0 < found["up_bytes"] <= expected.up_bytes
        assert found["down_bytes"] == expected.down_bytes


def test_the_table_comes_again_from_the_rows(finished, tmp_path, capsys):
    folder = finished[1]
    table = (folder / "table.md").read_text()
    for length in LENGTHS:
        assert f"## {length} tokens" in table
    (folder / "table.md").unlink()
    assert bench_engine.main(["--render", str(folder)]) == bench_engine.DONE
    assert (folder / "table.md").read_text() == table
    assert capsys.readouterr().out.strip() == table.strip()


def test_nothing_tells_where_it_ran(finished):
    _, folder = finished
    for path in folder.iterdir():
        text = path.read_text()
        assert str(folder) not in text
        assert str(Path.home()) not in text


def test_a_second_run_measures_only_what_is_missing(finished, monkeypatch, capsys):
    _, folder = finished
    rows = read(folder)
    lost = next(key for key, row in rows.items() if row["name"] == "gpu_only")
    kept = [json.dumps(row) for key, row in rows.items() if key != lost]
    (folder / "rows.jsonl").write_text("\n".join(kept) + "\n")
    arguments = [*BASIC, "--out", str(folder), "--new-tokens", str(NEW_TOKENS)]
    assert bench_engine.main([*arguments, "--lengths", "96,256"]) == bench_engine.DONE
    again = read(folder)
    assert [key for key, row in again.items() if row["run"] == 1] == [lost]
    assert {key: row for key, row in again.items() if key != lost} == {
        key: row for key, row in rows.items() if key != lost
    }
    assert capsys.readouterr().err.count("is there already") == len(rows) - 1


def test_a_failing_row_does_not_stop_the_others(monkeypatch, tmp_path, capsys):
    def measure(name, bench, plan, tokens):
        raise RuntimeError("lost\nits way")

    monkeypatch.setattr(subjects, "measure", measure)
    monkeypatch.setattr(bench_engine, "SUSTAINED_SECONDS", {"cpu": 0.001})
    arguments = [*BASIC, "--out", str(tmp_path), "--lengths", "96", "--only", "gpu_only,copy"]
    assert bench_engine.main(arguments) == bench_engine.FAILED
    errors = [row["error"] for row in read(tmp_path).values()]
    assert errors == [None, "RuntimeError: lost its way"]
    assert "Traceback" in (tmp_path / "errors.log").read_text()
    assert "lost its way" in capsys.readouterr().out


def test_an_interrupted_run_leaves_its_rows_and_table(monkeypatch, tmp_path):
    def measure(name, bench, plan, tokens):
        raise KeyboardInterrupt

    monkeypatch.setattr(subjects, "measure", measure)
    monkeypatch.setattr(bench_engine, "SUSTAINED_SECONDS", {"cpu": 0.001})
    arguments = [*BASIC, "--out", str(tmp_path), "--lengths", "96", "--only", "gpu_only,copy"]
    assert bench_engine.main(arguments) == bench_engine.INTERRUPTED
    assert list(read(tmp_path)) == ["copy"]
    assert "copy, up" in (tmp_path / "table.md").read_text()


def test_with_a_cap_only_the_chunked_offload_runs(monkeypatch, tmp_path):
    asked = []

    def measure(name, bench, plan, tokens):
        asked.append((name, tokens, plan.settings_of(name), plan.new_tokens))
        raise RuntimeError("not here")

    monkeypatch.setattr(subjects, "measure", measure)
    monkeypatch.setattr(bench_engine, "CEILINGS", ())
    arguments = [*BASIC, "--out", str(tmp_path), "--lengths", "96", "--new-tokens", "5"]
    more = [
        "--device-memory-gb",
        "0.5",
        "--host-memory-gb",
        "9",
        "--chunk-tokens",
        "16",
        "--gpu-blocks",
        "2",
    ]
    bench_engine.main([*arguments, *more])
    settings = {
        "chunk_tokens": 16,
        "kvcache_block_size": 64,
        "attend_tokens": "block",
        "num_gpu_blocks": 2,
        "device_memory_gb": 0.5,
        "host_memory_gb": 9.0,
    }
    assert asked == [("offload_chunked", 96, settings, 5)]
    assert list(read(tmp_path)) == [
        "offload_chunked, 96 tokens, chunk_tokens=16, kvcache_block_size=64, attend_tokens=block, "
        "num_gpu_blocks=2, device_memory_gb=0.5"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "llama-3-8b"], "Did you mean 'llama-3.1-8b'"),
        (["--only", "gpu_only,transfomers"], "Did you mean 'transformers'"),
        (["--kernels", "flash_gpu"], "unknown --kernels 'flash_gpu'"),
        (["--kernels", "cudnn"], "it needs cuda"),
        (["--dtype", "bf16"], "unknown --dtype 'bf16'"),
        (["--lengths", "4090"], "--lengths=4090: must be a whole number from 1 to 4087"),
        (["--lengths", "96,x"], "--lengths=x: must be"),
        (["--lengths", ""], "--lengths=: must be"),
        (["--repeats", "0"], "--repeats=0: must be at least 1"),
        (["--gpu-blocks", "1"], "--gpu-blocks=1: must be at least 2"),
        (["--device-memory-gb", "nan"], "--device-memory-gb=nan: must be"),
        (["--device", "cuda:99"], "--device=cuda:99"),
        (["--device", "tpu"], "allowed are cpu, cuda"),
        (["--render", "no_such_folder"], "no_such_folder holds no manifest.json"),
    ],
)
def test_wrong_options_are_one_line(arguments, message, tmp_path, capsys):
    status = bench_engine.main([*BASIC, "--out", str(tmp_path / "out"), *arguments])
    assert status == bench_engine.WRONG
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not (tmp_path / "out").exists()


def test_out_must_be_named(capsys):
    assert bench_engine.main(BASIC) == bench_engine.WRONG
    assert "--out is missing" in capsys.readouterr().err


def test_a_folder_of_another_shape_is_refused(finished, capsys):
    arguments = [*BASIC, "--out", str(finished[1]), "--seed", "9", "--lengths", "96"]
    assert bench_engine.main(arguments) == bench_engine.WRONG
    assert "seed: 0 there, 9 here" in capsys.readouterr().err


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_every_row_is_measured_on_a_gpu(tmp_path):
    arguments = ["--shape", "tiny", "--device", "cuda", "--out", str(tmp_path), "--lengths", "256"]
    assert bench_engine.main([*arguments, "--new-tokens", "4"]) == bench_engine.DONE
    rows = read(tmp_path)
    resident = of(rows, "gpu_only", 256)
    layerwise = of(rows, "offload_layerwise", 256)
    assert layerwise["logits_digest"] == resident["logits_digest"]
    assert all(of(rows, name, 256)["over_weights_bytes"] > 0 for name in subjects.SUBJECTS)

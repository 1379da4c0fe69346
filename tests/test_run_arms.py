"""Runs of several arms: what is recorded, how runs go on, which engines answer, bad input."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ORACLE = ("backend=oracle", "device=cpu", "length=1024")
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _engines(monkeypatch):
    monkeypatch.syspath_prepend(HERE)


def odd(name, *settings):
    return (
        "backend=custom",
        f"backend._target_=odd_engines.{name}",
        *(f"+backend.{one}" for one in settings),
        "device=cpu",
        "length=1024",
        "out=here",
    )


def rows(folder, arm=None):
    found = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return [row for row in found if arm in (None, row["arm"])]


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def test_leakcheck_asks_six_arms_and_says_so(cli, workdir):
    mine = ("experiment=leakcheck", "backend@reference=oracle", *ORACLE, "out=here")
    finished = cli(*mine, "num_samples=3")
    assert finished.status == 0, finished.err
    assert finished.out.startswith("niah_single_1: OK.")
    held = manifest(workdir / "here")
    lifetimes = {name: one["lifetime"] for name, one in held["arms"].items()}
    assert lifetimes == {
        "persistent": "one_engine",
        "persistent_again": "one_engine",
        "shuffled": "one_engine",
        "reference": "one_engine",
        "fresh": "engine_per_sample",
        "fresh_again": "engine_per_sample",
    }
    assert held["arms"]["shuffled"]["order"] == "shuffled"
    assert held["arms"]["fresh"]["settings"]["wrong"] == []
    found = rows(workdir / "here")
    assert len(found) == 18
    for row in found:
        fresh = row["arm"].startswith("fresh")
        assert row["life"] == (row["ordinal"] + 1 if fresh else 1)
        assert row["position"] == 0 or not fresh
    shuffled = sorted(rows(workdir / "here", "shuffled"), key=lambda row: row["position"])
    befores = [row["predecessor"] for row in shuffled]
    assert befores == [None, *(row["ordinal"] for row in shuffled[:-1])]
    report = (workdir / "here" / "report.md").read_text()
    assert report.index("## Verdict") < report.index("## Results")
    assert (workdir / "here" / "verdict.json").exists()
    # Nothing runs again, and more samples run in the same folder.
    before = (workdir / "here" / "records.jsonl").read_bytes()
    assert cli(*mine, "num_samples=3").status == 0
    assert (workdir / "here" / "records.jsonl").read_bytes() == before
    assert cli(*mine, "num_samples=4").status == 0
    assert (workdir / "here" / "records.jsonl").read_bytes().startswith(before)
    assert len(rows(workdir / "here")) == 24


def test_an_engine_that_leaks_is_found_with_status_3(cli, workdir):
    arms = "arms=[persistent,persistent_again,fresh,fresh_again]"
    finished = cli(*odd("Leaky"), arms, "num_samples=6")
    assert finished.status == 3, finished.err
    assert finished.out.startswith("niah_single_1: LEAK.")
    assert [row["correct"] for row in rows(workdir / "here", "persistent")] == [True] + [False] * 5
    assert all(row["correct"] for row in rows(workdir / "here", "fresh"))


def test_arms_do_not_share_what_an_engine_leaves_in_its_process(cli, workdir):
    arms = "arms=[persistent,persistent_again,fresh]"
    assert cli(*odd("LeakyModule"), arms, "num_samples=2").status in (0, 3)
    for arm, right in (
        ("persistent", [True, False]),
        ("persistent_again", [True, False]),
        ("fresh", [True, True]),
    ):
        assert [row["correct"] for row in rows(workdir / "here", arm)] == right


def test_fresh_inprocess_is_labelled_and_sees_less(cli, workdir):
    mine = odd("LeakyModule")
    finished = cli(*mine, "arms=[fresh]", "num_samples=2", "fresh=inprocess")
    assert finished.status == 0, finished.err
    held = manifest(workdir / "here")["arms"]["fresh"]
    assert held["lifetime"] == "engine_per_sample_in_process"
    assert [row["correct"] for row in rows(workdir / "here")] == [True, False]
    assert [row["life"] for row in rows(workdir / "here")] == [1, 2]
    # The two do not mix in one folder.
    refused = cli(*mine, "arms=[fresh]", "num_samples=3")
    assert refused.status == 2
    assert "arms.fresh.lifetime: engine_per_sample_in_process there" in refused.err


@pytest.mark.parametrize("workers", [1, 3])
def test_a_fresh_process_that_hangs_dies_or_fails_is_a_recorded_error(cli, workdir, workers):
    mine = (*odd("Fragile", "hang=1", "die=2", "fail=3"), "arms=[fresh]", "timeout_seconds=1")
    finished = cli(*mine, "num_samples=5", f"workers={workers}")
    assert finished.status == 1, finished.err
    found = {row["ordinal"]: row for row in rows(workdir / "here")}
    assert sorted(found) == [0, 1, 2, 3, 4]
    assert sorted(row["life"] for row in found.values()) == [1, 2, 3, 4, 5]
    assert found[1]["error"].startswith("EngineHung: this request took more than")
    assert found[2]["error"] == (
        "EngineDied: the engine's process ended during this request (signal SIGKILL)"
    )
    assert found[3]["error"] == "RuntimeError: nothing to say"
    assert found[0]["correct"]
    assert found[4]["correct"]
    assert "nothing to say" in (workdir / "here" / "errors.log").read_text()
    assert manifest(workdir / "here")["lives"][0]["engines"] == 5
    # They run again, and fail again.
    assert cli(*mine, "indices=[2-4]", f"workers={workers}").status == 1
    assert len(rows(workdir / "here")) == 7


def test_one_engine_that_dies_is_followed_by_another(cli, workdir):
    finished = cli(*odd("Fragile", "die=1"), "arms=[persistent,shuffled]", "num_samples=3")
    assert finished.status == 1, finished.err
    lives = {row["ordinal"]: (row["life"], row["position"]) for row in rows(workdir / "here")[:3]}
    assert lives == {0: (1, 0), 1: (1, 1), 2: (2, 0)}
    assert rows(workdir / "here")[1]["error"].startswith("EngineDied:")


def test_what_fails_in_a_warm_engine_alone_is_asked_again_in_a_warm_one(cli, workdir):
    note = workdir / "mended"
    mine = (*odd("Tired", "at=2", f"note={note}"), "num_samples=5")
    arms = "arms=[persistent,fresh,fresh_again]"
    assert cli(*mine, arms).status == 5
    # Its fresh engines answer it; the failure and the verdict stay, however often it is asked.
    finished = cli(*mine, arms, "dry_run=true")
    assert "persistent: 5 to run, 0 recorded" in finished.out
    finished = cli(*mine, arms)
    assert finished.status == 5
    assert "persistent: asks 4 recorded requests again, too" in finished.err
    assert finished.out.startswith("niah_single_1: UNDECIDED.")
    found = rows(workdir / "here", "persistent")
    assert [(row["ordinal"], row["life"], row["position"]) for row in found[5:]] == [
        (one, 2, one) for one in range(5)
    ]
    assert [row["ordinal"] for row in found if row["error"]] == [2, 2]
    # Alone it cannot be asked so, and is not asked.
    finished = cli(*mine[:-1], arms, "indices=[2]")
    assert finished.status == 1
    assert "ordinals 2 failed after their engine had served others that are not" in finished.err
    assert len(rows(workdir / "here", "persistent")) == 10
    # What no longer fails after the same requests is answered.
    note.touch()
    assert cli(*mine, arms).status == 0
    assert [row["life"] for row in rows(workdir / "here", "persistent")[10:]] == [3] * 5
    assert cli(*mine, arms).status == 0
    assert len(rows(workdir / "here", "persistent")) == 15


def test_an_engine_that_ends_its_process_is_an_error_of_one_sample(cli, workdir):
    finished = cli(*odd("Exiting", "at=1"), "num_samples=3")
    assert finished.status == 1, finished.err
    found = rows(workdir / "here")
    assert [row["error"] for row in found if row["ordinal"] != 1] == [None, None]
    assert found[1]["error"] == (
        "EngineDied: the engine's process ended during this request (exit status 0)"
    )
    assert "1 errors in the engine" in finished.out


def test_an_engine_alone_that_hangs_is_ended(cli, workdir):
    finished = cli(*odd("Fragile", "hang=1"), "num_samples=3", "timeout_seconds=1")
    assert finished.status == 1, finished.err
    assert rows(workdir / "here")[1]["error"].startswith("EngineHung: this request took more")


def test_what_an_engine_prints_is_shown(cli):
    assert "asked 1" in cli(*odd("Slow"), "num_samples=2").err.splitlines()


def test_a_port_that_the_last_life_still_holds_is_said(cli, workdir):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mine = odd("Clinging", f"port={port}")
    finished = cli(*mine, "arms=[fresh]", "num_samples=3", "fresh=inprocess")
    assert finished.status == 1
    found = rows(workdir / "here")
    assert found[0]["correct"]
    assert all("Address already in use" in row["error"] for row in found[1:])
    # A process takes its ports with it.
    import odd_engines

    for one in odd_engines.KEPT:
        one.close()
    finished = cli(*mine, "arms=[persistent,fresh]", "num_samples=2", "out=there")
    assert finished.status == 0, finished.err


def test_a_lock_that_the_last_life_still_holds_is_said(cli, workdir):
    """By a helper process of the engine, of which nobody else knows."""
    lock = workdir / "lock"
    mine = (*odd("Locking", f"lock={lock}"), "arms=[persistent,fresh]", "num_samples=1")

    def end_helpers():
        for pid in Path(f"{lock}.pids").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        Path(f"{lock}.pids").unlink()

    held = cli(*mine)
    end_helpers()
    assert held.status == 2
    last = held.err.splitlines()[-1]
    assert "the engine of arm fresh could not be built (BlockingIOError: " in last
    assert "what they held (a port, a lock, memory) may not be free again" in last
    assert len(rows(workdir / "here", "persistent")) == 1
    finished = cli(*mine)
    end_helpers()
    assert finished.status == 0, finished.err


def test_an_engine_that_cannot_be_built_again_ends_the_run_with_one_line(cli, workdir):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mine = odd("Clinging", f"port={port}")
    arms = "arms=[persistent,persistent_again]"
    finished = cli(*mine, arms, "num_samples=1", "fresh=inprocess")
    assert finished.status == 2
    last = finished.err.splitlines()[-1]
    assert "the engine of arm persistent_again could not be built (OSError: " in last
    assert "may not be free again; the same command goes on in a new process" in last
    assert len(rows(workdir / "here")) == 1


def test_a_folder_in_use_is_refused_whatever_the_arm(cli, workdir):
    import fcntl

    (workdir / "here").mkdir()
    with (workdir / "here" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        finished = cli(*odd("Plain"), "arms=[fresh]", "num_samples=1")
    assert finished.status == 2
    assert "in use by another ruler_bench process" in finished.err


def test_suspects_alone_get_fresh_engines_and_an_audit_is_drawn(cli, workdir):
    mine = (*ORACLE, "out=here", "num_samples=12", "backend.wrong=[4]", "fresh.on=suspects")
    finished = cli(*mine, "arms=[persistent,fresh,fresh_again]", "fresh.audit=3")
    assert finished.status in (0, 3, 5), finished.err
    noted = manifest(workdir / "here")["fresh"]
    assert noted["suspects"] == [4]
    assert len(noted["audited"]) == 3
    asked = {row["ordinal"] for row in rows(workdir / "here", "fresh")}
    assert asked == {4, *noted["audited"]}
    assert {row["ordinal"] for row in rows(workdir / "here", "fresh_again")} == asked
    verdict = json.loads((workdir / "here" / "verdict.json").read_text())
    # The bound on leaks counts what was drawn, and not what was suspected.
    assert verdict["audited"] == 3
    assert manifest(workdir / "here")["finished"]


def test_stop_on_leak_stops_at_the_first_contradiction(cli, workdir):
    mine = (*odd("Leaky"), "arms=[persistent,fresh,fresh_again]", "num_samples=8")
    finished = cli(*mine, "stop_on=leak")
    assert finished.status != 2, finished.err
    assert "stopped by stop_on=leak: arm fresh answers ordinal 1 otherwise" in finished.err
    assert len(rows(workdir / "here")) == 10
    # The same command asks nothing more; without stop_on the run goes on.
    assert "stopped by stop_on=leak" in cli(*mine, "stop_on=leak").err
    assert len(rows(workdir / "here")) == 10
    assert cli(*mine).status == 3
    assert len(rows(workdir / "here")) == 24


def test_what_is_asked_beside_the_samples_is_recorded_without_a_score(cli, workdir):
    arms = "arms=[persistent,fill,aged]"
    finished = cli(*odd("Telling"), arms, "num_samples=1")
    assert finished.status == 0, finished.err
    filled, after = rows(workdir / "here", "fill")
    room = 1024 - filled["prompt_tokens"]
    assert filled["output"] == f"{room} 0"
    assert filled["score"] is None
    assert filled["correct"] is None
    assert after["output"].startswith("128 ")
    assert after["score"] == 0
    aged = rows(workdir / "here", "aged")
    assert [row["step"] for row in aged] == list(range(51))
    assert all(row["score"] is None for row in aged[:50])
    assert aged[50]["ordinal"] == 0
    assert aged[50]["position"] == 50
    # Requests without a score are no wrong answers.
    assert "aged: 50/51 samples, 0/0 right" in finished.err
    assert len({row["prompt_sha256"] for row in aged}) == 51
    summary = (workdir / "here" / "summary.csv").read_text().splitlines()
    assert len(summary) == 4
    assert cli(*odd("Telling"), arms, "num_samples=1").status == 0
    assert len(rows(workdir / "here")) == 54


def test_a_cancelled_request_is_no_error_and_the_next_is_asked(cli, workdir):
    finished = cli(*odd("Cancellable"), "arms=[cancel]", "num_samples=3")
    assert finished.status == 0, finished.err
    found = rows(workdir / "here")
    assert [row["ordinal"] for row in found] == [1, 0, 0, 1, 3, 2]
    assert [row["finish_reason"] for row in found] == ["cancelled", "stop"] * 3
    assert [row["correct"] for row in found] == [None, True] * 3
    assert manifest(workdir / "here")["arms"]["cancel"]["actions"] == ["cancel"]


def test_a_request_that_is_over_before_it_is_cancelled_is_recorded_as_it_is(cli, workdir):
    finished = cli(*odd("Cancellable", "deaf=true"), "arms=[cancel]", "num_samples=1")
    assert finished.status == 0, finished.err
    assert [row["finish_reason"] for row in rows(workdir / "here")] == ["stop", "stop"]
    assert rows(workdir / "here")[0]["score"] is None


def test_the_probe_with_other_rings_and_chunks_and_around_their_edges(cli, workdir):
    mine = ("backend=offload", "device=cpu", "length=1024", "out=here", "num_samples=1")
    small = ("backend.kvcache_block_size=128", "backend.chunk_tokens=256")
    arms = "arms=[persistent,slots_2,chunks_512,boundary,reference,fresh]"
    finished = cli(*mine, *small, arms, "backend@reference=gpu_only")
    assert finished.status == 0, finished.err
    held = manifest(workdir / "here")["arms"]
    assert held["persistent"]["settings"]["num_gpu_blocks"] == 4
    assert held["slots_2"]["settings"]["num_gpu_blocks"] == 2
    assert held["chunks_512"]["settings"]["chunk_tokens"] == 512
    assert held["reference"]["backend"] == "gpu_only"
    assert "memory plan" in finished.err
    cut = rows(workdir / "here", "boundary")
    lengths = [row["prompt_tokens"] for row in cut]
    assert [one % 128 for one in lengths] == [127, 0, 1] * 2
    assert lengths[1] % 256 == 128
    assert lengths[4] % 256 == 0
    assert all(row["correct"] for row in rows(workdir / "here"))
    beside = [row for row in rows(workdir / "here", "reference") if row["step"] >= 10_000_000]
    assert [row["prompt_sha256"] for row in beside] == [row["prompt_sha256"] for row in cut]
    (fresh,) = rows(workdir / "here", "fresh")
    (persistent,) = rows(workdir / "here", "persistent")
    assert fresh["logits_digest"] == persistent["logits_digest"]


def test_where_transformers_cannot_load_the_model_the_reference_is_gpu_only(
    cli, workdir, monkeypatch
):
    from ruler_bench import config

    stand_ins = {
        "hf": {"_target_": "odd_engines.Fragile", "start": str(HERE / "odd_engines.py")},
        "gpu_only": {"_target_": "odd_engines.Plain"},
    }
    monkeypatch.setattr(config, "_default_backend", stand_ins.get)
    finished = cli(*ORACLE, "arms=[persistent,reference]", "num_samples=1", "out=here")
    assert finished.status == 0, finished.err
    assert "arm reference: hf cannot load the model (OSError: " in finished.err
    assert manifest(workdir / "here")["arms"]["reference"]["backend"] == "gpu_only"


def test_dry_run_counts_each_arm_and_starts_nothing(cli, workdir, monkeypatch):
    mine = (*ORACLE, "out=here", "arms=[persistent,fresh,axa]", "backend.delay_seconds=0.2")
    assert cli(*mine[:3], "arms=[persistent]", "out=here", mine[-1], "num_samples=2").status == 0

    def build(*_):
        raise AssertionError("an engine was started")

    monkeypatch.setattr("ruler_bench.engines.LocalLife", build)
    monkeypatch.setattr("ruler_bench.engines.ProcessLife", build)
    finished = cli(*mine, "num_samples=4", "dry_run=true")
    assert finished.status == 0, finished.err
    assert "requests: 18 to run, 2 recorded already" in finished.out
    assert "persistent: 2 to run, 2 recorded" in finished.out
    assert "axa: 12 to run, 0 recorded" in finished.out
    assert "fresh: 4 to run, 0 recorded, 4 engines" in finished.out
    assert "s, as recorded in this folder (0.2" in finished.out
    some = cli(*mine, "num_samples=4", "dry_run=true", "fresh.on=suspects", "fresh.audit=1")
    assert "requests: at most 18 to run" in some.out
    assert "fresh: at most 4 to run" in some.out
    unknown = cli(*mine, "num_samples=4", "dry_run=true", "out=new")
    assert "not known before a first sample has run" in unknown.out


BAD_ARMS = {
    ("arms=[frsh]",): "unknown arm 'frsh'. Did you mean 'fresh'?",
    ("arms=[]",): "names no arm",
    ("arms=[fresh,fresh]",): "names an arm twice",
    ("arms=[persistent,slots]",): "unknown arm 'slots'. Did you mean 'slots_2'?",
    ("arms=[persistent,slots_2]",): "arm slots_2: backends.oracle.Oracle has no setting",
    ("arms=[persistent,boundary]",): "arm boundary: the backend oracle has no kvcache_block_size",
    ("arms=[persistent,cancel]",): "arm cancel: backends.oracle.Oracle has no method cancel",
    ("arms=[persistent,length_mix]", "length=600"): "arm length_mix: length=600 leaves no room",
    ("experiment=leakcheck", "arms=[persistent]"): "one arm alone gives no verdict. A leak needs",
    ("workers=0",): "workers=0: out of range; must be an integer in 1 to",
    ("workers=-1",): "workers=-1: out of range",
    ("workers=2", "fresh=inprocess"): "workers=2: with fresh=inprocess one engine lives at a time",
    ("fresh=inproces",): "unknown fresh 'inproces'. Did you mean 'inprocess'?",
    ("fresh=null",): "fresh=null: must be one of inprocess, process.",
    ("fresh.on=suspect",): "unknown fresh.on 'suspect'. Did you mean 'suspects'?",
    ("fresh.strt=spawn",): "unknown key fresh.strt. Did you mean fresh.start?",
    ("fresh.start=fork",): "unknown fresh.start 'fork'. Did you mean 'forkserver'?",
    ("fresh.audit=3",): "fresh.audit=3: with fresh.on=all every sample is asked anyway",
    ("fresh.audit=-1", "fresh.on=suspects"): "fresh.audit=-1: out of range",
    ("arms=[fresh]", "fresh.on=suspects"): "names no arm that could find suspects",
    ("fresh.on=suspects",): "fresh.on: arms=[persistent] has no arm with an engine for each sample",
    ("fresh.on=suspects", "fresh.audit=1"): "fresh.audit: arms=[persistent] has no arm with an",
    ("workers=2", "arms=[persistent,aged]"): "workers: arms=[persistent,aged] has no arm with an",
    ("timeout_seconds=5", "fresh=inprocess"): "timeout_seconds: with fresh=inprocess nothing can",
    ("stop_on=leak",): "stop_on: arms=[persistent] never asks the same twice",
    ("stop_on=leak", "arms=[fresh,reference]"): "stop_on: arms=[fresh,reference] never asks",
    ("max_unstable=0.1",): "max_unstable: arms=[persistent] gives no verdict",
    ("backend@reference=hf",): "backend@reference: arms=[persistent] has no arm reference",
    ("stop_on=lek",): "unknown stop_on 'lek'. Did you mean 'leak'?",
    ("timeout_seconds=0",): "timeout_seconds=0: out of range; must be above 0",
    ("max_unstable=2",): "max_unstable=2: out of range; must be a share, 0 to 1",
    ("reference.dtype=x",): "unknown key reference.dtype: choose the reference first, backend@ref",
    ("backend@reference=hf", "reference.dtpe=x"): "Did you mean reference.dtype?",
    ("arms=[reference]", "backend@reference=hff"): "unknown backend 'hff'. Did you mean 'hf'?",
}


REFUSED = (
    ("length=1",),
    ("length=60",),
    ("length=200000",),
    ("arms=[persistent,length_mix]", "length=600"),
    ("backend=gpu_only", "arms=[persistent,boundary]", "backend.chunk_tokens=4096"),
    ("backend=gpu_only", "backend.max_model_len=512"),
    ("backend=gpu_only", "backend.max_model_len=1000000"),
    ("backend=gpu_only", "backend.host_memory_gb=0.02"),
    ("backend=gpu_only", "backend.device_memory_gb=0.001"),
    ("backend=gpu_only", "backend.chunk_tokens=0"),
    ("backend=gpu_only", "backend.dtype=float8"),
    ("backend=gpu_only", "backend.fault=nothing_known"),
    ("backend=offload", "backend.num_gpu_blocks=1"),
    ("backend=offload", "arms=[slots_1]"),
    ("backend=offload_layerwise", "arms=[slots_1]"),
    ("arms=[reference]", "backend@reference=offload", "reference.num_gpu_blocks=1"),
    ("tokenizer=/no/such/folder",),
    ("template=nothing",),
    ("out=used", "seed=7"),
    ("out=used", "backend.wrong=[0]"),
    ("out=used", "length=2048"),
    ("out=file",),
    ("out=file/below",),
    ("out=" + "x" * 300,),
    ("out=taken",),
    ("out=foreign",),
    ("out=damaged",),
    ("out=odd",),
    ("out=lost",),
    ("backend.script=no_such_file",),
    ("backend.delay_seconds=-1.0",),
    ("backend=openai",),
    ("backend=openai", "backend.base_url=ftp://x"),
    ("backend=openai", "backend.base_url=http://127.0.0.1:9/v1", "backend.concurrency=0"),
    ("backend=openai", "backend.serve.command=no_such_program --port {port}"),
    ("arms=[reference]", "backend@reference=openai"),
)
"""Settings that a run refuses before or when it starts its engine."""


@pytest.fixture(scope="module")
def folders(cli_in, tmp_path_factory):
    """Folders that a run must not go on in, each for another reason."""
    root = tmp_path_factory.mktemp("folders")
    assert cli_in(root, *ORACLE, "num_samples=1", "out=used").status == 0
    for name in ("damaged", "odd", "lost", "taken"):
        shutil.copytree(root / "used", root / name)
    line = (root / "used" / "records.jsonl").read_text()
    (root / "damaged" / "records.jsonl").write_text("{}\n" + line)
    (root / "odd" / "records.jsonl").write_text(line.replace('"score": 100', '"score": 50'))
    (root / "lost" / "manifest.json").unlink()
    (root / "file").write_text("")
    (root / "foreign").mkdir()
    (root / "foreign" / "thesis.txt").write_text("")
    with (root / "taken" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield root


@pytest.mark.parametrize("line", REFUSED, ids=lambda one: " ".join(one)[:60])
def test_a_dry_run_refuses_what_a_run_refuses_in_the_same_words(cli, monkeypatch, folders, line):
    monkeypatch.chdir(folders)
    before = {one: one.read_bytes() for one in folders.rglob("*") if one.is_file()}
    line = (*ORACLE, "num_samples=2", *line, "fresh=inprocess")  # torch is here already
    dry = cli(*line, "dry_run=true")
    assert {one: one.read_bytes() for one in folders.rglob("*") if one.is_file()} == before
    run = cli(*line)
    assert (dry.status, run.status) == (2, 2)
    assert dry.err.splitlines()[-1] == run.err.splitlines()[-1]
    assert dry.err.startswith("error: ")


def test_a_dry_run_with_overwrite_counts_nothing_as_recorded(cli, monkeypatch, folders):
    monkeypatch.chdir(folders)
    mine = (*ORACLE, "num_samples=2", "out=used", "dry_run=true")
    assert "1 to run, 1 recorded already" in cli(*mine).out
    assert "2 to run, 0 recorded already" in cli(*mine, "overwrite=true").out
    # Other settings are no hindrance to a new beginning.
    assert cli(*mine, "overwrite=true", "seed=7").status == 0


@pytest.mark.parametrize("length", [600, 4096])
def test_advice_about_memory_can_be_followed(cli, length):
    mine = ("backend=gpu_only", "device=cpu", "num_samples=1", "backend.chunk_tokens=null")
    mine = (*mine, "backend.host_memory_gb=0.0225", "dry_run=true")
    refused = cli(*mine, f"length={length}")
    assert refused.status == 2
    assert "max_model_len" not in refused.err
    found = re.search(r"use length=(\d+) or less", refused.err)
    if found is None:
        assert "raise that limit, or take a smaller model" in refused.err
    else:
        followed = cli(*mine, f"length={found[1]}")
        assert followed.status == 0, followed.err


USED = (
    ("workers=1",),
    ("timeout_seconds=5",),
    ("stop_on=leak", "arms=[repeat]"),
    ("stop_on=leak", "arms=[persistent,fresh]"),
    ("stop_on=null",),
    ("backend@reference=oracle", "arms=[persistent,reference]"),
    ("experiment=quick20", "backend=oracle", "arms=[persistent]", "length=1024"),
)


@pytest.mark.parametrize("line", USED, ids=" ".join)
def test_settings_that_are_used_are_taken(cli, line):
    finished = cli(*ORACLE, *line, "num_samples=2", "dry_run=true")
    assert finished.status == 0, finished.err


@pytest.mark.parametrize("line", BAD_ARMS, ids=" ".join)
def test_bad_input_is_one_line_with_status_2(cli, workdir, line):
    finished = cli(*ORACLE, "num_samples=2", *line)
    assert finished.status == 2
    assert BAD_ARMS[line] in finished.err
    (said,) = finished.err.splitlines()
    assert said.startswith("error: ")
    assert not list(workdir.glob("results/*"))


def test_a_backend_whose_engine_turns_out_to_lack_cancel_is_said(cli):
    finished = cli(*odd("unlike_a_class"), "arms=[persistent,cancel]", "num_samples=1")
    assert finished.status == 2
    assert "arm cancel: odd_engines.unlike_a_class has no method cancel" in finished.err


def test_damaged_arms_in_a_manifest_are_said(cli, workdir):
    assert cli(*ORACLE, "num_samples=1", "out=here").status == 0
    held = manifest(workdir / "here")
    held["arms"]["persistent"]["lifetime"] = "eternal"
    (workdir / "here" / "manifest.json").write_text(json.dumps(held))
    finished = cli(*ORACLE, "num_samples=2", "out=here")
    assert finished.status == 2
    assert "manifest.json is damaged (arms.persistent.lifetime is 'eternal')" in finished.err


# --- stopped on the way -------------------------------------------------------------------------

SLOW = (*ORACLE, "num_samples=4", "backend.delay_seconds=0.5", "out=here")
ARMS = "arms=[persistent,axa,fresh]"
TOTAL = 4 + 12 + 4


def begin(workdir, count, *more):
    """Start the command and return it once so many records are there."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ruler_bench", *SLOW, ARMS, *more],
        cwd=workdir,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    path = workdir / "here" / "records.jsonl"
    deadline = time.monotonic() + 600  # a process may take long to start on a busy machine
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return process
        time.sleep(0.02)
    raise AssertionError(process.communicate())


def answers(folder):
    latest = {(row["arm"], row["step"]): row["output"] for row in rows(folder)}
    assert len(latest) == TOTAL
    return latest


def test_a_run_that_is_killed_then_interrupted_loses_nothing_and_goes_on(cli, workdir):
    path = workdir / "here" / "records.jsonl"
    killed = begin(workdir, 9)  # in the second arm
    killed.kill()
    killed.communicate()
    kept = path.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]

    interrupted = begin(workdir, 17, "workers=2")  # in the third, of several engines at once
    interrupted.send_signal(signal.SIGINT)
    out, err = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 130, err
    assert "niah_single_1" in out
    assert "Traceback" not in err
    assert path.read_bytes().startswith(kept)
    kept = path.read_bytes()
    assert 17 <= len(rows(workdir / "here")) < TOTAL

    assert cli(*SLOW, ARMS).status == 0
    assert path.read_bytes().startswith(kept)
    quick = [one for one in SLOW if "delay" not in one and "out=" not in one]
    assert cli(*quick, ARMS, "out=unbroken").status == 0
    assert answers(workdir / "here") == answers(workdir / "unbroken")
    assert {row["life"] for row in rows(workdir / "here", "persistent")} == {1}
    trios = [row for row in rows(workdir / "here", "axa") if row["life"] == 2]
    assert trios[0]["step"] % 3 == 0

"""Whole runs over HTTP: every fault of a server gets its verdict or its recorded error."""

import ast
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import trustme

from ruler_bench.minimise import main as minimise

HERE = Path(__file__).parent
RUN = ("backend=openai", "device=cpu", "length=1024", "out=here")
QUICK = ("fresh=inprocess", "backend.backoff_seconds=0.01", "backend.retries=1")


def _serving():
    spec = importlib.util.spec_from_file_location("serving", HERE / "serving.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


helper = _serving()


@pytest.fixture
def managed():
    """Start a server that the run does not manage; returns the override that names it."""
    with ExitStack() as stack:
        yield lambda *options: f"backend.base_url={stack.enter_context(helper.serving(*options))}"


def rows(folder, arm=None):
    found = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return [row for row in found if arm in (None, row["arm"])]


def verdict(folder):
    return json.loads((folder / "verdict.json").read_text())


ERRORS = {
    "unavailable": "answers 503 (loading) (2 tries)",
    "hang": "gave no whole answer within backend.request_seconds=0.5 (2 tries)",
    "cut": "the stream was cut after",
    "html": "answers with text/html",
    "empty_choices": "choices is empty",
    "redirect": "redirects to http://elsewhere.invalid",
    "nan": "NonFiniteLogits: ",
    "garbage": "the server sent no JSON",
    "error_event": "the server reports an error: out of memory",
}


def test_requests_that_fail_for_good_are_recorded_and_asked_again(cli, workdir):
    schedule = ",".join(f"{number}:{fault}" for number, fault in enumerate(ERRORS, start=1))
    with helper.serving("--schedule", schedule) as url:
        mine = (*RUN, *QUICK, f"backend.base_url={url}", "backend.request_seconds=0.5")
        finished = cli(*mine, "num_samples=11")
    assert finished.status == 1, finished.err
    first = rows(workdir / "here")
    assert [row["ordinal"] for row in first] == list(range(11))
    assert [row["correct"] for row in first] == [True, *[None] * len(ERRORS), True]
    for row, words in zip(first[1:], ERRORS.values(), strict=False):
        assert words in row["error"]
    kept = (workdir / "here" / "records.jsonl").read_bytes()
    port = url.split(":")[2].removesuffix("/v1")
    with helper.serving("--port", port):
        assert cli(*mine, "num_samples=11").status == 0
    assert (workdir / "here" / "records.jsonl").read_bytes().startswith(kept)
    latest = {row["ordinal"]: row for row in rows(workdir / "here")}
    assert all(row["correct"] for row in latest.values())


LEAKS = {
    "previous_answer": ("persistent", "shuffled"),
    "stale_on_repeat": ("persistent", "repeat"),
    "rows_swapped": ("persistent", "concurrent_4"),
    "cancel_ignored": ("persistent", "cancel"),
    "evicted": ("persistent", "flood"),
}


@pytest.mark.parametrize("fault", LEAKS)
def test_a_leak_is_proven_by_a_canary_though_no_server_can_be_started(cli, workdir, managed, fault):
    slow = ("--first-seconds", "0.05") if fault == "cancel_ignored" else ()
    arms = f"arms=[{','.join(LEAKS[fault])}]"
    finished = cli(*RUN, *QUICK, managed("--fault", fault, *slow), arms, "num_samples=4")
    assert finished.status == 3, finished.err + finished.out
    assert finished.out.startswith("niah_single_1: LEAK.")
    said = verdict(workdir / "here")
    assert any(one["kind"] == "canary" for index in said["indices"] for one in index["evidence"])
    assert any("the server is managed by others" in one for one in said["notes"])
    assert all(one["error"] is None for one in rows(workdir / "here"))


def test_a_sound_server_is_never_accused(cli, workdir, managed):
    arms = "arms=[persistent,shuffled,repeat,cancel,resend,concurrent_3,two_questions]"
    server = managed("--first-seconds", "0.02")
    mine = (*RUN, *QUICK, server, "task=niah_multikey_2", arms, "num_samples=2")
    finished = cli(*mine)
    assert finished.status == 0, finished.err + finished.out
    said = verdict(workdir / "here")
    assert said["verdict"] == "ok"
    assert "without fresh a leak is not excluded" in said["sentence"]
    (leak,) = [one for one in said["support"] if one["verdict"] == "leak"]
    assert leak["how"].endswith("otherwise needs fresh and fresh_again")
    found = rows(workdir / "here", "resend")
    assert [row["finish_reason"] for row in found] == ["cancelled", "stop"] * 2
    assert cli(*mine).status == 0


@pytest.mark.parametrize("is_managed", [False, True])
def test_a_stale_prefix_is_proven_by_two_questions(cli, workdir, managed, is_managed):
    """Without fresh servers: the wrong answers are those to what was asked before, each time."""
    server = managed if is_managed else helper.as_override
    arms = "arms=[persistent,two_questions]"
    more = (server("--fault", "warm_prefix"), arms, "task=niah_multikey_2", "num_samples=2")
    finished = cli(*RUN, *QUICK, *more)
    assert finished.status == 3, finished.err + finished.out
    assert "prints the answer to another question on its context, asked before" in finished.out
    found = rows(workdir / "here", "two_questions")
    # A server of others was asked the sample by the arm before.
    assert [row["correct"] for row in found] == ([False, True] if is_managed else [True, False]) * 2


def test_fresh_servers_tell_a_leak(cli, workdir):
    server = helper.as_override("--fault", "previous_answer")
    arms = "arms=[persistent,fresh]"
    mine = (*RUN, server, arms, "num_samples=3", "fresh.on=suspects")
    finished = cli(*mine)
    assert finished.status == 3, finished.err
    assert [row["correct"] for row in rows(workdir / "here", "persistent")] == [True, False, False]
    assert [row["correct"] for row in rows(workdir / "here", "fresh")] == [True, True]
    assert len(list((workdir / "here" / "servers").iterdir())) == 3


def test_a_server_that_starts_anew_in_mid_run_costs_one_request(cli, workdir):
    server = helper.as_override("--fault", "restart", "--at", "1")
    mine = (*RUN, server, "num_samples=4", "backend.retries=6", "backend.backoff_seconds=0.1")
    finished = cli(*mine)
    assert finished.status == 1, finished.err
    found = rows(workdir / "here")
    assert [row["correct"] for row in found] == [True, None, True, True]
    assert "the stream was cut" in found[1]["error"]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_server_that_dies_is_followed_by_another(cli, workdir, concurrency):
    server = helper.as_override("--fault", "die", "--at", "4")
    mine = (*RUN, server, "num_samples=6", f"backend.concurrency={concurrency}")
    finished = cli(*mine)
    assert finished.status == 1, finished.err
    found = {row["ordinal"]: row for row in rows(workdir / "here")}
    assert sorted(found) == [0, 1, 2, 3, 4, 5]
    (bad,) = [row for row in found.values() if row["error"]]
    assert bad["error"].startswith("EngineDied: the server ended with status 7;")
    assert {row["life"] for row in found.values()} == {1, 2}
    assert sum(bool(row["correct"]) for row in found.values()) == 5


def test_several_in_flight_are_recorded_as_they_come_and_a_run_goes_on(cli, workdir, managed):
    mine = (*RUN, *QUICK, managed("--fault", "cut", "--at", "5"), "backend.concurrency=4")
    finished = cli(*mine, "num_samples=6")
    assert finished.status == 1, finished.err
    found = rows(workdir / "here")
    assert sorted(row["position"] for row in found) == list(range(6))
    assert all(row["predecessor"] == (row["position"] - 1 or 0) for row in found if row["position"])
    kept = (workdir / "here" / "records.jsonl").read_bytes()
    assert cli(*mine, "num_samples=8").status == 0
    assert (workdir / "here" / "records.jsonl").read_bytes().startswith(kept)
    assert {row["ordinal"] for row in rows(workdir / "here")} == set(range(8))
    refused = cli(*RUN, managed(), "num_samples=8")
    assert refused.status == 2
    assert "was made with other settings" in refused.err


REFUSED = {
    ("arms=[persistent,fresh]",): "arm fresh: the server is managed by others, and what it keeps",
    ("arms=[persistent,shuffled]", "backend.concurrency=2"): "add the arm concurrent_2",
    ("arms=[repeat]", "backend.concurrency=2"): "ask one request at a time, in order",
    ("arms=[two_questions]",): "arm two_questions: the task niah_single_1 hides one needle alone",
    ("backend.modl=x",): "unknown key backend.modl. Did you mean backend.model?",
    ("backend.serve.comand=x",): "Did you mean backend.serve.command?",
    ("backend.verify=5",): "backend.verify=5: must be bool or str",
    ("backend.model=x", "backend.retries=0"): "The server offers needles.",
}


@pytest.mark.parametrize("line", REFUSED, ids=" ".join)
def test_what_cannot_be_is_one_line_with_status_2(cli, workdir, managed, line):
    finished = cli(*RUN, *QUICK[:1], managed(), "num_samples=2", *line)
    assert finished.status == 2
    (said,) = [one for one in finished.err.splitlines() if one.startswith("error")]
    assert REFUSED[line] in said
    assert "Traceback" not in finished.err
    assert not (workdir / "here").exists()


def test_arms_for_servers_are_refused_of_engines_that_take_one_request(cli):
    finished = cli("backend=oracle", "device=cpu", "length=1024", "arms=[concurrent_2]")
    assert finished.status == 2
    assert "arm concurrent_2: backends.oracle.Oracle has no setting concurrency" in finished.err


def test_what_needs_new_engines_later_is_refused_too(cli, workdir, managed):
    server = managed("--fault", "previous_answer")
    assert cli(*RUN, server, "arms=[persistent,shuffled]", "num_samples=3").status == 3
    finished = cli("here", "--ordinal", "1", entry=minimise)
    assert finished.status == 2
    assert "minimise: the server is managed by others" in finished.err


KEY = "sk-secret-1234"


def assert_nowhere(folder, *printed):
    texts = [one.read_bytes() for one in folder.rglob("*") if one.is_file()]
    assert sum(b"Bearer (key)" in one for one in texts) >= 2  # the server's logs, the answers
    assert not any(KEY.encode() in one for one in texts)
    assert not any(KEY in one for one in printed)


def test_the_key_is_nowhere(cli, workdir, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    server = helper.as_override("--fault", "echo", "--key-variable", "MY_KEY")
    mine = (*RUN, *QUICK, server, "backend.api_key_env=MY_KEY", "num_samples=2")
    finished = cli(*mine, "arms=[persistent,fresh]")
    assert finished.status == 0, finished.err
    assert_nowhere(workdir, finished.out, finished.err)
    held = json.loads((workdir / "here" / "manifest.json").read_text())
    assert held["config"]["backend"]["api_key_env"] == "MY_KEY"
    assert held["backend_in_force"]["has_key"] is True
    monkeypatch.setenv("MY_KEY", "sk-another-1234")
    monkeypatch.setenv("OTHER", KEY)
    server = helper.as_override("--fault", "echo", "--key-variable", "OTHER")
    refused = cli(*RUN, *QUICK, server, "backend.api_key_env=MY_KEY", "out=there")
    assert refused.status == 2
    assert "the key in MY_KEY is not accepted" in refused.err
    assert "sk-another" not in refused.err


@pytest.mark.parametrize("fault", ["echo_late", "echo_garbage"])
def test_the_key_is_in_no_error_nor_in_a_part(cli, workdir, monkeypatch, managed, fault):
    monkeypatch.setenv("MY_KEY", KEY)
    mine = (*RUN, *QUICK, managed("--fault", fault), "backend.api_key_env=MY_KEY", "num_samples=1")
    finished = cli(*mine)
    assert finished.status == 1, finished.err
    assert "Bearer (key)" in rows(workdir / "here")[0]["error"]
    texts = [one.read_text() for one in workdir.rglob("*") if one.is_file()]
    assert not any("sk-sec" in one for one in (*texts, finished.out, finished.err))


def outside(workdir):
    """Files beside the run folder and the cache, which the first run of a session fills."""
    cache = Path(os.environ["RULER_BENCH_CACHE"])
    found = workdir.parent.rglob("*")
    return {one for one in found if "here" not in one.parts and cache not in (one, *one.parents)}


def test_nothing_that_a_server_sends_is_evaluated_or_leaves_the_folder(
    cli, workdir, monkeypatch, managed
):
    """An answer, and a model's name, in the languages of whatever may read them later."""
    planted = "planted-5821"
    monkeypatch.setenv("PLANTED", planted)
    before = outside(workdir)
    server = managed("--fault", "hostile", "--models", "../../${oc.env:PLANTED}/<script>x</script>")
    finished = cli(*RUN, *QUICK, server, "arms=[persistent,shuffled]", "num_samples=2")
    assert finished.status in (0, 1, 5), finished.err
    (first, *_) = rows(workdir / "here")
    assert first["output"].startswith(helper.faulty.HOSTILE[:40])  # kept as it came
    held = json.loads((workdir / "here" / "manifest.json").read_text())["backend_in_force"]
    assert held["model"] == "../../${oc.env:PLANTED}/<script>x</script>"
    texts = {one.name: one.read_text() for one in (workdir / "here").rglob("*") if one.is_file()}
    assert not any(planted in one for one in (*texts.values(), finished.out, finished.err))
    assert not any("1337" in one for one in (finished.out, finished.err))  # 7 * 191
    assert "\x1b]0" not in finished.out + finished.err
    assert not any("<script>" in text for name, text in texts.items() if name.endswith(".html"))
    assert not any("\n=HYPER" in text for name, text in texts.items() if name.endswith(".csv"))
    assert outside(workdir) == before
    assert not [one for one in (workdir / "here").rglob("*") if one.name in ("made", "x")]


def test_no_module_of_the_backend_can_evaluate_what_it_is_sent():
    """Names that run or build anything from data; the answers go through json alone."""
    import backends.openai_server as package

    forbidden = {"eval", "exec", "compile", "__import__", "pickle", "marshal", "yaml", "torch"}
    for path in Path(package.__file__).parent.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        called = {
            one.func.id for one in nodes if isinstance(one, ast.Call) and hasattr(one.func, "id")
        }
        imported = {name.name for one in nodes if isinstance(one, ast.Import) for name in one.names}
        assert not forbidden & (called | imported), path.name


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(path)
    return path


BAD_INPUT = {
    "wrong address": ((), "/v1", "/v2", "answers 404 (a web page, 'Not Found')"),
    "refused connection": ((), "127.0.0.1:", "127.0.0.2:", "(Connection refused)"),
    "self-signed certificate": (("--certificate",), "", "", "is not trusted"),
    "missing key": (("--key-variable", "RIGHT"), "", "", "set the environment variable MY_KEY"),
    "another tokenizer": (("--more-tokens", "3"), "", "", "(+3): they are not the same tokenizer"),
    "short context": (
        ("--context", "512", "--tell-context"),
        *("", ""),
        "takes 512 tokens of prompt and generation for needles, and this run needs",
    ),
}


@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_ends_a_run_with_one_line(cli, monkeypatch, managed, certificate, what):
    monkeypatch.setenv("RIGHT", KEY)
    monkeypatch.delenv("MY_KEY", raising=False)
    options, old, new, words = BAD_INPUT[what]
    if options == ("--certificate",):
        options = ("--certificate", certificate)
    if what == "another tokenizer":
        options = (*options, "--tokenizer", helper.TOKENIZER)
    address = managed(*options)
    mine = (*RUN, *QUICK, address.replace(old, new), "backend.api_key_env=MY_KEY")
    more = ("backend.prompt=text",) if what == "another tokenizer" else ()
    finished = cli(*mine, *more, "num_samples=2")
    assert finished.status == 2, finished.out
    errors = [one for one in finished.err.splitlines() if one.startswith("error")]
    assert len(errors) == 1
    assert words in errors[0]
    assert "Traceback" not in finished.err


def test_a_prompt_beyond_a_limit_that_the_server_does_not_tell_is_an_error_of_it(
    cli, workdir, managed
):
    server = managed("--context", "512", "--tokenizer", helper.TOKENIZER)
    finished = cli(*RUN, *QUICK, server, "num_samples=1")
    assert finished.status == 1, finished.err
    assert rows(workdir / "here")[0]["error"].startswith("PromptTooLong: ")
    assert "maximum context length is 512 tokens" in rows(workdir / "here")[0]["error"]


def test_an_interrupt_ends_the_server_too(workdir):
    server = helper.as_override("--fault", "hang", "--at", "1")
    process = subprocess.Popen(
        [sys.executable, "-m", "ruler_bench", *RUN, server, "num_samples=4"],
        cwd=workdir,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    path = workdir / "here" / "records.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (path.exists() and path.read_bytes()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "niah_single_1" in out
    assert "Traceback" not in err
    assert len(rows(workdir / "here")) == 1
    (log,) = (workdir / "here" / "servers").iterdir()
    while time.monotonic() < deadline and "ended" not in log.read_text():
        time.sleep(0.02)
    assert "ended" in log.read_text()


def test_a_server_that_ends_at_its_start_is_said_by_the_name_of_its_setting(cli, workdir):
    finished = cli(*RUN, "backend=openai", "backend.serve.command='false {port}'", "num_samples=1")
    assert finished.status == 2
    (said,) = [one for one in finished.err.splitlines() if one.startswith("error")]
    assert said.startswith("error: backend.serve.command: the server ended with status 1")
    assert "Traceback" not in finished.err

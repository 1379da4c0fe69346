"""Engines in processes of their own: answers, ends, and what comes back of each."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backends.base import ConfigurationError, Generation, Request
from ruler_bench import lives
from ruler_bench.errors import UsageError
from ruler_bench.lives import Failure, LocalLife, ProcessLife, StartFailed

PROMPT = (
    "One of the special magic numbers for big-house is: 1234567.\n"
    "What is the special magic number for big-house mentioned in the provided text?"
)
HARNESS = {
    "model_path": "none",
    "device": "cpu",
    "threads": 1,
    "max_model_len": 1024,
    "dtype": "auto",
}


@pytest.fixture(autouse=True)
def _engines(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)


def request(number=0):
    return Request(number, PROMPT, (1, 2, 3), 16)


def start(name, timeout_seconds=60, how="forkserver", **settings):
    settings = {"_target_": f"odd_engines.{name}", **settings}
    return ProcessLife(settings, HARNESS, how, timeout_seconds)


@pytest.fixture
def oracle():
    life = ProcessLife({"_target_": "backends.oracle.Oracle"}, HARNESS, "forkserver", 60)
    yield life
    life.close()


def test_an_engine_in_a_process_answers_as_one_here(oracle):
    here = LocalLife({"_target_": "backends.oracle.Oracle"}, HARNESS)
    assert oracle.settings == here.settings
    assert oracle.can_cancel == here.can_cancel is False
    answers = [one.ask(request()).answer for one in (oracle, here)]
    assert all(isinstance(one, Generation) and one.text == " 1234567" for one in answers)
    assert oracle.close() is None
    assert oracle.close() is None


def test_the_fork_server_has_one_thread_and_has_built_nothing(oracle):
    from multiprocessing.forkserver import _forkserver

    server = _forkserver._forkserver_pid
    assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1
    assert oracle._process.pid != os.getpid()


def test_each_process_starts_from_nothing():
    texts = []
    for _ in range(2):
        life = start("LeakyModule")
        texts.append(life.ask(Request(0, PROMPT.replace("1234567", str(len(texts))), (1,), 1)))
        life.close()
    assert [one.answer.text for one in texts] == [" 0", " 1"]


def test_a_process_that_dies_is_a_failure_with_its_signal_and_what_it_printed():
    life = start("Fragile", die=1)
    assert isinstance(life.ask(request(0)).answer, Generation)
    failure = life.ask(request(1)).answer
    assert failure.is_over
    assert failure.message == (
        "EngineDied: the engine's process ended during this request (signal SIGKILL)"
    )
    again = life.ask(request(2)).answer
    assert isinstance(again, Failure)
    assert life.close() is None


def test_a_process_that_hangs_is_ended_and_said():
    life = start("Fragile", hang=0, timeout_seconds=1)
    process = life._process
    failure = life.ask(request(0)).answer
    assert failure.is_over
    assert failure.message.startswith("EngineHung: this request took more than timeout_seconds=1;")
    assert not process.is_alive()


def test_an_error_of_a_request_leaves_the_engine_alive():
    life = start("Fragile", fail=0)
    failure = life.ask(request(0)).answer
    assert failure.message == "RuntimeError: nothing to say"
    assert "Traceback" in failure.traceback
    assert not failure.is_over
    assert isinstance(life.ask(request(1)).answer, Generation)
    assert life.close() is None


def test_a_wrong_setting_comes_back_as_what_it_is():
    with pytest.raises(UsageError, match=r"Did you mean 'backend\.hang'"):
        start("Fragile", hng=1)
    settings = {"_target_": "backends.oracle.Oracle", "wrong": ["x"]}
    with pytest.raises(ConfigurationError, match="'x' is no position"):
        ProcessLife(settings, HARNESS, "forkserver", 60)


def test_an_engine_that_cannot_be_built_is_told_with_its_traceback(tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(StartFailed, match="Address already in use") as error:
        start("Fragile", start=str(tmp_path / "taken"))
    assert "Traceback" in error.value.failure.traceback


def test_settings_that_no_process_can_be_given_are_said():
    with pytest.raises(UsageError, match="cannot be handed to a new process") as error:
        start("Fragile", start=threading.Lock())
    assert "fresh=inprocess" in str(error.value)
    assert "\n" not in str(error.value)


def test_spawn_gives_the_same():
    life = start("Plain", how="spawn")
    assert life.ask(request()).answer.text == " 1234567"
    assert life.close() is None


def test_a_request_is_cancelled_on_its_way():
    life = start("Cancellable")
    assert life.can_cancel
    failure = life.ask(request(0), cancel_after_seconds=0.01).answer
    assert failure.message == "RequestCancelled: request 0 was cancelled"
    assert isinstance(life.ask(request(1)).answer, Generation)
    life.close()


def test_processes_can_be_ended_from_another_thread():
    life = start("Fragile", hang=0)
    timer = threading.Timer(0.3, lives.kill_processes)
    timer.start()
    failure = life.ask(request(0)).answer
    timer.join()
    assert "signal SIGKILL" in failure.message


HARNESS_THAT_WAITS = """
import sys
sys.path.insert(0, {tests!r})
from test_lives import lives, request, start
lives.MODELS_PRELOADED = ()
life = start("Fragile", hang=0)
print(life._process.pid, flush=True)
life.ask(request(0))
"""


def test_an_engine_does_not_outlive_the_harness():
    script = HARNESS_THAT_WAITS.format(tests=str(Path(__file__).parent))
    harness = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    engine = int(harness.stdout.readline())
    harness.kill()
    harness.communicate()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and _is_alive(engine):
        time.sleep(0.02)
    assert not _is_alive(engine)


def _is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_what_an_engine_prints_is_kept(capfd):
    life = start("Plain")
    assert life.printed() == []
    life.close()
    assert capfd.readouterr().err == ""


def test_what_an_engine_prints_is_told_once():
    life = start("Slow")
    assert [life.ask(request(one)).answer.text for one in (3, 4)] == [" 1234567"] * 2
    assert life.printed() == ["asked 3", "asked 4"]
    assert life.printed() == []
    life.close()


def test_an_engine_is_given_its_timeout_to_close_and_no_more():
    life = start("Slow", timeout_seconds=1, close_seconds=30)
    failure = life.close()
    assert failure.message.startswith("EngineHung: close() took more than timeout_seconds=1;")


def test_an_interrupt_in_the_middle_of_a_request_closes_the_engine(tmp_path):
    life = start("Slow", mark=str(tmp_path / "closed"), seconds=30)
    asking = threading.Thread(target=life.ask, args=(request(),))
    asking.start()
    while not life.printed():
        time.sleep(0.01)
    life.interrupt()
    asking.join()
    assert (tmp_path / "closed").exists()


def test_threads_that_end_a_process_at_once_close_its_pipe_once(monkeypatch):
    closed = []
    life = start("Slow")
    close = life._connection._close

    def slow_close():
        closed.append(threading.get_ident())
        time.sleep(0.05)
        close()

    monkeypatch.setattr(life._connection, "_close", slow_close)
    with ThreadPoolExecutor(4) as pool:
        for ended in [pool.submit(life.end) for _ in range(4)]:
            ended.result()
    assert len(closed) == 1


def test_a_request_whose_process_another_thread_ends_is_told_so():
    life = start("Slow", seconds=30)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(life.ask, request())
        while not life.printed():
            time.sleep(0.01)
        life.end()
        assert asked.result().answer.message.startswith("EngineDied: the engine's process ended")

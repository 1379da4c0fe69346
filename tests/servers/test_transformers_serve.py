"""transformers' own server with the probe model, started and ended by the backend."""

import json
import socket
import sys
from pathlib import Path

import pytest

from backends.openai_server import OpenAIServer
from backends.openai_server.serve import free_port

HERE = Path(__file__).parent
PROBE = HERE.parent.parent / "ruler_bench" / "assets" / "probe"
# The module that the command `transformers` calls; the environment's own, wherever that lies.
SERVE = [sys.executable, "-m", "transformers.cli.transformers", "serve"]
SERVE += ["--host", "127.0.0.1", "--port", "{port}", "--device", "cpu", "--dtype", "float32"]
SERVE += ["{model_path}"]
RUN = ("backend=openai", "device=cpu", "length=512", "out=here")


@pytest.fixture(scope="module", autouse=True)
def _offline():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture
def server(tmp_path):
    """Start the server and end it: about 10 seconds."""
    port = free_port()
    backend = OpenAIServer(
        base_url=f"http://127.0.0.1:{port}/v1",
        serve={"command": [str(port) if one == "{port}" else one for one in SERVE]},
        model_path=str(PROBE),
        run_folder=str(tmp_path / "serve"),
    )
    yield backend
    backend.close()
    with socket.socket() as closed:
        assert closed.connect_ex(("127.0.0.1", port)) != 0


def rows(folder):
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def test_it_answers_as_transformers_itself_and_shows_no_leak(cli, workdir, server):
    address = f"backend.base_url={server.describe()['base_url']}"
    arms = "arms=[persistent,resend,reference]"
    mine = (*RUN, "fresh=inprocess", address, arms, "backend@reference=hf", "num_samples=2")
    finished = cli(*mine)
    assert finished.status == 0, finished.err
    assert "OK. 2 answers show no fault in persistent, reference, resend" in finished.out
    found = [row for row in rows(workdir / "here") if row["finish_reason"] != "cancelled"]
    assert all(row["correct"] for row in found)
    outputs = {(row["arm"], row["ordinal"]): row["output"] for row in found}
    for one in (0, 1):
        assert outputs["persistent", one] == outputs["reference", one] == outputs["resend", one]
    over_http = [row for row in found if row["arm"] != "reference"]
    assert all(0 < row["ttft_seconds"] < row["total_seconds"] for row in over_http)
    held = json.loads((workdir / "here" / "manifest.json").read_text())["backend_in_force"]
    # It takes no ids, and counts the same tokens in the text as the run does.
    assert held["prompt"] == "text"


@pytest.mark.slow  # seven starts of the server, 10 seconds each
def test_the_leak_lab_with_a_server_for_each_sample(cli, workdir):
    words = ",".join(f"'{one}'" for one in SERVE)
    finished = cli(
        *RUN, f"backend.serve.command=[{words}]", "experiment=leakcheck", "num_samples=2"
    )
    assert finished.status == 0, finished.err
    assert "OK. No answer of 2 changes when the engine has served others" in finished.out
    assert len(list((workdir / "here" / "servers").iterdir())) == 7

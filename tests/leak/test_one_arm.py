"""One arm alone: a run and `compare` look for canaries in the same way."""

import json

import pytest

from ruler_bench.compare import main

ENGINE = '''
from backends.base import Generation
from backends.oracle import answer_from_needles


class Remembers:
    """Prints the answer before, from the third request on."""

    def __init__(self, *, leaks: bool = True):
        self.leaks, self.answers = leaks, []

    def generate(self, request):
        self.answers.append(answer_from_needles(request.prompt))
        late = self.leaks and len(self.answers) > 2
        return Generation(text=self.answers[-2 if late else -1], finish_reason="stop")

    def describe(self):
        return {"leaks": self.leaks}

    def close(self):
        pass
'''


@pytest.mark.parametrize("leaks", [True, False])
@pytest.mark.parametrize("task", ["niah_single_1", "niah_single_3"])
def test_a_run_of_one_arm_finds_what_compare_finds(cli, workdir, monkeypatch, leaks, task):
    (workdir / "remembering.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(workdir)
    ran = cli(
        "backend=custom",
        "backend._target_=remembering.Remembers",
        f"+backend.leaks={leaks}",
        f"task={task}",
        "length=1024",
        "num_samples=5",
        "device=cpu",
        "fresh=inprocess",
        "out=run",
    )
    compared = cli("run", entry=main)
    assert ran.status == compared.status == (3 if leaks else 0), ran.err
    first = compared.out.splitlines()[0]
    assert (first in ran.out) == leaks
    if not leaks:
        assert "One arm alone" in first
        assert not (workdir / "run" / "verdict.json").exists()
        return
    assert "LEAK" in first
    assert "prints the answer of index" in first
    read = json.loads((workdir / "run" / "verdict.json").read_text())
    assert (read["verdict"], read["counts"]["leak"]) == ("leak", 3)

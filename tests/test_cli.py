"""The command line: what a user gets for each kind of bad input, and for sweeps."""

import csv
import json
import re
import sys

import pytest

from ruler_bench.config import config_dir
from ruler_bench.prepare import main as prepare

ORACLE = ("backend=oracle", "device=cpu", "length=1024", "num_samples=2")

BAD_LINES = {
    "task=niah_singel_1": "unknown task 'niah_singel_1'. Did you mean 'niah_single_1'?",
    "backend=ofload": "unknown backend 'ofload'. Did you mean 'offload'?",
    "model=prob": "unknown model 'prob'. Did you mean 'probe'?",
    "experiment=smok": "unknown experiment 'smok'. Did you mean 'smoke'?",
    "template=meta-llama": "Did you mean 'meta-llama3'?",
    "lenght=4096": "unknown key lenght. Did you mean length?",
    "backend.timout=3": "unknown key backend.timout. Did you mean timeout_seconds?",
    "backend.wrng=[1]": "unknown key backend.wrng. Did you mean backend.wrong?",
    "+backend.wrng=[1]": "unknown key 'backend.wrng'. Did you mean 'backend.wrong'?",
    "+lenght=4096": "unknown key 'lenght'. Did you mean 'length'?",
    "+model.pth=/x": "unknown key 'model.pth'. Did you mean 'model.path'?",
    "task.num_kesy=2": "unknown key task.num_kesy. Did you mean task.num_keys?",
    "+task.num_kesy=2": "unknown key 'task.num_kesy'. Did you mean 'task.num_keys'?",
    "model.pth=/x": "unknown key model.pth. Did you mean model.path?",
    "length=": "length=: has no value",
    "length=abc": "length=abc: must be an integer in 1 to 16777216",
    "length=0": "length=0: out of range",
    "length=-5": "length=-5: out of range",
    "length=[4096,4096]": "names a length twice",
    "length=[]": "names no length",
    "length=64": "length=64",
    "length=200000": "has 65536 positions (max_position_embeddings)",
    "num_samples=0": "num_samples=0: out of range; must be an integer in 1 to",
    "num_samples=many": "num_samples=many: must be an integer",
    "threads=0": "threads=0: out of range",
    "threads=2": "threads: backends.oracle.Oracle takes no threads, so that it would do nothing",
    "seed=-1": "seed=-1: out of range; must be an integer in 0 to 4294967295",
    "seed=4294967296": "seed=4294967296: out of range",
    "indices=[5-2]": "'5-2' is out of range",
    "indices=[-1]": "-1 is out of range",
    "indices=[0-4,3]": "names ordinal 3 twice",
    "indices=7": "must be a list of ordinals and ranges",
    "indices=[0,1]": "num_samples: indices names the samples to ask, so that it would do nothing",
    "--lenght=3": "--lenght=3: there is no such option; settings are key=value, without dashes. "
    "Did you mean length=3?",
    "--dry-run": "Did you mean dry_run=VALUE?",
    "--backend=oracle": "Did you mean backend=oracle?",
    "-x": "-x: there is no such option",
    "--cfg": "--cfg/-c: expected one argument",
    "--info=all_of_it": "--info/-i: invalid choice: 'all_of_it'",
    "--c=job": "ambiguous option: --c=job could match",
    "zzz=3": "unknown key zzz. Allowed: arms",
    "backend.xyz=1": "unknown key backend.xyz. Allowed: backend._target_",
    "fresh.zzz=1": "unknown key fresh.zzz. Allowed: fresh.audit",
    "arms=fresh": "arms=fresh: must be a list in brackets, for instance arms=[persistent,fresh]",
    "arms=persistent,fresh": "arms=persistent,fresh: must be a list in brackets",
    "arms={fresh:1}": "must be a list in brackets",
    "arms=[[fresh]]": "arms=[['fresh']]: [fresh] is no name of an arm",
    "note=[1]": "note=[1]: must be text",
    "seed=null": "seed=null: must have a value",
    "timeout_seconds=long": "timeout_seconds=long: must be a number",
    "backend._target_=Oracle": "must be MODULE.CLASS",
    "backend._target_=backends.oracle.Orcale": "backends.oracle has no Orcale. Did you mean "
    "backends.oracle.Oracle? Engines in it: Oracle.",
    "arms=[presistent]": "unknown arm 'presistent'. Did you mean 'persistent'?",
    "device=gpu": "unknown device 'gpu'. Did you mean 'cuda'?",
    "overwrite=perhaps": "overwrite=perhaps: must be true or false",
    "model=local": "model.path is missing",
    "model.path=/no/such/folder": "there is no such folder",
    "backend._target_=backends.nothing.Here": "cannot be imported",
    "tokenizer=/no/such/folder": "/no/such/folder",
    "backend.script=/no/such/file": "/no/such/file",
    "a=b=c=[": "cannot be read",
    "=5": "has no key",
    "task=null": "task=null: must be one of cwe, fwe, niah_multikey_1",
    "backend=5": "backend=5: must be one of custom, gpu_only",
    "model=[x]": "model=[x]: must be one of local, probe",
    "task=../task/niah_single_1": "must be one of cwe, fwe, niah_multikey_1",
    "model.good_length_tokens=abc": "model.good_length_tokens=abc: must be an integer",
    "~task.num_keys": "task.num_keys is missing",
    "threads=100000": "threads=100000: out of range",
    'out=""': "out: is empty",
    "out=" + "x" * 300: "cannot be written (File name too long)",
    "+backend.model_path=/x": "backend.model_path",
    "length=4096,8192": "add -m, or write a list in brackets",
    "backend=custom": "backend._target_ is missing",
    "backend._target_=collections.OrderedDict": "is no class or function whose parameters",
    "backend._target_=sys.maxsize": "is no class or function whose parameters",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_bad_input_is_one_line_with_status_2(cli, workdir, line):
    finished = cli(*ORACLE, "progress=none", line)
    assert finished.status == 2
    assert BAD_LINES[line] in finished.err
    lines = finished.err.splitlines()
    assert len(lines) == 1, finished.err
    assert lines[0].startswith("error: ")
    assert "HYDRA_FULL_ERROR" not in finished.err
    assert "Traceback" not in finished.err
    assert not list(workdir.glob("results/*"))


def test_cuda_without_a_gpu_is_said(cli):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    finished = cli(*ORACLE, "device=cuda")
    assert finished.status == 2
    assert "sees no CUDA GPU here" in finished.err


def test_help_explains_the_keys_and_lists_the_choices(cli):
    finished = cli("--help")
    assert finished.status == 0
    for word in ("niah_multikey_3", "offload", "num_samples", "indices=[0-4,9]", "Exit status"):
        assert word in finished.out
    for path in (config_dir() / "experiment").glob("*.yaml"):
        assert re.search(rf"^ *{path.stem}  +\S", finished.out, re.MULTILINE), path.stem


def test_a_sweep_gives_each_cell_its_folder_and_joins_the_tables(cli, workdir):
    finished = cli("-m", "task=niah_single_1,niah_multikey_2", "seed=1,2", *ORACLE)
    assert finished.status == 0, finished.err
    folders = {one.parent.name for one in workdir.glob("results/niah*/records.jsonl")}
    assert folders == {
        f"{task}_oracle_probe_1024_seed-{seed}"
        for task in ("niah_single_1", "niah_multikey_2")
        for seed in (1, 2)
    }
    (joined,) = workdir.glob("results/.sweeps/*/summary.csv")
    assert len(joined.read_text().splitlines()) == 5
    assert "All runs of the sweep" in finished.out


def test_a_job_that_cannot_start_does_not_stop_the_sweep(cli, workdir):
    finished = cli("-m", "length=64,1024", *ORACLE[:2], "num_samples=2")
    assert finished.status == 2
    assert "error: " in finished.err
    assert (workdir / "results/niah_single_1_oracle_probe_1024/report.md").exists()


def test_a_sweep_into_one_out_folder_keeps_the_cells_apart(cli, workdir):
    assert cli("-m", "seed=1,2", "out=here", *ORACLE).status == 0
    assert len(list(workdir.glob("here/*/records.jsonl"))) == 2


def test_a_list_of_lengths_gives_one_subfolder_each(cli, workdir):
    finished = cli("length=[1024,2048]", *ORACLE[:2], "num_samples=2")
    assert finished.status == 0, finished.err
    names = {str(one.parent) for one in (workdir / "results").rglob("records.jsonl")}
    assert {name.rpartition("/")[2] for name in names} == {"1024", "2048"}


def test_the_joined_table_is_about_the_samples_that_were_asked_for(cli, workdir):
    assert cli(*ORACLE[:3], "num_samples=4").status == 0
    finished = cli("-m", "task=niah_single_1,niah_multikey_2", *ORACLE[:3], "indices=[0,3]")
    assert finished.status == 0, finished.err
    (joined,) = workdir.glob("results/.sweeps/*/summary.csv")
    with joined.open() as file:
        assert [row["samples"] for row in csv.DictReader(file)] == ["2", "2"]


def test_a_sweep_over_any_key_keeps_the_cells_apart_and_tells_them_apart(cli, workdir):
    finished = cli("-m", "seed=1,2", "num_samples=1,2", *ORACLE[:3])
    assert finished.status == 0, finished.err
    assert len(list(workdir.glob("results/niah*/records.jsonl"))) == 4
    (joined,) = workdir.glob("results/.sweeps/*/report.md")
    assert "seed=2" in joined.read_text()


def test_a_job_that_did_not_run_is_named_at_the_end(cli):
    finished = cli("-m", "length=64,1024", *ORACLE[:2], "num_samples=1")
    assert finished.status == 2
    assert "Did not run: length=64 backend=oracle" in finished.out
    assert "length=64" in finished.out.splitlines()[-1]


def test_one_bad_length_of_a_list_does_not_stop_the_others(cli, workdir):
    finished = cli("length=[64,1024]", *ORACLE[:2], "num_samples=1")
    assert finished.status == 2
    assert "length=64" in finished.err
    assert len(list(workdir.rglob("records.jsonl"))) == 1


def test_dry_run_runs_nothing(cli, workdir):
    finished = cli(*ORACLE, "dry_run=true")
    assert finished.status == 0
    assert "requests: 2 to run, 0 recorded already" in finished.out
    assert not (workdir / "results").exists()


@pytest.mark.parametrize("preset", ["gpu_only", "offload", "offload_layerwise"])
def test_dry_run_says_the_memory_plan_of_our_engine(cli, workdir, monkeypatch, preset):
    def load(*_):
        raise AssertionError("a weight was loaded")

    monkeypatch.setattr("backends.engine.weights.Checkpoint.copy_into", load)
    mine = (f"backend={preset}", *ORACLE[1:])
    finished = cli(*mine, "dry_run=true", "backend.host_memory_gb=4")
    assert finished.status == 0, finished.err
    for part in ("memory plan:", "weights ", "device total ", "of 4.00 GiB"):
        assert part in finished.out
    refused = cli(*mine, "dry_run=true", "backend.device_memory_gb=0.001")
    assert refused.status == 2
    assert "The memory plan does not fit: the weights alone need" in refused.err
    assert not (workdir / "results").exists()


def test_the_dry_run_plans_what_the_engine_then_takes(cli):
    mine = ("backend=offload_layerwise", *ORACLE[1:3], "num_samples=1", "backend.host_memory_gb=4")
    planned = cli(*mine, "dry_run=true").out.splitlines()
    printed = cli(*mine).err.splitlines()
    inside = [line.strip() for line in planned[planned.index("  memory plan:") + 1 :]]
    assert [f"memory plan: {line}" for line in inside] == [
        line for line in printed if line.startswith("memory plan: ")
    ]


@pytest.mark.parametrize(
    ("target", "status", "said"),
    [
        ("Planned", 0, "    42 GiB for Polly"),
        ("PlannedLater", 0, "folder: here"),
        ("Unplanned", 2, "its memory_plan failed (RuntimeError: no idea)"),
    ],
)
@pytest.mark.usefixtures("parrots")
def test_an_engine_of_your_own_may_say_its_memory_plan(cli, target, status, said):
    mine = ("backend=custom", f"backend._target_=parrots.{target}", *ORACLE[1:], "out=here")
    finished = cli(*mine, "+backend.phrase=Polly", "dry_run=true")
    assert finished.status == status
    assert said in finished.out + finished.err
    assert ("memory plan:" in finished.out) == (target == "Planned")


@pytest.mark.parametrize("preset", ["gpu_only", "offload", "offload_layerwise"])
def test_tensors_can_be_given_from_python_alone(cli, preset):
    mine = (f"backend={preset}", *ORACLE[1:])
    for value in ("x", "null", "{a:1}"):
        finished = cli(*mine, f"+backend.weights={value}")
        assert finished.status == 2
        assert finished.err == (
            "error: backend.weights: takes tensors, which only a caller in Python can give; leave "
            "it out here.\n"
        )
    assert "weights" not in cli(*mine, "--cfg", "job").out
    assert "weights" not in cli(*mine, "+backend.wights=1").err.partition("Allowed")[2]


def test_prepare_writes_the_samples(cli, workdir):
    arguments = ("task=niah_multivalue", "length=1024", "num_samples=3", "out=samples.jsonl")
    finished = cli(*arguments, entry=prepare)
    assert finished.status == 0, finished.err
    rows = [json.loads(line) for line in (workdir / "samples.jsonl").read_text().splitlines()]
    assert [row["ordinal"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert len(row["outputs"]) == 4
        assert all(value in row["input"] for value in row["outputs"])
        assert row["length"] <= 1024
        assert 0 <= row["depth"] <= 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("task=nope", "unknown task 'nope'"),
        ("num_sample=3", "Did you mean num_samples?"),
        ("length=64", "length=64"),
        ("out=/proc/none/x", "cannot be written"),
    ],
)
def test_prepare_says_what_is_wrong(cli, line, message):
    finished = cli("out=samples.jsonl", line, entry=prepare)
    assert finished.status == 2
    assert message in finished.err
    assert len(finished.err.splitlines()) == 1


def test_prepare_without_out_says_so(cli):
    finished = cli("task=niah_single_1", entry=prepare)
    assert finished.status == 2
    assert "out is missing" in finished.err


ENGINE = """
from backends.base import Generation

class Parrot:
    def __init__(self, *, phrase: str = "42", length_tokens: int = 1) -> None:
        self.phrase = phrase
        if phrase == "explode":
            raise RuntimeError("no GPU driver")
        if phrase == "interrupt":
            raise KeyboardInterrupt

    def generate(self, request):
        return Generation(text=self.phrase, finish_reason="stop")

    def describe(self):
        return {"phrase": self.phrase}

    def close(self):
        if self.phrase == "cling":
            raise RuntimeError("cannot let go")

class Mute:
    def generate(self, request):
        return None

class Odd(Parrot):
    def generate(self, request):
        if self.phrase == "exit":
            raise SystemExit(0)
        if self.phrase == "rude":
            raise Rude()
        return {"what": "ever"}

    def describe(self):
        return {"what": object()} if self.phrase == "opaque" else {"phrase": self.phrase}

class Planned(Parrot):
    @staticmethod
    def memory_plan(*, phrase):
        return [f"42 GiB for {phrase}"]

class PlannedLater(Parrot):
    def memory_plan(self):
        return ["too late"]

class Unplanned(Parrot):
    @classmethod
    def memory_plan(cls, **arguments):
        raise RuntimeError("no idea")

class Strange(Parrot):
    def generate(self, request):
        return Generation(**eval(self.phrase))

class Rude(Exception):
    def __str__(self):
        raise RuntimeError("no")
"""


@pytest.fixture
def parrots(workdir, monkeypatch):
    """A module of somebody's in the folder where the command runs."""
    (workdir / "parrots.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(workdir)
    monkeypatch.delitem(sys.modules, "parrots", raising=False)


def test_an_engine_of_your_own_is_a_class_by_name(cli, workdir, parrots):
    mine = ("backend=custom", "backend._target_=parrots.Parrot", *ORACLE[1:], "out=here")
    finished = cli(*mine, "+backend.phrase=hello")
    assert finished.status == 0, finished.err
    row = json.loads((workdir / "here" / "records.jsonl").read_text().splitlines()[0])
    assert row["output"] == "hello"
    assert row["correct"] is False
    held = json.loads((workdir / "here" / "manifest.json").read_text())
    assert held["backend_in_force"] == {"phrase": "hello"}

    plus = cli(*mine, "backend.phrase=hello")
    assert plus.status == 2
    assert "write +backend.phrase=VALUE" in plus.err
    typo = cli(*mine, "+backend.frase=hello")
    assert typo.status == 2
    assert "Did you mean 'backend.phrase'?" in typo.err
    unfit = cli("backend._target_=parrots.Parrot", *ORACLE[1:])
    assert unfit.status == 2
    assert "start from backend=custom" in unfit.err


def test_a_folder_is_not_gone_on_with_by_changed_code(cli, workdir, parrots):
    mine = ("backend=custom", "backend._target_=parrots.Parrot", *ORACLE[1:], "out=here")
    assert cli(*mine, "num_samples=1").status == 0
    (workdir / "parrots.py").write_text(ENGINE + "\n# Better.\n")
    refused = cli(*mine, "num_samples=2")
    assert refused.status == 2
    assert "the code of parrots was changed since its samples were recorded" in refused.err
    assert "overwrite=true" in refused.err
    assert cli(*mine, "num_samples=2", "overwrite=true").status == 0
    # Nothing is mixed as long as nothing was answered.
    odd = ("backend=custom", "backend._target_=parrots.Odd", *ORACLE[1:], "out=odd")
    assert cli(*odd).status == 1
    (workdir / "parrots.py").write_text(ENGINE + "\n# Better still.\n")
    assert cli(*odd).status == 1


RUN = {
    "needle": [],
    "smoke": [],
    "accept100": ["backend=oracle"],
    "leakcheck": ["backend=oracle"],
    "quick20": ["backend=oracle"],
}
"""Experiments; those with many engines on one that starts at once. diagnose has its own tests."""


@pytest.mark.parametrize("name", RUN)
def test_experiments_run(cli, name):
    chosen = (f"experiment={name}", "device=cpu", "length=1024", "num_samples=1", *RUN[name])
    finished = cli(*chosen)
    assert finished.status == 0, finished.err
    assert "100.00" in finished.out


@pytest.mark.parametrize("backend", ["oracle", "gpu_only"])
@pytest.mark.parametrize("path", sorted((config_dir() / "experiment").glob("*.yaml")))
def test_every_experiment_takes_every_backend(cli, path, backend):
    chosen = (f"experiment={path.stem}", f"backend={backend}", "device=cpu", "length=1024")
    finished = cli(*chosen, "num_samples=1", "dry_run=true")
    assert finished.status == 0, finished.err


@pytest.mark.parametrize("template", ["chat", "meta-llama3", "RWKV"])
def test_templates_reach_the_prompt(cli, workdir, template):
    finished = cli(*ORACLE, f"template={template}", "out=here")
    assert finished.status == 0, finished.err
    line = (workdir / "here" / "predictions" / "niah_single_1.jsonl").read_text().splitlines()[0]
    prompt = json.loads(line)["input"]
    opening = {"chat": "<|user|>", "meta-llama3": "<|begin_of_text|>", "RWKV": "User: hi"}
    assert prompt.startswith(opening[template])
    assert prompt.rstrip().endswith("is")


@pytest.mark.parametrize(
    ("target", "setting", "message"),
    [
        ("Parrot", "+backend.phrase=explode", "could not be built (RuntimeError: no GPU driver)"),
        ("Parrot", "+backend.length_tokens=abc", "backend.length_tokens=abc: must be int"),
        ("Mute", "num_samples=1", "no method describe and no method close"),
        ("Odd", "+backend.phrase=opaque", "describe() returned values that JSON does not have"),
    ],
)
@pytest.mark.usefixtures("parrots")
def test_an_engine_that_cannot_start_is_one_line(cli, target, setting, message):
    finished = cli("backend=custom", f"backend._target_=parrots.{target}", *ORACLE[1:], setting)
    assert finished.status == 2
    assert message in finished.err
    assert "Traceback" not in finished.err


def test_an_engine_that_misbehaves_is_recorded_and_shown(cli, workdir, parrots):
    mine = ("backend=custom", *ORACLE[1:])
    finished = cli(*mine, "backend._target_=parrots.Odd", "out=odd")
    assert finished.status == 1
    assert "2 errors in the engine" in finished.out
    assert "returned dict, not a Generation" in finished.out
    for phrase, error in (("exit", "SystemExit"), ("rude", "Rude")):
        odd = ("backend._target_=parrots.Odd", f"+backend.phrase={phrase}", f"out={phrase}")
        finished = cli(*mine, *odd)
        assert finished.status == 1
        assert f"2 errors in the engine; ordinal 0: {error}" in finished.out
        assert error in (workdir / phrase / "errors.log").read_text()
    finished = cli(*mine, "backend._target_=parrots.Parrot", "+backend.phrase=cling", "out=cling")
    assert finished.status == 0
    assert "warning: the engine failed to close" in finished.err


@pytest.mark.parametrize(
    ("phrase", "said"),
    [
        ("dict(token_ids=(1, 10**6))", "token_ids[1]=1000000; must be within the model's 0 to"),
        ("dict(token_ids=(1,) * 129)", "129 token_ids; must be at most max_new_tokens=128"),
        ("dict(text='a', logits_digest=('ab',))", "logits_digest without token_ids; must be one"),
        ("dict(text='a', top2_margin=(float('nan'),))", "top2_margin=nan; must be a finite number"),
    ],
)
def test_an_answer_that_cannot_be_is_an_error_of_its_sample(cli, workdir, parrots, phrase, said):
    mine = ("backend=custom", "backend._target_=parrots.Strange", *ORACLE[1:], "num_samples=1")
    # In quotes of their own, which Hydra's grammar wants around brackets.
    finished = cli(*mine, f'+backend.phrase="{phrase}"', "out=here")
    assert finished.status == 1, finished.err
    assert "ordinal 0: RequestError: the engine returned" in finished.out
    assert said in finished.out


def test_an_interrupt_before_the_engine_has_started_overwrites_nothing(cli, workdir, parrots):
    mine = ("backend=custom", "backend._target_=parrots.Parrot", *ORACLE[1:], "out=here")
    assert cli(*mine).status == 0
    kept = {one.name: one.read_bytes() for one in (workdir / "here").iterdir() if one.is_file()}
    # Ctrl-C reaches the harness; only an engine within it can stand in for that.
    interrupt = ("+backend.phrase=interrupt", "fresh=inprocess")
    finished = cli(*mine, *interrupt, "overwrite=true")
    assert finished.status == 130
    assert "the same command goes on" in finished.err
    for name, content in kept.items():
        assert (workdir / "here" / name).read_bytes() == content

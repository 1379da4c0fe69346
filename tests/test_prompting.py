"""Prompts as engines get them: system messages, thinking, BOS once, and the answer prefix last."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.processors import TemplateProcessing
from transformers.utils.chat_template_utils import render_jinja_template

from ruler_bench.answer_prefix import check_answer_prefix
from ruler_bench.chat import render_chat
from ruler_bench.config import config_dir
from ruler_bench.errors import UsageError
from ruler_bench.model_files import model_folder
from ruler_bench.prepare import main as prepare
from ruler_bench.suites import task_from_file, task_names
from ruler_bench.tasks import DataSpec, generate
from ruler_bench.tokenizer import Chat, load_tokenizer

QA = Path(__file__).parent / "data" / "qa"
ORACLE = ("backend=oracle", "device=cpu", "length=1024", "num_samples=1", "fresh=inprocess")
BOS = "<|pad|>"

TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINKS = TURNS + "{% if enable_thinking is defined and not enable_thinking %}<think/>{% endif %}"
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
DROPS = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize("system", [None, "Be brief.", " É {{ 1 }}\n<b>"])
@pytest.mark.parametrize("thinking", [None, True, False])
def test_system_and_thinking_are_rendered_as_transformers_does(system, thinking):
    system_turn = [] if system is None else [{"role": "system", "content": system}]
    switches = {} if thinking is None else {"enable_thinking": thinking}
    rendered, _ = render_jinja_template(
        conversations=[[*system_turn, {"role": "user", "content": "hi"}]],
        chat_template=THINKS,
        add_generation_prompt=True,
        **switches,
    )
    assert render_chat("mine", THINKS, "hi", {}, Chat(system, thinking)) == rendered[0]


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        (REFUSES + TURNS, Chat(system="x"), "system: the chat template of 'mine' takes no system"),
        (REFUSES + TURNS, Chat(system="x"), "(no system role); leave system out."),
        (DROPS, Chat(system="x"), "does not print the system message; leave system out."),
        (TURNS, Chat(thinking=True), "thinking=true: the chat template of 'mine' has no enable_"),
        (TURNS, Chat(thinking=False), "thinking=false"),
        (TURNS, Chat(system="say hi"), "system: must not hold 'hi'"),
        ("{% for %}", Chat(thinking=True), "template=chat: the chat template of 'mine' cannot be"),
        ("{{ 1 / 0 }}", Chat(system="x"), "template=chat: the chat template of 'mine' cannot be"),
        (
            "{% set enable_thinking = true %}" + TURNS + "{{ enable_thinking }}",
            Chat(thinking=False),
            "has no enable_thinking to set",
        ),
    ],
)
def test_what_a_template_cannot_do_is_said(template, chat, message):
    with pytest.raises(UsageError) as caught:
        render_chat("mine", template, "hi", {}, chat)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def model(tmp_path):
    """Make a copy of the probe with another chat template, and with a BOS where asked for."""

    def build(template=None, adds_bos=False):
        folder = tmp_path / "model"
        shutil.copytree(model_folder("package:probe"), folder)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        if adds_bos:
            backend = BackendTokenizer.from_file(str(folder / "tokenizer.json"))
            backend.post_processor = TemplateProcessing(
                single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
            )
            backend.save(str(folder / "tokenizer.json"))
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config = {key: one for key, one in config.items() if key != "chat_template"}
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": BOS}))
        return folder

    return build


def of(folder):
    return ("model=local", f"model.path={folder}")


def test_they_reach_the_prompt_and_the_manifest(cli, workdir, model):
    mine = (*of(model(THINKS)), *ORACLE, "template=chat")
    finished = cli(*mine, "system=Be brief.", "thinking=false", "out=here")
    assert finished.status == 0, finished.err
    line = (workdir / "here" / "predictions" / "niah_single_1.jsonl").read_text()
    prompt = json.loads(line)["input"]
    assert prompt.startswith("<system>Be brief.</system><user>A special magic")
    assert "<assistant><think/> The special magic number" in prompt
    config = json.loads((workdir / "here" / "manifest.json").read_text())["config"]
    assert (config["system"], config["thinking"]) == ("Be brief.", False)
    assert cli(*mine, "out=plain").status == 0
    plain = json.loads((workdir / "plain" / "manifest.json").read_text())["config"]
    assert not {"system", "thinking"} & set(plain)
    other = cli(*mine, "system=Be long.", "thinking=false", "out=here")
    assert other.status == 2
    assert "config.system: Be brief. there, Be long. here" in other.err
    assert cli(*mine[:2], "length=1024", "num_samples=1", "template=chat", "system=Be brief.",
               "thinking=false", "out=samples.jsonl", entry=prepare).status == 0  # fmt: skip
    row = json.loads((workdir / "samples.jsonl").read_text())
    assert row["input"] + row["answer_prefix"] == prompt


BAD = {
    ("template=Phi3", "system=x"): (TURNS, "system: template=Phi3 has no place for it; add"),
    ("thinking=true",): (TURNS, "thinking: template=base has no place for it"),
    ("template=chat", "system=' '"): (TURNS, "system: is blank"),
    ("template=chat", "thinking=maybe"): (TURNS, "thinking=maybe: must be true or false"),
    ("template=chat", "system=x"): (REFUSES + TURNS, "takes no system message (no system role)"),
    ("template=chat", "data=.", "system=x"): (TURNS, "the samples of data=. are asked as they are"),
    ("template=chat",): (None, "has no chat template; use template=base"),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_said_before_anything_runs(cli, workdir, model, words):
    template, message = BAD[words]
    finished = cli(*of(model(template)), *ORACLE, *words)
    assert finished.status == 2
    assert message in finished.err
    assert len(finished.err.splitlines()) == 1
    assert not list(workdir.glob("results/*"))


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template", [None, TURNS, "{{ bos_token }}" + TURNS])
def test_bos_is_there_exactly_once_where_there_is_one(model, adds_bos, template):
    tokenizer = load_tokenizer(str(model(template, adds_bos)))
    task = task_from_file(config_dir(), "niah_single_1")
    (sample,) = generate(
        DataSpec(task, 512, 42, "base" if template is None else "chat", tokenizer), 1
    )
    ids = tokenizer.encode_prompt(sample.prompt)
    bos = BackendTokenizer.from_file(str(model_folder("package:probe") / "tokenizer.json"))
    wanted = adds_bos or (template or "").startswith("{{ bos")
    assert ids.count(bos.token_to_id(BOS)) == wanted
    assert ids[0] == bos.token_to_id(BOS) or not wanted
    assert len(ids) == tokenizer.count(sample.prompt) + (len(ids) > tokenizer.count(sample.prompt))
    assert tokenizer.decode(ids).endswith(sample.answer_prefix)


@pytest.mark.parametrize("name", task_names(config_dir()))
def test_every_tasks_prompts_end_with_its_prefix(name):
    task = task_from_file(config_dir(), name)
    tokenizer = load_tokenizer(str(model_folder("package:probe")))
    template = "base" if task.kind == "niah" else "meta-llama3"
    (sample,) = generate(DataSpec(task, 1800, 42, template, tokenizer, qa_data=QA), 1)
    joined = replace(sample, input=sample.prompt, answer_prefix="")
    check_answer_prefix([sample, joined], task)
    with pytest.raises(UsageError, match="ordinal 0: the prompt does not end with the answer"):
        check_answer_prefix([replace(sample, answer_prefix="")], task)
    with pytest.raises(UsageError, match="would be sent twice"):
        check_answer_prefix([replace(sample, input=sample.prompt)], task)


def test_ready_made_samples_without_their_prefix_are_refused(cli, workdir):
    row = {"input": "What is it?", "answer_prefix": "", "outputs": ["1"], "length": 300}
    file = workdir / "ready" / "niah_single_1" / "validation.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(row) + "\n")
    finished = cli(*ORACLE, "data=ready")
    assert finished.status == 2
    assert "the prompt does not end with the answer prefix (it ends with 'What is it?')" in (
        finished.err
    )
    assert len(finished.err.splitlines()) == 1


SEEING = """
import dataclasses
from odd_engines import Plain

class Seeing(Plain):
    def generate(self, request):
        seen = len(request.prompt_token_ids) + 7
        return dataclasses.replace(super().generate(request), prompt_tokens=seen)
"""


def test_the_record_keeps_the_prompts_hash_and_the_tokens_that_the_engine_saw(
    cli, workdir, monkeypatch
):
    (workdir / "seeing.py").write_text(SEEING)
    for folder in (workdir, Path(__file__).parent):
        monkeypatch.syspath_prepend(folder)
    mine = ("backend=custom", "backend._target_=seeing.Seeing", *ORACLE[1:])
    assert cli(*mine, "out=here").status == 0
    record = json.loads((workdir / "here" / "records.jsonl").read_text())
    line = json.loads((workdir / "here" / "predictions" / "niah_single_1.jsonl").read_text())
    tokens = load_tokenizer(str(model_folder("package:probe"))).encode_prompt(line["input"])
    assert record["prompt_tokens"] == len(tokens) + 7
    assert record["prompt_sha256"] == hashlib.sha256(line["input"].encode()).hexdigest()

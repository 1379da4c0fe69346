"""The probe's training: tokens as real prompts have them, schedule, checkpoints, the model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer

from scripts import train_probe
from scripts.probe import bpe, checkpoint, evaluation, prepare, prompts
from scripts.probe.attention import plain_attention
from scripts.probe.corpus import Corpus
from scripts.probe.families import NEEDLES
from scripts.probe.feed import Feed
from scripts.probe.model import Probe, ProbeConfig
from scripts.probe.rows import DENSE_ANSWER, ELSEWHERE, PADDING, REAL_ANSWER
from scripts.probe.schedule import FINE_TUNING, STAGES, Position, Schedule, Stage
from scripts.probe.sequences import SequenceBuilder
from scripts.probe.training import Settings, TimePlan, Trainer, save_configs, save_weights

ROOT = Path(__file__).resolve().parents[2]
TINY = ProbeConfig(
    hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16
)
TINY_STAGES = (
    Stage(512, 0.5, 3e-3, 1, {512: 1.0}, 0.5),
    Stage(1024, 0.5, 1e-3, 2, {1024: 0.5, 512: 0.5}, 0.1),
)
NEEDLE = r"One of the special magic (?:numbers|uuids) for [^\n]+? is: [0-9a-f-]+\."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(train_probe.ASSETS / "tokenizer.json"))


@pytest.fixture(scope="module")
def corpus(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    path = tmp_path_factory.mktemp("corpus") / "corpus.npz"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "NAMES", 2**12)  # all of them take seconds
        prepare.make_corpus(tokenizer).save(path)
    return Corpus.load(path)


@pytest.fixture(scope="module")
def builder(corpus: Corpus) -> SequenceBuilder:
    return SequenceBuilder(corpus)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


# Tokenizer


@given(text=st.text())
@settings(max_examples=100, deadline=None)
def test_any_text_comes_back(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(train_probe.ASSETS / "tokenizer.json"))
    assert tokenizer.decode(encode(tokenizer, text), skip_special_tokens=False) == text


@given(number=st.integers(0, 2**128 - 1), before=st.sampled_from([" for ", " is: ", " are "]))
@settings(max_examples=100, deadline=None)
def test_a_uuid_is_its_characters(number: int, before: str) -> None:
    tokenizer = Tokenizer.from_file(str(train_probe.ASSETS / "tokenizer.json"))
    value = str(uuid.UUID(int=number, version=4))
    ids = encode(tokenizer, before + value + " mentioned")
    tokens = [
        tokenizer.id_to_token(i) or "" for i in ids[ids.index(encode(tokenizer, before)[-2]) :]
    ]
    characters = "".join(tokens).split("Ġ" + value)
    assert len(characters) == 2
    spaced_letter = value[0].isalpha()
    begin = tokens.index("Ġ" + value[0]) if spaced_letter else tokens.index("Ġ")
    expected = ["Ġ" + value[0], *value[1:]] if spaced_letter else ["Ġ", *value]
    assert tokens[begin : begin + len(expected)] == expected


def test_merges_never_join_hexadecimal_letters() -> None:
    counts = {"Ġdeadbeef": 1000, "abcabc": 900, "walked": 800, "Ġbe": 700}
    merges = bpe.learn_merges(counts, 30)
    assert "walked" in {left + right for left, right in merges}
    assert not [pair for pair in merges if re.fullmatch("Ġ?[a-f]{2,}", "".join(pair))]


def test_transformers_reads_the_tokenizer_and_its_chat_template(tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(train_probe.ASSETS)
    text = " One of the special magic numbers for ad hoc-ice is: 1234567.\n  É"
    assert loaded(text)["input_ids"] == encode(tokenizer, text)
    assert loaded.eos_token_id == 0
    chat = [{"role": "user", "content": "hi"}]
    rendered = loaded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|user|>\nhi\n<|assistant|>\n"


# Sequences


@pytest.mark.parametrize("length", [512, 1024, 4096])
def test_pieces_side_by_side_are_the_tokens_of_the_text(
    builder: SequenceBuilder, tokenizer: Tokenizer, length: int
) -> None:
    rng = np.random.default_rng(length)
    for _ in range(160 * 512 // length):
        row = builder.row(rng, length)
        used = int((row.kinds != PADDING).sum())
        assert (row.kinds[:used] != PADDING).all()
        assert (row.tokens[used:] == builder.corpus.pad).all()
        ids = row.tokens[:used].tolist()
        assert ids[-1] == builder.corpus.end_of_text
        while ids:
            end = ids.index(builder.corpus.end_of_text)
            text = tokenizer.decode(ids[:end], skip_special_tokens=False)
            assert encode(tokenizer, text) == ids[:end], text
            ids = ids[end + 1 :]


@pytest.mark.parametrize("family", range(len(NEEDLES)), ids=[f.name for f in NEEDLES])
def test_answers_are_those_of_the_text(
    builder: SequenceBuilder, tokenizer: Tokenizer, family: int
) -> None:
    rng = np.random.default_rng(family)
    for kind, build in (
        (REAL_ANSWER, builder.real_row),
        (DENSE_ANSWER, builder.dense_row),
    ):
        for length in (512, 2048):
            row = build(rng, length, family)
            used = row.kinds != PADDING
            text = tokenizer.decode(row.tokens[used].tolist(), skip_special_tokens=False)
            context, *turns = text.split("\nWhat ")
            needles = re.findall(r"magic \w+ for ([^\n]+?) is: ([0-9a-f-]+)\.", context)
            marked = 0
            for turn in turns:
                question = re.fullmatch(
                    r"(is|are all) the special magic (\w+) for (.+) mentioned in the provided"
                    r" text\?.* The special magic \2 for \3 mentioned in the provided text"
                    r" (is|are)((?: [0-9a-f-]+[,.])+)<\|endoftext\|>",
                    turn,
                    re.DOTALL,
                )
                assert question, turn
                asked = re.split(r", and |, ", question[3])
                expected = [value for key in asked for k, value in needles if k == key]
                answer = question[5] + "<|endoftext|>"
                assert re.findall(r"[0-9a-f-]+", question[5]) == expected
                assert (question[1] == "is") == (question[4] == "is") == (len(expected) == 1)
                marked += len(encode(tokenizer, answer))
            assert int((row.kinds == kind + family).sum()) == marked
            assert int(((row.kinds != kind + family) & used).sum()) == int(
                (row.kinds == ELSEWHERE).sum()
            )
            if kind == REAL_ANSWER:
                assert len(turns) == 1
                assert len(expected) == NEEDLES[family].num_values * NEEDLES[family].num_queries


def test_real_prompts_are_made_of_the_same_pieces(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Cut real prompts where the corpus has pieces: laid side by side they are the prompt."""
    for prompt in prepare.make_prompts(train_probe.ASSETS, (1024,), 3, seed=11):
        family = next((f for f in NEEDLES if f.name == prompt.task), None)
        if family is None:
            continue  # variable tracking: tests/scripts/probe/test_chains.py
        text = tokenizer.decode(prompt.tokens.tolist())
        number = "one" if len(prompt.outputs) == 1 else "many"
        piece = {name: tokenizer.decode(ids.tolist()) for name, ids in corpus.wording.items()}
        opening = piece[f"open.base.{number}.{family.values}"]
        ask = piece[f"ask.{number}.{family.values}"]
        answer = piece[f"answer.base.{number}.{family.values}"]
        end = piece[f"end.{number}"]
        assert text.startswith(opening)
        assert text.endswith(end)
        context, question = text.removeprefix(opening).removesuffix(end).rsplit(ask, 1)
        query, again = question.split(answer)
        assert query == again
        spaced = r" ?" if family.haystack == "essay" else ""
        parts = [opening, *re.split(f"({spaced}{NEEDLE})", context), ask, query, answer, query, end]
        assert [i for part in parts for i in encode(tokenizer, part)] == prompt.tokens.tolist()
        rest = "".join(re.split(f" ?{NEEDLE}", context))
        words = tokenizer.decode(corpus.essay[:4000].tolist()).split()
        if family.haystack == "essay":
            assert rest.split()[:-1] == words[: len(rest.split()) - 1]
        elif family.haystack == "noise":
            assert set(rest.split("\n")) <= {"", tokenizer.decode(corpus.noise.tolist())}
        else:
            assert not rest.strip()


def test_a_batch_depends_on_its_number_alone(builder: SequenceBuilder) -> None:
    first = builder.batch(3, 7, 512, 2048, 512)
    for again, same in (
        (builder.batch(3, 7, 512, 2048, 512), True),
        (builder.batch(3, 8, 512, 2048, 512), False),
    ):
        assert np.array_equal(first.tokens, again.tokens) == same
    targets = first.tokens.reshape(-1)[first.positions + 1]
    weighted = (first.answer_weights + first.other_weights) > 0
    assert (targets[weighted] == first.targets[weighted]).all()
    assert first.answer_weights.sum() == pytest.approx(1, abs=0.01)
    assert first.other_weights.sum() == pytest.approx(1)
    assert len(np.unique(first.positions[weighted])) == weighted.sum()


def test_workers_build_what_this_process_builds(builder: SequenceBuilder) -> None:
    sizes = {"seed": 0, "batch_tokens": 1024, "loss_positions": 256}
    alone, helped = Feed(builder, workers=0, **sizes), Feed(builder, workers=2, **sizes)
    try:
        for number in range(4):
            alone.ask(number, 512)
            helped.ask(number, 512)
        expected = {alone.take().tokens.tobytes() for _ in range(4)}
        assert {helped.take().tokens.tobytes() for _ in range(4)} == expected
    finally:
        helped.close()


# Schedule


def run_schedule(
    schedule: Schedule, seconds: float, step: float, accuracy: float = 1.0
) -> list[tuple[int, float, float]]:
    seen = []
    left = seconds
    while not schedule.finished:
        left -= step
        schedule.advance(step, left, accuracy)
        seen.append((schedule.position.stage, schedule.position.progress, schedule.learning_rate()))
    return seen


@given(seconds=st.floats(200, 2000), step=st.floats(0.05, 1), lost=st.floats(0, 40))
@settings(max_examples=50, deadline=None)
def test_the_schedule_ends_with_the_budget_and_never_goes_back(
    seconds: float, step: float, lost: float
) -> None:
    schedule = Schedule(STAGES, Position())
    left = seconds
    progress = [0.0]
    while left > seconds / 2:
        left -= step
        schedule.advance(step, left, 1.0)
        progress.append(schedule.position.progress)
    schedule = Schedule(STAGES, Position(**json.loads(json.dumps(schedule.position.as_dict()))))
    seen = run_schedule(schedule, max(step, left - lost), step)
    progress += [p for _, p, _ in seen]
    assert progress == sorted(progress)
    assert progress[-1] == 1
    assert [stage for stage, _, _ in seen] == sorted(stage for stage, _, _ in seen)
    assert seen[-1][2] <= 0.03 * STAGES[-1].learning_rate


def test_a_fine_tuning_stays_short_until_every_family_is_there() -> None:
    def shares(accuracy: float) -> list[float]:
        seen = run_schedule(Schedule(FINE_TUNING, Position()), 400, 0.1, accuracy)
        return [sum(stage == s for stage, _, _ in seen) / len(seen) for s in range(4)]

    assert shares(1.0) == pytest.approx([0.22, 0.22, 0.20, 0.36], abs=0.005)
    assert shares(0.5)[0] == pytest.approx(0.4, abs=0.005)


def test_stages_take_their_shares() -> None:
    seen = run_schedule(Schedule(STAGES, Position()), 960, 0.1)
    shares = [sum(stage == s for stage, _, _ in seen) / len(seen) for s in range(4)]
    assert shares == pytest.approx([0.10, 0.20, 0.25, 0.45], abs=0.005)


def test_the_first_stage_waits_for_retrieval_but_not_for_ever() -> None:
    seen = run_schedule(Schedule(STAGES, Position()), 960, 0.1, accuracy=0.5)
    shares = [sum(stage == s for stage, _, _ in seen) / len(seen) for s in range(4)]
    assert shares[0] == pytest.approx(0.25, abs=0.005)
    assert shares[1:] == pytest.approx([0.75 * s / 0.9 for s in (0.20, 0.25, 0.45)], abs=0.005)


def test_the_time_plan_counts_what_later_pieces_lose() -> None:
    now = time.monotonic()
    plan = TimePlan(now, 510, 960, 40, finish=False)
    assert plan.training_left(0, 60) == pytest.approx(510 - 46 + 450 - 106, abs=1)
    assert plan.training_left(510, 60) == pytest.approx(450 - 46, abs=1)
    assert TimePlan(now, 510, 960, 40, finish=True).training_left(0, 60) == pytest.approx(
        464, abs=1
    )


# Model


def tiny_model(dtype: torch.dtype = torch.float32) -> Probe:
    torch.manual_seed(0)
    model = Probe(TINY, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            noisy = parameter + 0.1 * torch.randn_like(parameter)
            parameter.copy_(noisy.bfloat16())
    return model


def test_logits_and_greedy_answers_are_transformers_llama(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model()
    save_weights(model, tmp_path)
    save_configs(TINY, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(4, TINY.vocab_size, (2, 100))
    with torch.no_grad():
        expected = reference(tokens).logits
        found = model.logits(model.hidden(tokens, plain_attention)).view_as(expected)
    assert torch.allclose(found, expected, atol=1e-4)
    asked = [tokens[0, :n].tolist() for n in (40, 17, 63)]
    for prompt, answer in zip(
        asked, evaluation.greedy(model, asked, plain_attention, 10), strict=True
    ):
        generated = reference.generate(
            torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=0
        )[0, len(prompt) :].tolist()
        assert answer == [token for token in generated if token != 0]


def test_the_shipped_configs_are_the_scripts() -> None:
    for name, content in (
        ("config.json", ProbeConfig().to_hf()),
        ("generation_config.json", ProbeConfig().generation_config()),
    ):
        assert json.loads((train_probe.ASSETS / name).read_text()) == content


def test_scores_count_answers_in_any_order() -> None:
    assert evaluation.score(" 222, 111.", ("111", "222", "333", "ABC")) == 0.5
    table = evaluation.table({("niah_single_1", 1024): [1.0, 0.5]})
    assert table.splitlines()[-1] == "| 1024 | 75.0 (1/2) |"


# Checkpoints and whole pieces


def test_a_damaged_checkpoint_is_refused_and_parts_stay_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PART_BYTES", 1000)
    tensors = {"a": torch.randn(30, 11), "b": torch.randn(7), "c": torch.tensor(3.0)}
    for step in (1, 2):
        checkpoint.save(tmp_path, step, tensors, {"x": step})
    parts = sorted(tmp_path.glob("state-*"))
    assert len(parts) == 2
    assert max(part.stat().st_size for part in parts) <= 1000
    loaded, state = checkpoint.load(tmp_path)
    assert state == {"x": 2}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    parts[1].write_bytes(parts[1].read_bytes()[:-1] + b"!")
    with pytest.raises(checkpoint.CheckpointError, match="damaged"):
        checkpoint.load(tmp_path)


def make_trainer(
    builder: SequenceBuilder,
    folder: Path,
    log: list[str],
    stages: tuple[Stage, ...] = TINY_STAGES,
) -> Trainer:
    feed = Feed(builder, seed=0, batch_tokens=1024, loss_positions=256, workers=0)
    choices = Settings(0, 1024, 256, stages, compile=False, log_seconds=1.0)
    return Trainer(TINY, choices, feed, device=torch.device("cpu"), folder=folder, log=log.append)


class Clock:
    """Stands for `time`, and goes on by itself: a piece has as many steps on any machine."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def monotonic(self) -> float:
        self._seconds += 0.05
        return self._seconds


def test_a_run_goes_on_where_its_piece_ended(
    builder: SequenceBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("scripts.probe.training.time", clock)
    monkeypatch.setattr("scripts.probe.training.STOP_SECONDS", 0.0)
    log: list[str] = []
    first = make_trainer(builder, tmp_path, log)
    first.run(TimePlan(clock.monotonic(), 3, 6, 0, finish=False))
    second = make_trainer(builder, tmp_path, log)
    second.resume()
    for name, tensor in first.tensors().items():
        assert torch.equal(tensor, second.tensors()[name]), name
    assert second.schedule.position == first.schedule.position
    assert 0 < second.schedule.position.progress < 1
    assert second.next_batch == first.next_batch > 0
    second.run(TimePlan(clock.monotonic(), 3, 6, 0, finish=True))
    assert second.schedule.finished
    assert second.schedule.position.stage == 1
    exported = tmp_path / "export"
    train_probe.export(tmp_path, exported)
    assert sorted(p.name for p in exported.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    weights = load_file(exported / "model.safetensors")
    expected = second.model.hf_state(torch.bfloat16)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


def test_a_run_of_other_stages_is_not_gone_on_with(
    builder: SequenceBuilder, tmp_path: Path
) -> None:
    make_trainer(builder, tmp_path, []).save(0)
    with pytest.raises(checkpoint.CheckpointError, match="--from"):
        make_trainer(builder, tmp_path, [], FINE_TUNING).resume()


def test_a_score_counts_only_the_tokens_a_task_may_generate(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = " ABCDE FGHIJ"
    answer = encode(tokenizer, text)
    monkeypatch.setattr(evaluation, "greedy", lambda *_: [answer, answer])
    made = [
        prompts.Prompt(task, 1024, limit, np.arange(5, dtype=np.int16), ("ABCDE", "FGHIJ"))
        for task, limit in (("vt", len(answer)), ("short", len(answer) - 1))
    ]
    scores = evaluation.evaluate(
        tiny_model(),
        tokenizer,
        made,
        attention=plain_attention,
        batch_tokens=4096,
        out_of_time=lambda: False,
    )
    assert scores == {("vt", 1024): [1.0], ("short", 1024): [0.5]}


def test_bad_gradients_are_skipped_and_then_undone(
    builder: SequenceBuilder, tmp_path: Path
) -> None:
    log: list[str] = []
    trainer = make_trainer(builder, tmp_path, log)
    trainer._start_up()
    trainer._step()
    good = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    with torch.no_grad():
        trainer.model.final_norm[0] = float("nan")
    for _ in range(3):
        trainer.schedule.position.steps += 1
        trainer._step()
    assert "going back to the last good weights" in log
    assert all(torch.equal(good[name], tensor) for name, tensor in trainer.tensors().items())


KILLED = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
import torch
torch.set_num_threads(1)
from scripts.probe import training
from scripts.probe.corpus import Corpus
from scripts.probe.sequences import SequenceBuilder
from tests_helper import make_trainer
training.SECONDS_PER_CHECKPOINT = 0.0
trainer = make_trainer(SequenceBuilder(Corpus.load(Path({corpus!r}))), Path({out!r}), [])
trainer.run(training.TimePlan(time.monotonic(), 60, 120, 0, finish=False))
"""


def test_a_killed_run_leaves_a_whole_checkpoint(
    corpus: Corpus, builder: SequenceBuilder, tmp_path: Path
) -> None:
    corpus.save(tmp_path / "corpus.npz")
    (tmp_path / "tests_helper.py").write_text(Path(__file__).read_text())
    script = KILLED.format(
        root=str(ROOT), corpus=str(tmp_path / "corpus.npz"), out=str(tmp_path / "run")
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
    )
    index = tmp_path / "run" / checkpoint.INDEX
    deadline = time.monotonic() + 600  # it imports much, and may share its processor
    try:
        while time.monotonic() < deadline and process.poll() is None:
            if index.exists() and json.loads(index.read_text())["step"] >= 4:
                break
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
    assert index.exists(), errors.decode()
    resumed = make_trainer(builder, tmp_path / "run", [])
    resumed.resume()
    assert resumed.schedule.position.steps >= 4


def test_prompts_come_back(tmp_path: Path) -> None:
    kept = [
        prompts.Prompt("vt", 1024, 30, np.arange(5, dtype=np.int16), ("1",)),
        prompts.Prompt("niah_multivalue", 4096, 128, np.arange(9, dtype=np.int16), ("1", "2")),
    ]
    prompts.save(tmp_path / "p.xz", kept)
    for before, after in zip(kept, prompts.load(tmp_path / "p.xz"), strict=True):
        assert np.array_equal(before.tokens, after.tokens)
        without = np.empty(0, np.int16)
        assert replace(before, tokens=without) == replace(after, tokens=without)


def test_a_folder_with_a_checkpoint_is_not_started_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save(tmp_path, 1, {"a": torch.zeros(1)}, {})
    assert train_probe.main(["--out", str(tmp_path), "--device", "cpu"]) == 2
    assert "--resume" in capsys.readouterr().out

"""Batches of backend=hf: each row is the answer to its own request, and mixed up rows are found."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from backends.base import Generation, NonFiniteLogits, OutOfMemory, Request
from backends.gathering import Gathering
from backends.hf import TransformersBackend

VOCABULARY, POSITIONS, POISONED = 96, 64, 11


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.4,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.model.embed_tokens.weight.data[POISONED] = float("nan")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def alone(folder):
    return TransformersBackend(model_path=str(folder), threads=1)


@pytest.fixture(scope="module", params=["dynamic", "static"])
def batched(folder, request):
    return TransformersBackend(
        model_path=str(folder), threads=1, batch_size=4, cache_implementation=request.param
    )


def together(backend, requests):
    """Ask requests of a backend from a thread each; return answers or errors, in order."""

    def ask(request):
        try:
            return backend.generate(request)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(ask, requests))


tokens = st.integers(0, VOCABULARY - 1).filter(lambda one: one != POISONED)
asked = st.tuples(st.lists(tokens, min_size=1, max_size=40), st.integers(1, 12))


@settings(max_examples=8, deadline=None)
@given(st.lists(asked, min_size=2, max_size=6), st.lists(tokens, max_size=2))
def test_each_row_is_what_its_request_has_alone(alone, batched, rows, stops):
    requests = [
        Request(number, "", tuple(prompt), limit, tuple(stops))
        for number, (prompt, limit) in enumerate(rows)
    ]
    for request, found in zip(requests, together(batched, requests), strict=True):
        (expected,) = together(alone, [request])
        assert type(found) is type(expected)
        if isinstance(expected, NonFiniteLogits):  # it generated the poisoned token itself
            assert str(found) == str(expected)
            continue
        assert found.token_ids == expected.token_ids
        assert found.finish_reason == expected.finish_reason
        assert found.prompt_tokens == len(request.prompt_token_ids)
        assert len(found.logits_digest) == len(found.token_ids)
        assert found.top2_margin == pytest.approx(expected.top2_margin, abs=1e-3)


def test_a_batch_is_one_call(batched, monkeypatch):
    calls = []
    generate = batched._model.generate

    def counted(prompts, **rest):
        calls.append(len(prompts))
        return generate(prompts, **rest)

    monkeypatch.setattr(batched._model, "generate", counted)
    together(batched, [Request(number, "", (5, 6, number), 3) for number in range(4)])
    assert calls == [4]


def test_logits_that_are_not_finite_are_an_error_of_their_row(alone, batched):
    good, bad = Request(0, "", (5, 6, 7), 4), Request(1, "", (5, POISONED, 7, 8), 4)
    found, error = together(batched, [good, bad])
    assert found.token_ids == alone.generate(good).token_ids
    assert isinstance(error, NonFiniteLogits)


def test_out_of_memory_is_told_to_all_and_the_next_are_answered(batched, monkeypatch):
    requests = [Request(number, "", (5, 6, number), 3) for number in range(3)]

    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(batched._model, "generate", fail)
        assert [type(one) for one in together(batched, requests)] == [OutOfMemory] * 3
    assert all(isinstance(one, Generation) for one in together(batched, requests))


def test_rows_that_are_mixed_up_show_in_a_run(cli, workdir, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    rest = ("length=512", "num_samples=4", "device=cpu", "threads=1", "fresh=inprocess")
    engine = ("backend=custom", "backend._target_=mixed_rows.MixedRows")
    finished = cli(*engine, "arms=[persistent,concurrent_2]", *rest, "out=here")
    assert finished.status == 3, finished.out + finished.err
    found = json.loads((workdir / "here" / "verdict.json").read_text())
    assert found["verdict"] == "leak"
    kinds = {one["kind"] for index in found["indices"] for one in index["evidence"]}
    assert "canary" in kinds
    rows = [
        json.loads(one) for one in (workdir / "here" / "records.jsonl").read_text().splitlines()
    ]
    right = {arm: [one["correct"] for one in rows if one["arm"] == arm] for arm in found["arms"]}
    assert right == {"persistent": [True] * 4, "concurrent_2": [False] * 4}


# --- gathering, without a model -------------------------------------------------------------------


def answered(requests):
    return [Generation(text=str(one.request_id)) for one in requests]


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 4), stops=st.lists(st.integers(0, 1), min_size=1, max_size=9))
def test_every_request_has_its_own_answer_in_batches_of_its_kind(size, stops):
    batches = []

    def answer(requests):
        batches.append(requests)
        return answered(requests)

    gathering = Gathering(size, answer, lambda a, b: a.stop_token_ids == b.stop_token_ids)
    requests = [Request(number, "", (1,), 1, (stop,)) for number, stop in enumerate(stops)]
    with ThreadPoolExecutor(len(requests)) as pool:
        found = list(pool.map(gathering.ask, requests))
    assert [one.text for one in found] == [str(number) for number in range(len(stops))]
    assert sorted(one.request_id for batch in batches for one in batch) == list(range(len(stops)))
    assert all(len(batch) <= size for batch in batches)
    assert all(len({one.stop_token_ids for one in batch}) == 1 for batch in batches)


def test_only_one_batch_is_answered_at_a_time():
    busy, most = [], []
    lock = threading.Lock()

    def answer(requests):
        with lock:
            busy.append(1)
            most.append(len(busy))
        threading.Event().wait(0.01)
        with lock:
            busy.pop()
        return answered(requests)

    gathering = Gathering(2, answer, lambda a, b: True)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(gathering.ask, [Request(number, "", (1,), 1) for number in range(8)]))
    assert set(most) == {1}


def test_what_a_batch_raises_is_raised_by_each_and_the_next_goes_on():
    def answer(requests):
        if requests[0].request_id < 2:
            raise ValueError("a bug")
        return answered(requests)

    gathering = Gathering(2, answer, lambda a, b: True)

    def ask(number):
        try:
            return gathering.ask(Request(number, "", (1,), 1)).text
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, [0, 1])) == ["a bug", "a bug"]
        assert list(pool.map(ask, [2, 3])) == ["2", "3"]

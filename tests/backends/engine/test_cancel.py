"""A request ended from another thread, at any moment, and what the engine answers afterwards."""

import threading

import pytest

from backends.base import RequestCancelled, RequestError
from backends.engine import engine as engine_module
from backends.engine import gpu_only, offload, offload_layerwise
from backends.engine.cache.offload_steps import OffloadOneStep, OffloadStep
from backends.engine.cache.resident import ResidentOneStep, ResidentStep
from backends.engine.ops import TorchOps

PROMPT, NEW, CONTEXT, LAYERS = 70, 12, 128, 3
CUTS = {"chunk_tokens": 24, "attend_tokens": 8}
WAIT_SECONDS = 60
PRESETS = {
    "gpu_only": (gpu_only, CUTS),
    "offload": (offload, CUTS | {"kvcache_block_size": 16, "num_gpu_blocks": 3}),
    "layerwise": (offload_layerwise, {"num_kv_buffers": 2}),
}
STEPS = (OffloadStep, ResidentStep, OffloadOneStep, ResidentOneStep)


class TorchForOneToken(TorchOps):
    """PyTorch's operations by the name that makes an engine take them for steps of one token."""

    name = "triton"


@pytest.fixture(autouse=True)
def ops(request, monkeypatch):
    chosen = getattr(request, "param", TorchOps)
    monkeypatch.setattr(engine_module, "make_ops", lambda device, dtype: chosen())


both_ways = pytest.mark.parametrize(
    "ops", [TorchOps, TorchForOneToken], ids=["general", "one token"], indirect=True
)


@pytest.fixture(params=PRESETS)
def name(request):
    return request.param


@pytest.fixture
def engine(name, tiny):
    build, settings = PRESETS[name]
    return build(model_path=str(tiny), max_model_len=CONTEXT, poison=True, **settings)


@pytest.fixture(scope="module")
def fresh(tiny, ask):
    """Answers of engines that serve nothing else, by preset, operations and length, once each."""
    answers = {}

    def answer(name, tokens):
        build, settings = PRESETS[name]
        key = (name, engine_module.make_ops(None, None).name, tokens)
        if key not in answers:
            alone = build(model_path=str(tiny), max_model_len=CONTEXT, **settings)
            answers[key] = ask(alone, tokens, NEW)
        return answers[key]

    return answer


@pytest.fixture
def meanwhile(monkeypatch):
    """Do something in another thread while a request is held before a layer of a step.

    The request is held once the cache has `held` tokens or more.
    """
    threads, errors = [], []

    def arrange(held, layer, action):
        reached, done = threading.Event(), threading.Event()

        def act():
            if reached.wait(WAIT_SECONDS):
                action()
            done.set()

        def wrapped(room):
            def hold(step, at):
                if at == layer and step._sequence.length >= held and not reached.is_set():
                    reached.set()
                    if not done.wait(WAIT_SECONDS):
                        errors.append("the other thread is stuck")
                return room(step, at)

            return hold

        for kind in STEPS:
            monkeypatch.setattr(kind, "room", wrapped(kind.room))
        threads.append(threading.Thread(target=act))
        threads[0].start()

    yield arrange
    for thread in threads:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
    assert not errors


@pytest.fixture
def assert_as_new(engine, name, fresh, ask):
    """Compare with fresh engines; nothing is left of earlier requests."""

    def check():
        if engine._offload is not None:
            assert engine._offload.pool.used_blocks == 0
        for at, tokens in enumerate((PROMPT, 25), start=100):
            got, wanted = ask(engine, tokens, NEW, request_id=at), fresh(name, tokens)
            assert got.token_ids == wanted.token_ids
            assert got.logits_digest == wanted.logits_digest
            assert (got.bytes_up, got.bytes_down) == (wanted.bytes_up, wanted.bytes_down)

    return check


@both_ways
@pytest.mark.parametrize(
    "moment",
    [(0, 0), (0, 1), (PROMPT, 0), (PROMPT + 5, 1)],
    ids=["prefill, first layer", "prefill", "decode, first layer", "decode"],
)
def test_it_stops_before_its_next_layer(moment, engine, ask, meanwhile, assert_as_new):
    meanwhile(*moment, lambda: engine.cancel(7))
    with pytest.raises(RequestCancelled, match="request 7 was cancelled") as error:
        ask(engine, PROMPT, NEW, request_id=7)
    assert isinstance(error.value, RequestError)
    assert "\n" not in str(error.value)
    assert_as_new()


@both_ways
@pytest.mark.parametrize("name", ["offload"])
def test_a_later_chunk_of_a_prompt_is_not_begun(engine, ask, meanwhile, assert_as_new):
    meanwhile(24, LAYERS - 1, lambda: engine.cancel(7))
    with pytest.raises(RequestCancelled):
        ask(engine, PROMPT, NEW, request_id=7)
    assert engine._streams.copied_bytes["down"] == 2 * 24 * LAYERS * (2 * 2 * 16 * 4)
    assert_as_new()


@both_ways
def test_once_its_last_layer_has_begun_it_is_answered(engine, ask, meanwhile, assert_as_new):
    last = PROMPT + NEW - 2  # the last new token is not fed back
    meanwhile(last, LAYERS - 1, lambda: engine.cancel(7))
    assert len(ask(engine, PROMPT, NEW, request_id=7).token_ids) == NEW
    assert len(ask(engine, PROMPT, NEW, request_id=7).token_ids) == NEW, "and is forgotten"
    assert_as_new()


def test_before_it_begins(engine, ask, assert_as_new):
    engine.cancel(7)
    ask(engine, 30, 2, request_id=6)
    with pytest.raises(RequestCancelled, match="request 7 was cancelled"):
        ask(engine, PROMPT, NEW, request_id=7)
    assert_as_new()


def test_after_it_is_over_and_twice(engine, ask, assert_as_new):
    ask(engine, PROMPT, NEW, request_id=7)
    engine.cancel(7)
    engine.cancel(7)
    assert_as_new()


def test_another_request_goes_on(engine, ask, meanwhile, assert_as_new):
    meanwhile(PROMPT + 2, 1, lambda: engine.cancel(8))
    assert len(ask(engine, PROMPT, NEW, request_id=7).token_ids) == NEW
    with pytest.raises(RequestCancelled, match="request 8 was cancelled"):
        ask(engine, PROMPT, NEW, request_id=8)
    assert_as_new()

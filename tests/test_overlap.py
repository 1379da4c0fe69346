"""Several requests in flight at one engine, in this process and in one of its own."""

import threading
from contextlib import closing
from pathlib import Path

import pytest

from backends.base import ConfigurationError, Generation, Request
from ruler_bench.errors import UsageError
from ruler_bench.lives import Failure, LocalLife, ProcessLife
from ruler_bench.overlap import check_overlap, in_flight, may_overlap
from ruler_bench.streams import streams

PROMPT = (
    "One of the special magic numbers for big-house is: 1234567.\n"
    "What is the special magic number for big-house mentioned in the provided text?"
)
HARNESS = {"model_path": "none", "device": "cpu", "threads": 1, "max_model_len": 9, "dtype": "x"}


@pytest.fixture(autouse=True)
def _engines(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)


def requests(count):
    return [Request(number, PROMPT, (1,), 8) for number in range(count)]


LIVES = {
    "here": lambda settings: LocalLife(settings, HARNESS),
    "process": lambda settings: ProcessLife(settings, HARNESS, timeout_seconds=60),
}


@pytest.fixture(params=LIVES)
def start(request):
    """Build an engine that waits until `together` requests are in it."""
    built = []

    def call(**settings):
        life = LIVES[request.param]({"_target_": "odd_engines.Together", **settings})
        built.append(life)
        return life

    yield call
    for one in built:
        one.close()


def test_so_many_are_in_flight_and_each_gets_its_own_answer(start):
    life = start(together=3)
    assert life.concurrency == 3
    replies = dict(life.ask_several(requests(6)))
    assert {place: reply.answer.text for place, reply in replies.items()} == {
        number: f"{number} of 3" for number in range(6)
    }


def test_an_error_is_one_requests(start):
    life = start(together=1, fail=1)
    replies = dict(life.ask_several(requests(3)))
    # The engine takes single requests afterwards as before.
    assert isinstance(life.ask(requests(1)[0]).answer, Generation)
    assert isinstance(replies[1].answer, Failure)
    assert not replies[1].answer.is_over
    assert [replies[one].answer.text for one in (0, 2)] == ["0 of 1", "2 of 1"]


def test_a_setting_that_cannot_be_honoured_ends_all(start):
    life = start(together=2, refuse=0)
    with (
        pytest.raises(ConfigurationError, match="cannot be honoured"),
        closing(life.ask_several(requests(4))) as replies,
    ):
        list(replies)


def test_a_process_that_dies_leaves_the_others_unanswered():
    life = LIVES["process"]({"_target_": "odd_engines.Together", "together": 2, "die": 2})
    replies = list(life.ask_several(requests(6)))
    failed = [reply.answer for _, reply in replies if isinstance(reply.answer, Failure)]
    assert [one.is_over for one in failed] == [True]
    assert "signal SIGKILL" in failed[0].message
    assert len(replies) < 6
    life.close()


def test_whoever_stops_early_ends_the_process():
    life = LIVES["process"]({"_target_": "odd_engines.Together", "together": 1})
    with closing(life.ask_several(requests(50))) as replies:
        next(replies)
    assert life._process is None
    assert life.close() is None


def test_what_is_not_begun_is_dropped_when_one_stops_early():
    begun, go_on = [], threading.Event()

    def ask(request):
        begun.append(request.request_id)
        if request.request_id:
            go_on.wait(10)
        return request.request_id

    with closing(in_flight(ask, requests(9), 2)) as replies:
        assert next(replies) == (0, 0)
    go_on.set()
    assert set(begun) <= {0, 1, 2}


@pytest.mark.parametrize("arm", ["axa", "repeat", "cancel", "resend", "flood", "aged", "fill"])
def test_where_order_matters_requests_come_one_after_the_other(arm):
    (found,) = streams([arm], [0, 1])
    assert not may_overlap(8, found.steps)
    with pytest.raises(UsageError, match="ask one request at a time"):
        check_overlap(8, arm, [arm])


@pytest.mark.parametrize("arm", ["persistent", "shuffled", "concurrent_4"])
def test_plain_runs_overlap(arm):
    (found,) = streams([arm], [0, 1])
    assert may_overlap(8, found.steps)
    assert not may_overlap(1, found.steps)
    check_overlap(8, arm, [arm])


def test_arms_that_are_compared_do_not():
    with pytest.raises(UsageError, match="add the arm concurrent_8"):
        check_overlap(8, "persistent", ["persistent", "fresh"])
    check_overlap(8, "concurrent_8", ["persistent", "concurrent_8"])
    check_overlap(1, "persistent", ["persistent", "fresh"])

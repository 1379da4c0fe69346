"""One engine lent from run to run."""

from backends.base import Generation, Request
from ruler_bench.kept import Kept
from ruler_bench.lives import Failure, Reply

HARNESS = {"model_path": "m", "device": "cpu", "threads": 1, "max_model_len": 8, "dtype": "x"}


class Engine:
    """A life that notes what it is asked, and dies of a request for no tokens."""

    def __init__(self, settings, harness):
        self.settings, self.can_cancel, self.concurrency = dict(settings), False, 2
        self.seen, self.closed = [], 0

    def ask(self, request, cancel_after_seconds=None):
        self.seen.append(request.request_id)
        if request.max_new_tokens == 0:
            return Reply(Failure("EngineDied: gone", is_over=True))
        return Reply(Generation(token_ids=(1,)))

    def ask_several(self, requests):
        for place, request in enumerate(requests):
            yield place, self.ask(request)

    def close(self):
        self.closed += 1


def request(max_new_tokens=1):
    return Request(0, "", (1,), max_new_tokens)


def lend(kept, folder="a", **settings):
    return kept(settings, HARNESS | {"run_folder": folder})


def test_a_kept_engine_never_sees_a_number_twice_and_knows_what_it_served():
    kept = Kept(Engine)
    first = lend(kept, "a")
    first.ask(request())
    assert first.earlier_requests == 0
    assert first.close() is None
    again = lend(kept, "b")
    assert again is first
    assert again.earlier_requests == 1
    assert [place for place, _ in again.ask_several([request(), request()])] == [0, 1]
    engine = first._life
    assert engine.seen == [0, 1, 2]
    assert engine.closed == 0
    other = lend(kept, policy=2)
    assert engine.closed == 1
    kept.close()
    assert other._life.closed == 1


def test_one_that_died_is_closed_and_built_anew():
    kept = Kept(Engine)
    first = lend(kept)
    first.ask(request(0))
    first.close()
    assert first._life.closed == 1
    second = lend(kept)
    assert second is not first
    assert second.earlier_requests == 0
    list(second.ask_several([request(), request(0)]))
    assert lend(kept) is not second

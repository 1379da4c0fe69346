"""An engine of tokens that keeps the contract, and others that break it in one way each."""

import hashlib
import itertools
import threading
import time
from pathlib import Path

from backends.base import ConfigurationError, Generation, PromptTooLong, Request, RequestError
from backends.oracle import answer_from_needles
from ruler_bench.model_files import model_folder
from ruler_bench.tokenizer import load_tokenizer

CONTEXT = 512
VOCABULARY = 4096
TOKENIZER = load_tokenizer(str(model_folder("package:probe")))
END, FILLER = 0, 9


class Scripted:
    """Answers with the needle, an end token, and fillers for as long as nothing stops it."""

    def __init__(self, *, max_model_len: int = CONTEXT, speed: int = 1) -> None:
        self.max_model_len, self.speed = max_model_len, speed
        self.open = True

    def generate(self, request: Request) -> Generation:
        self.check(request)
        stream = itertools.chain(self.tokens(request), [END], itertools.repeat(FILLER))
        ids = []
        for one in itertools.islice(stream, request.max_new_tokens):
            ids.append(one)
            if one in request.stop_token_ids:
                break
        stopped = ids[-1] in request.stop_token_ids
        return self.finished(request, tuple(ids), "stop" if stopped else "length")

    def check(self, request):
        ids = request.prompt_token_ids
        if not self.open:
            raise RequestError("closed")
        if len(ids) + request.max_new_tokens > self.max_model_len:
            raise PromptTooLong("too long")
        if not ids or request.max_new_tokens < 1 or not 0 <= min(ids) <= max(ids) < VOCABULARY:
            raise RequestError("makes no sense")

    def tokens(self, request):
        return TOKENIZER.encode_prompt(self.text(request))[1:]

    def text(self, request):
        return answer_from_needles(request.prompt)

    def finished(self, request, ids, reason):
        digests = tuple(self.digest(request, ids[:place]) for place in range(len(ids)))
        return Generation(token_ids=ids, finish_reason=reason, logits_digest=digests)

    def digest(self, request, ids):
        known = repr((request.prompt_token_ids, ids)).encode()
        return hashlib.blake2b(known, digest_size=8).hexdigest()

    def describe(self):
        return {"max_model_len": self.max_model_len, "speed": self.speed}

    def close(self):
        self.open = False


class NoClose:
    generate = Scripted.generate

    def describe(self):
        return {}


class Drops(Scripted):
    def describe(self):
        return {"max_model_len": self.max_model_len}


class OtherValue(Scripted):
    def describe(self):
        return super().describe() | {"speed": 1}


class NoJson(Scripted):
    def describe(self):
        return super().describe() | {"folder": Path()}


class Changing(Scripted):
    def describe(self):
        return super().describe() | {"at": time.perf_counter()}


class Keywords(Scripted):
    def __init__(self, **rest):
        super().__init__()


class NoAnswer(Scripted):
    def finished(self, request, ids, reason):
        return list(ids)


class NoStopToken(Scripted):
    def finished(self, request, ids, reason):
        return super().finished(request, ids[:-1] if reason == "stop" else ids, reason)


class AlwaysStop(Scripted):
    def finished(self, request, ids, reason):
        return super().finished(request, ids, "stop")


class Unlimited(Scripted):
    def generate(self, request):
        from dataclasses import replace

        return super().generate(replace(request, max_new_tokens=max(9, request.max_new_tokens)))


class OwnStops(Scripted):
    """Stops where the model's file says, whatever the request says."""

    def generate(self, request):
        from dataclasses import replace

        return super().generate(replace(request, stop_token_ids=(END,)))


class Truncates(Scripted):
    def check(self, request):
        if len(request.prompt_token_ids) + request.max_new_tokens <= self.max_model_len:
            super().check(request)


class OtherError(Scripted):
    def check(self, request):
        try:
            super().check(request)
        except PromptTooLong:
            raise ValueError("too long") from None


class OneTooFew(Scripted):
    def check(self, request):
        super().check(request)
        if len(request.prompt_token_ids) + request.max_new_tokens == self.max_model_len:
            raise PromptTooLong("too long by none")


class DiesOfErrors(Scripted):
    failed = False

    def check(self, request):
        try:
            assert not self.failed, "the engine is broken"
            super().check(request)
        except RequestError:
            self.failed = True
            raise


class Unguarded(Scripted):
    def check(self, request):
        if request.prompt_token_ids and min(request.prompt_token_ids) < 0:
            raise IndexError("index out of range in self")
        super().check(request)


class Random(Scripted):
    served = 0

    def text(self, request):
        self.served += 1
        return super().text(request) + " or so" * (self.served == 3)


class Drifting(Scripted):
    """Equal tokens, other logits, from one request to the next."""

    served = 0

    def digest(self, request, ids):
        self.served += not ids
        return super().digest(request, (self.served, *ids))


class Previous(Scripted):
    before = None

    def text(self, request):
        answer = super().text(request)
        before, self.before = self.before, answer
        return before or answer


class Uncleared(Scripted):
    """Reads on where a shorter prompt ends: the longest one so far lies behind it."""

    text_before = ""

    def text(self, request):
        if len(request.prompt) < len(self.text_before):
            return answer_from_needles(self.text_before)
        self.text_before = request.prompt
        return super().text(request)


class KeyedByLength(Scripted):
    def __init__(self, *, max_model_len: int = CONTEXT) -> None:
        super().__init__(max_model_len=max_model_len)
        self.known = {}

    def text(self, request):
        return self.known.setdefault(len(request.prompt_token_ids) // 64, super().text(request))


class OfItsClass(Scripted):
    """What the first engine answered is what all of its process answer."""

    known: str = ""

    def text(self, request):
        OfItsClass.known = OfItsClass.known or super().text(request)
        return OfItsClass.known


class SwapsRows(Scripted):
    """Gives a request the answer of another one that is in flight."""

    concurrency = 2

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.waiting = threading.Lock(), None

    def text(self, request):
        with self.lock:
            mine, self.waiting = self.waiting, request
        time.sleep(0.02)
        with self.lock:
            self.waiting = None
        return super().text(mine or request)


class ClosesOnce(Scripted):
    def close(self):
        assert self.open, "closed already"
        super().close()


class AnswersOn(Scripted):
    def close(self):
        pass


class HangsClosed(Scripted):
    def check(self, request):
        if not self.open:
            threading.Event().wait()
        super().check(request)


class LeavesThread(Scripted):
    ended = threading.Event()

    def generate(self, request):
        thread = threading.Thread(target=self.ended.wait, name="pump", daemon=False)
        thread.start()
        return super().generate(request)


class KeepsPort(Scripted):
    taken = False

    def __init__(self) -> None:
        super().__init__()
        if KeepsPort.taken:
            raise OSError(98, "Address already in use")
        KeepsPort.taken = True


class NoLateCancel(Scripted):
    def cancel(self, request_id):
        raise KeyError(request_id)


class Refuses(Scripted):
    def __init__(self) -> None:
        raise ConfigurationError("a setting cannot be honoured")

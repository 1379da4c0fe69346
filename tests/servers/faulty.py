"""A server with the OpenAI interface that answers needle tasks, with one fault at a time.

    python tests/servers/faulty.py --port 8000 --fault previous_answer

It needs no model: the answer is read off the prompt, as backends/oracle.py does. `--at` says which
requests the fault hits, counted from 0 without those for one token; by default all; `--schedule
1:cut,2:html` gives several a fault each. With
`--tokenizer FILE` prompts may be ids, and usage and token ids are told.
"""

from __future__ import annotations

import argparse
import email.utils
import json
import os
import select
import socket
import ssl
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from backends.base import RequestError
from backends.oracle import answer_from_needles

FAULTS = {
    "previous_answer": "the answer to the request before",
    "stale_on_repeat": "a prompt that was seen before gets the answer to the latest other one",
    "evicted": "the same, where EVICTED_AFTER others were asked in between",
    "warm_prefix": "a prompt that begins like an earlier one gets the answer to that",
    "rows_swapped": "of two requests in flight at a time, each gets the other's answer",
    "cancel_ignored": "what a request that was broken off has left comes with the next one",
    "storm": "429 as often as --times says, then the answer",
    "storm_until": "the same, with a date in Retry-After",
    "unavailable": "503",
    "hang": "no answer",
    "drip": "an answer that never ends",
    "cut": "the stream ends in the middle",
    "html": "a web page",
    "empty_choices": "no choice",
    "redirect": "a redirect to another address",
    "restart": "the program starts anew in the middle of a request",
    "die": "the program ends in the middle of a request",
    "flood": "more bytes than anybody asked for",
    "nan": "NaN as a log-probability",
    "garbage": "no JSON",
    "error_event": "an error in the middle of the stream",
    "echo": "the headers that were sent, in an answer and in the log",
    "echo_error": "the headers that were sent, in an error",
    "echo_late": "the same, so far on in the message that what is shown of it ends within the key",
    "echo_garbage": "the same, in what is no JSON",
    "echo_escaped": "the same, in JSON that writes hyphens as \\u002d",
    "hostile": "an answer in the languages of shells, pages, sheets, templates and terminals",
}
HOSTILE = (
    "=HYPERLINK(1) ${oc.env:PLANTED} {{7*191}} $(touch made) `touch made` <script>x</script> "
    "\x1b]0;title\x07\x1b[2J __import__('os').system('touch made') !!python/name:os ../../made"
)
EVICTED_AFTER = 3
PREFIX_CHARACTERS = 600
PIECE_CHARACTERS = 3


class State:
    """What the server remembers; none of it would matter without a fault."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.lock = threading.Lock()
        self.asked = 0
        self.tries: dict[str, tuple[int, int]] = {}
        self.seen: list[tuple[str, str]] = []
        self.left_over = ""
        self.waiting: list[Row] = []
        self.tokenizer = None
        if options.tokenizer:
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_file(options.tokenizer)

    def answer(self, prompt: str) -> str:
        own = answer_from_needles(prompt)
        with self.lock:
            seen = list(self.seen)
            self.seen.append((prompt, own))
        fault = self.options.fault
        others = [answer for asked, answer in seen if asked != prompt]
        if fault == "previous_answer" and seen:
            return seen[-1][1]
        if fault == "stale_on_repeat" and others and any(asked == prompt for asked, _ in seen):
            return others[-1]
        if fault == "evicted":
            since = [asked for asked, _ in seen]
            if prompt in since and len(since) - since.index(prompt) > EVICTED_AFTER:
                return others[-1]
        if fault == "warm_prefix":
            beginning = prompt[:PREFIX_CHARACTERS]
            alike = [one for asked, one in seen if asked[:PREFIX_CHARACTERS] == beginning]
            return alike[0] if alike else own
        if fault == "rows_swapped":
            return self.swapped(own)
        return own

    def swapped(self, own: str) -> str:
        row = Row(own)
        with self.lock:
            other = self.waiting.pop() if self.waiting else None
            if other is None:
                self.waiting.append(row)
        if other is not None:
            other.gets, row.gets = row.own, other.own
            other.met.set()
            return row.gets
        row.met.wait(self.options.row_seconds)
        with self.lock:
            if row in self.waiting:
                self.waiting.remove(row)
        return row.gets


class Row:
    def __init__(self, own: str) -> None:
        self.own = self.gets = own
        self.met = threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    state: State

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/health":
            self.whole({"status": "ok"})
        elif self.path == "/v1/models":
            if self.options.echo_models:
                self.send(200, "application/json", f"{dict(self.headers)}")
            elif self.admitted():
                told = {
                    "max_model_len": {"max_model_len": self.options.context},
                    "meta": {"meta": {"n_ctx": self.options.context, "n_ctx_train": 1 << 20}},
                }
                entry = told.get(self.options.tell_context, {})
                self.whole({"data": [{"id": one, **entry} for one in self.options.models]})
        else:
            self.send(404, "text/html", "<html><title>Not Found</title></html>")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.admitted():
            return
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            self.send(404, "text/html", "<html><title>Not Found</title></html>")
            return
        untold = [] if self.state.tokenizer else ["return_token_ids"]
        refused = next((one for one in [*self.options.refuse, *untold] if one in body), None)
        if refused:
            self.whole({"detail": f"Unexpected fields in the request: {refused}"}, 422)
        elif body["model"] not in self.options.models:
            self.whole({"error": {"message": f"The model {body['model']} does not exist."}}, 404)
        elif self.limit(body) == 1:
            self.stream(body, "x" if self.is_readable(body) else None)
        else:
            self.ask(body)

    @property
    def options(self) -> argparse.Namespace:
        return self.state.options

    def admitted(self) -> bool:
        variable = self.options.key_variable
        if variable is None:
            return True
        if self.headers.get("Authorization") == f"Bearer {os.environ[variable]}":
            return True
        self.whole({"error": {"message": f"Bad key: {self.headers.get('Authorization')}"}}, 401)
        return False

    def limit(self, body: dict) -> int:
        return body.get("max_tokens", body.get("max_completion_tokens"))

    def is_readable(self, body: dict) -> bool:
        return not isinstance(body.get("prompt"), list) or self.state.tokenizer is not None

    def prompt(self, body: dict) -> str:
        if "messages" in body:
            return body["messages"][-1]["content"]
        prompt = body["prompt"]
        return prompt if isinstance(prompt, str) else self.state.tokenizer.decode(prompt)

    def prompt_tokens(self, body: dict) -> int | None:
        if self.state.tokenizer is None:
            return None
        if isinstance(body.get("prompt"), list):
            return len(body["prompt"])
        return len(self.state.tokenizer.encode(self.prompt(body)).ids) + self.options.more_tokens

    # --- an answer, or a fault ------------------------------------------------------------------

    def ask(self, body: dict) -> None:
        if not self.is_readable(body):
            self.whole({"error": {"message": "prompt must be a string"}}, 400)
            return
        prompt, options = self.prompt(body), self.options
        tokens = self.prompt_tokens(body)
        if options.context and tokens and tokens + self.limit(body) > options.context:
            said = f"This model's maximum context length is {options.context} tokens."
            self.whole({"error": {"message": said}}, 400)
            return
        with self.state.lock:
            first, tries = self.state.tries.get(prompt, (self.state.asked, 0))
            self.state.tries[prompt] = first, tries + 1
            # A request that is sent again in a storm, or by a schedule, is the same one.
            is_same = options.schedule or options.fault.startswith("storm")
            number = first if is_same else self.state.asked
            self.state.asked += number == self.state.asked
        fault = options.schedule.get(number)
        if fault is None and (options.at is None or number in options.at):
            fault = options.fault
        method = getattr(self, f"fault_{fault}", None)
        if method is not None:
            method(body, prompt, tries)
            return
        try:
            self.stream(body, self.state.answer(prompt))
        except RequestError as error:
            self.whole({"error": {"message": str(error)}}, 400)

    def fault_storm(self, body: dict, prompt: str, tries: int, until: bool = False) -> None:
        if tries >= self.options.times:
            self.stream(body, self.state.answer(prompt))
            return
        after = email.utils.formatdate(time.time(), usegmt=True) if until else "0"
        self.whole({"error": {"message": "slow down"}}, 429, {"Retry-After": after})

    def fault_storm_until(self, body: dict, prompt: str, tries: int) -> None:
        self.fault_storm(body, prompt, tries, until=True)

    def fault_unavailable(self, body: dict, prompt: str, tries: int) -> None:
        self.whole({"error": {"message": "loading"}}, 503)

    def fault_hang(self, body: dict, prompt: str, tries: int) -> None:
        self.connection.settimeout(60)
        self.close_connection = True
        self.connection.recv(1)  # until the client has enough of it

    def fault_drip(self, body: dict, prompt: str, tries: int) -> None:
        self.begin("text/event-stream")
        while True:
            self.event({"choices": [{"index": 0, "text": " 1"}]})
            time.sleep(0.02)

    def fault_cut(self, body: dict, prompt: str, tries: int) -> None:
        self.begin("text/event-stream")
        self.event(self.chunk(body, self.state.answer(prompt)[:3]))
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def fault_html(self, body: dict, prompt: str, tries: int) -> None:
        self.send(200, "text/html", "<html><title>Welcome to\nthe portal</title></html>")

    def fault_empty_choices(self, body: dict, prompt: str, tries: int) -> None:
        self.begin("text/event-stream")
        self.event({"choices": []})
        self.end()

    def fault_redirect(self, body: dict, prompt: str, tries: int) -> None:
        self.whole({}, 307, {"Location": "http://elsewhere.invalid/v1/completions"})

    def fault_restart(self, body: dict, prompt: str, tries: int) -> None:
        self.begin("text/event-stream")
        self.event(self.chunk(body, " "))
        os.execv(sys.executable, [sys.executable, *sys.argv, "--fault", "none"])

    def fault_die(self, body: dict, prompt: str, tries: int) -> None:
        print("the last words of the server", flush=True)
        os._exit(7)

    def fault_flood(self, body: dict, prompt: str, tries: int) -> None:
        self.begin("text/event-stream")
        while True:
            self.piece(b": " + b"x" * (1 << 20) + b"\n")

    def fault_nan(self, body: dict, prompt: str, tries: int) -> None:
        self.begin("text/event-stream")
        self.event(self.chunk(body, " 1") | {"x": float("nan")})
        self.end()

    def fault_garbage(self, body: dict, prompt: str, tries: int) -> None:
        self.begin("text/event-stream")
        self.piece(b"data: {'not': json}\n\n")
        self.end()

    def fault_error_event(self, body: dict, prompt: str, tries: int) -> None:
        self.begin("text/event-stream")
        self.event(self.chunk(body, " "))
        self.event({"error": {"message": "out of memory", "code": 500}})
        self.end()

    def fault_echo(self, body: dict, prompt: str, tries: int) -> None:
        print("headers:", dict(self.headers), flush=True)
        self.stream(body, self.state.answer(prompt) + f" {self.headers['Authorization']}")

    def fault_echo_error(self, body: dict, prompt: str, tries: int) -> None:
        self.whole({"error": {"message": f"headers: {dict(self.headers)}"}}, 400)

    def fault_echo_late(self, body: dict, prompt: str, tries: int) -> None:
        said = "x" * 280 + self.headers["Authorization"] + "x" * 100
        self.whole({"error": {"message": said}}, 400)

    def fault_echo_garbage(self, body: dict, prompt: str, tries: int) -> None:
        self.begin("text/event-stream")
        self.piece(f"data: {'x' * 280} {self.headers['Authorization']}\n\n".encode())
        self.end()

    def fault_echo_escaped(self, body: dict, prompt: str, tries: int) -> None:
        said = json.dumps({"error": {"message": self.headers["Authorization"]}})
        self.send(400, "application/json", said.replace("-", "\\u002d"))

    def fault_hostile(self, body: dict, prompt: str, tries: int) -> None:
        self.stream(body, HOSTILE)

    # --- what goes over the wire ----------------------------------------------------------------

    def stream(self, body: dict, answer: str | None) -> None:
        if answer is None:
            self.whole({"error": {"message": "prompt must be a string"}}, 400)
            return
        limit = self.limit(body)
        time.sleep(self.options.first_seconds if limit > 1 else 0)
        with self.state.lock:
            answer, self.state.left_over = self.state.left_over + answer, ""
        pieces = [
            answer[start : start + PIECE_CHARACTERS]
            for start in range(0, len(answer), PIECE_CHARACTERS)
        ]
        if not body.get("stream") or self.options.no_stream:
            text = self.chunk(body, answer, "stop") | {"usage": self.usage(body, answer)}
            if "messages" in body:
                text["choices"][0]["message"] = text["choices"][0].pop("delta")
            self.whole(text)
            return
        self.begin("text/event-stream")
        for number, piece in enumerate(pieces):
            if self.is_left():
                if self.options.fault == "cancel_ignored":
                    with self.state.lock:
                        self.state.left_over = "".join(pieces[number:])
                self.close_connection = True
                return
            self.event(self.chunk(body, piece))
            time.sleep(self.options.piece_seconds if limit > 1 else 0)
        reason = "length" if limit == 1 else "stop"
        self.event(self.chunk(body, "", reason))
        if body.get("stream_options"):
            self.event({"choices": [], "usage": self.usage(body, answer)})
        self.end()

    def is_left(self) -> bool:
        """Whether the client has closed the connection."""
        if not select.select([self.connection], [], [], 0)[0]:
            return False
        return not self.connection.recv(1, socket.MSG_PEEK)

    def usage(self, body: dict, answer: str) -> dict | None:
        tokens = self.prompt_tokens(body)
        if tokens is None:
            return None
        ids = self.state.tokenizer.encode(answer, add_special_tokens=False).ids
        counts = {"prompt_tokens": tokens, "completion_tokens": len(ids)}
        return counts | {"total_tokens": tokens + len(ids)}

    def chunk(self, body: dict, piece: str, reason: str | None = None) -> dict:
        choice: dict = {"index": 0, "finish_reason": reason}
        tokenizer = self.state.tokenizer
        ids = tokenizer.encode(piece, add_special_tokens=False).ids if tokenizer and piece else []
        if body.get("return_token_ids"):
            choice["token_ids"] = ids
        count = max(1, len(ids)) if piece else 0
        if "messages" in body:
            choice["delta"] = {"content": piece}
            if body.get("logprobs"):
                top = [{"token": "a", "logprob": -0.25}, {"token": "b", "logprob": -1.75}]
                choice["logprobs"] = {"content": [{"top_logprobs": top}] * count}
        else:
            choice["text"] = piece
            if body.get("logprobs"):
                choice["logprobs"] = {"top_logprobs": [{"a": -0.25, "b": -1.75}] * count}
        return {"id": "1", "object": "chunk", "model": body["model"], "choices": [choice]}

    def begin(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def event(self, found: dict) -> None:
        self.piece(f"data: {json.dumps(found)}\n\n".encode())

    def piece(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def end(self) -> None:
        self.piece(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def whole(self, found: dict, status: int = 200, headers: dict | None = None) -> None:
        self.send(status, "application/json", json.dumps(found), headers)

    def send(self, status: int, kind: str, text: str, headers: dict | None = None) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def scheduled(text: str) -> dict[int, str]:
    """Return the fault of each request of 1:cut,2:html."""
    pairs = (one.split(":") for one in text.split(","))
    return {int(number): fault for number, fault in pairs}


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--fault", choices=["none", *FAULTS], default="none")
    parser.add_argument("--at", type=lambda text: [int(one) for one in text.split(",")])
    parser.add_argument("--schedule", type=scheduled, default={})
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--models", type=lambda text: text.split(","), default=["needles"])
    parser.add_argument("--echo-models", action="store_true")
    parser.add_argument("--tokenizer")
    parser.add_argument("--context", type=int)
    parser.add_argument("--tell-context", nargs="?", const="max_model_len")
    parser.add_argument("--more-tokens", type=int, default=0)
    parser.add_argument("--refuse", type=lambda text: text.split(","), default=[])
    parser.add_argument("--no-stream", action="store_true")
    parser.add_argument("--key-variable")
    parser.add_argument("--certificate")
    parser.add_argument("--first-seconds", type=float, default=0.0)
    parser.add_argument("--piece-seconds", type=float, default=0.0)
    parser.add_argument("--row-seconds", type=float, default=0.3)
    parser.add_argument("--start-seconds", type=float, default=0.0)
    return parser.parse_args(arguments)


def make(options: argparse.Namespace) -> Server:
    """Return a server that listens and does not serve yet."""
    handler = type("OneHandler", (Handler,), {"state": State(options)})
    server = Server(("127.0.0.1", options.port), handler)
    if options.certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    return server


if __name__ == "__main__":
    asked_for = parsed(sys.argv[1:])
    time.sleep(asked_for.start_seconds)
    made = make(asked_for)
    print(made.server_port, flush=True)
    made.serve_forever()

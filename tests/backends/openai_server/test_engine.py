"""Requests to real servers: what is asked, what comes back, and what is said of what does not."""

import gc
import json
import threading
import time
import warnings
from pathlib import Path

import pytest
import trustme

from backends.base import (
    ConfigurationError,
    NonFiniteLogits,
    PromptTooLong,
    RequestCancelled,
    RequestError,
)
from backends.openai_server import connection as connections
from backends.openai_server.engine import OpenAIServer
from ruler_bench.tokenizer import load_tokenizer

PROBE = Path(__file__).parent.parent.parent.parent / "ruler_bench" / "assets" / "probe"
TOKENIZER = ("--tokenizer", PROBE / "tokenizer.json")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(PROBE))


def test_completions_as_text_with_what_a_plain_server_tells(serving, build, ask):
    backend = build(base_url=serving("--refuse", "logprobs,return_token_ids,stream_options"))
    found = backend.generate(ask(7))
    assert found.text == " 1000007"
    assert found.finish_reason == "stop"
    assert (found.token_ids, found.top2_margin, found.prompt_tokens) == (None, None, None)
    assert found.ttft_seconds > 0
    assert found.decode_seconds >= 0
    told = backend.describe()
    assert (told["model"], told["prompt"], told["asks_for"]) == ("needles", "text", [])
    assert told["outlives_close"] is True
    json.dumps(told, allow_nan=False)


def test_ids_logprobs_and_usage_where_the_server_takes_them(serving, build, ask, tokenizer):
    backend = build(base_url=serving(*TOKENIZER))
    ids = tokenizer.encode_prompt(ask(7).prompt)
    found = backend.generate(ask(7, ids=ids))
    assert found.text == " 1000007"
    assert tokenizer.decode(found.token_ids) == " 1000007"
    assert set(found.top2_margin) == {1.5}
    assert len(found.top2_margin) == len(found.token_ids)
    assert found.prompt_tokens == len(ids)
    assert backend.describe()["prompt"] == "ids"
    assert backend.describe()["asks_for"] == ["usage", "token_ids", "logprobs"]


@pytest.mark.parametrize("options", [(), ("--no-stream",), ("--refuse", "max_tokens")])
def test_chat_streamed_whole_and_with_the_new_name_of_the_limit(serving, build, ask, options):
    backend = build(base_url=serving(*options), api="chat")
    found = backend.generate(ask(3))
    assert found.text == " 1000003"
    assert (found.ttft_seconds is None) == (options == ("--no-stream",))


def test_the_answer_prefix_stays_and_requests_are_greedy(build, ask):
    """What goes over the wire, as the server sees it."""
    from backends.openai_server.offer import Offer

    body = Offer(model="m", api="completions", extra={"seed": 5}).body(ask(1, limit=9))
    assert body == {
        "model": "m",
        "prompt": ask(1).prompt,
        "max_tokens": 9,
        "temperature": 0,
        "stream": True,
        "seed": 5,
    }
    body = Offer(model="m", api="chat").body(ask(1, limit=9))
    assert body["messages"] == [{"role": "user", "content": ask(1).prompt}]
    assert Offer(model="m", api="completions", prompt="ids").body(ask(1))["prompt"] == [1, 2, 3]


@pytest.mark.parametrize("fault", ["storm", "storm_until"])
def test_a_storm_is_waited_out_and_counted(serving, build, ask, fault, capsys):
    backend = build(base_url=serving("--fault", fault, "--times", 3))
    found = backend.generate(ask(1))
    assert found.text == " 1000001"
    assert found.retries == 3
    assert capsys.readouterr().err.count("answers 429 (slow down); asks again in 0 s") == 3
    assert backend.generate(ask(1)).retries == 0


FAULTS = {
    "storm": "answers 429 (slow down) (3 tries)",
    "unavailable": "answers 503 (loading) (3 tries)",
    "hang": "gave no whole answer within backend.request_seconds=0.2 (3 tries)",
    "drip": "gave no whole answer within backend.request_seconds=0.2 (3 tries)",
    "cut": "the stream was cut after 3 characters",
    "html": "answers with text/html, not text/event-stream: a web page, 'Welcome to the portal'",
    "empty_choices": "the server sent no answer: choices is empty",
    "redirect": "it redirects to http://elsewhere.invalid/v1/completions, which is not followed",
    "garbage": "the server sent no JSON: {'not': json}",
    "error_event": "the server reports an error: out of memory",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_an_error_of_its_request_and_the_next_is_answered(serving, build, ask, fault):
    url = serving("--fault", fault, "--at", "0,1,2", "--times", "9")
    patience = 0.2 if fault in ("hang", "drip") else 10.0
    backend = build(base_url=url, retries=2, request_seconds=patience)
    with pytest.raises(RequestError) as caught:
        backend.generate(ask(0))
    assert FAULTS[fault] in str(caught.value)
    assert "\n" not in str(caught.value)
    for number in (1, 2):
        if fault not in ("unavailable", "hang", "drip"):
            with pytest.raises(RequestError):
                backend.generate(ask(number))
    assert backend.generate(ask(3)).text == " 1000003"


def test_nan_is_told_as_what_it_is(serving, build, ask):
    backend = build(base_url=serving("--fault", "nan"))
    with pytest.raises(NonFiniteLogits):
        backend.generate(ask(0))


def test_an_answer_without_end_is_broken_off_by_its_size(serving, build, ask, monkeypatch):
    monkeypatch.setattr(connections, "MAX_RESPONSE_BYTES", 1 << 16)
    monkeypatch.setattr(connections.Connection._chunks, "__defaults__", (1 << 16,))
    backend = build(base_url=serving("--fault", "flood"))
    with pytest.raises(RequestError, match=r"more than \d+ bytes"):
        backend.generate(ask(0))


# --- cancel, several at a time, close -----------------------------------------------------------


def test_a_request_is_cancelled_before_its_first_token_and_the_server_sees_it(serving, build, ask):
    url = serving("--fault", "cancel_ignored", "--first-seconds", "0.3")
    backend = build(base_url=url)
    timer = threading.Timer(0.1, backend.cancel, [5])
    timer.start()
    started = time.monotonic()
    with pytest.raises(RequestCancelled, match="request 5 was cancelled"):
        backend.generate(ask(5))
    assert time.monotonic() - started < 0.3
    time.sleep(0.4)
    # This server carries the rest of the cancelled answer over: it has seen the connection end.
    assert backend.generate(ask(6)).text == " 1000005 1000006"
    backend.cancel(6)  # over already
    assert backend.generate(ask(7)).text == " 1000007"


def test_several_threads_may_ask(serving, build, ask):
    backend = build(base_url=serving("--fault", "rows_swapped"), concurrency=2)
    found = {}

    def run(number):
        found[number] = backend.generate(ask(number)).text

    threads = [threading.Thread(target=run, args=(one,)) for one in (1, 2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    # The two were in flight at once: this server mixed them up.
    assert found == {1: " 1000002", 2: " 1000001"}


def test_close_ends_what_is_in_flight(serving, build, ask):
    backend = build(base_url=serving("--fault", "hang"))
    said = []

    def run():
        try:
            backend.generate(ask(0))
        except RequestError as error:
            said.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.1)
    backend.close()
    thread.join(5)
    assert not thread.is_alive()
    assert isinstance(said[0], RequestCancelled)
    backend.close()


def test_after_close_a_request_is_refused_and_nothing_is_left(serving, build, ask):
    backend = build(base_url=serving())
    backend.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RequestError, match="the engine is closed"):
            backend.generate(ask(0))
        backend.cancel(0)
        gc.collect()  # a coroutine that nobody waits for says so when it goes


def test_requests_that_meet_the_end_are_over_soon(serving, build, ask):
    """Threads that ask while another closes: each has an answer or an error, and none waits."""
    backend = build(base_url=serving(), concurrency=4)
    said = []

    def run():
        for number in range(200):
            try:
                backend.generate(ask(number))
            except RequestError as error:
                said.append(str(error))
                return

    threads = [threading.Thread(target=run) for _ in range(4)]
    for one in threads:
        one.start()
    time.sleep(0.05)
    backend.close()
    for one in threads:
        one.join(10)
    assert not any(one.is_alive() for one in threads)
    assert len(said) == 4


# --- what a server does not take ----------------------------------------------------------------


def refused(build, **settings):
    with pytest.raises(ConfigurationError) as caught:
        build(**settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_address_where_nothing_listens_is_said_at_once(build):
    said = refused(build, base_url="http://127.0.0.1:9/v1", backoff_seconds=60.0)
    assert "nothing answers at http://127.0.0.1:9/v1 (Connection refused)" in said
    assert "or let backend.serve.command start one" in said


def test_a_host_that_does_not_exist_is_said(build):
    assert "nothing answers at http://no-such-host.invalid" in refused(
        build, base_url="http://no-such-host.invalid/v1"
    )


def test_an_address_that_is_not_the_interfaces_is_said(serving, build):
    url = serving().removesuffix("/v1")
    said = refused(build, base_url=url)
    assert "answers 404 (a web page, 'Not Found')" in said
    assert "which mostly ends in /v1" in said
    assert "answers 404 (a web page, 'Not Found')" in refused(build, base_url=url, model="needles")


def test_models_are_chosen_and_listed(serving, build, ask):
    url = serving("--models", "llama-8b,llama-70b")
    said = refused(build, base_url=url)
    assert said == "backend.model is missing: the server offers llama-70b, llama-8b; choose one."
    said = refused(build, base_url=url, model="lama-8b")
    assert "The model lama-8b does not exist" in said
    assert "Did you mean 'llama-8b'? The server offers llama-70b, llama-8b." in said
    assert build(base_url=url, model="llama-8b").describe()["model"] == "llama-8b"


@pytest.mark.parametrize("key", [None, "wrong-key-1234"])
def test_a_key_that_is_missing_or_wrong_names_its_variable(serving, build, monkeypatch, key):
    monkeypatch.setenv("SERVER_KEY", "right-key-1234")
    url = serving("--key-variable", "SERVER_KEY")
    monkeypatch.delenv("MY_KEY", raising=False)
    if key:
        monkeypatch.setenv("MY_KEY", key)
    said = refused(build, base_url=url, api_key_env="MY_KEY")
    assert "answers 401: it wants a key" in said
    assert "MY_KEY" in said
    assert not key or key not in said
    assert build(base_url=url, api_key_env="SERVER_KEY").describe()["has_key"] is True
    assert "right-key" not in json.dumps(build(base_url=url, api_key_env="SERVER_KEY").describe())


@pytest.mark.parametrize(
    "fault", ["echo", "echo_error", "echo_late", "echo_garbage", "echo_escaped"]
)
def test_a_server_that_echoes_the_key_does_not_get_it_shown(
    serving, build, ask, monkeypatch, fault
):
    monkeypatch.setenv("MY_KEY", "sk-secret-1234")
    backend = build(base_url=serving("--fault", fault), api_key_env="MY_KEY")
    if fault == "echo":
        assert backend.generate(ask(1)).text == " 1000001 Bearer (key)"
    else:
        with pytest.raises(RequestError, match=r"Bearer \(key\)") as caught:
            backend.generate(ask(1))
        assert "sk-" not in str(caught.value)


def test_ids_that_would_spell_the_key_are_not_kept(serving, build, ask, tokenizer, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-secret-1234")
    ids = tokenizer.encode_prompt(ask(1).prompt)
    found = build(base_url=serving(*TOKENIZER, "--fault", "echo"), api_key_env="MY_KEY").generate(
        ask(1, ids=ids)
    )
    assert found.text == " 1000001 Bearer (key)"
    assert (found.token_ids, found.top2_margin) == (None, None)


def test_a_list_of_models_that_is_none_does_not_show_the_key(serving, build, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-secret-1234")
    said = refused(build, base_url=serving("--echo-models"), api_key_env="MY_KEY")
    assert "sent no JSON" in said
    assert "Bearer (key)" in said


def test_another_tokenizer_is_refused_with_the_difference(serving, build, ask, tokenizer):
    url = serving(*TOKENIZER, "--more-tokens", "3")
    ids = tokenizer.encode_prompt(ask(1).prompt)
    backend = build(base_url=url, prompt="text")
    with pytest.raises(ConfigurationError, match=r"\(\+3\): they are not the same tokenizer"):
        backend.generate(ask(1, ids=ids))
    with pytest.raises(ConfigurationError, match=rf"counts {len(ids) + 3} tokens .* has 3 by"):
        backend.generate(ask(1))
    assert build(base_url=url, prompt="text", check_length=False).generate(ask(1)).text
    # A chat template adds some.
    chat = build(base_url=url, api="chat")
    assert chat.generate(ask(1, ids=ids)).prompt_tokens == len(ids) + 3
    with pytest.raises(ConfigurationError, match="not the same tokenizer"):
        chat.generate(ask(1, ids=ids * 2))


def test_a_prompt_beyond_the_servers_context_is_told(serving, build, ask, tokenizer):
    ids = tokenizer.encode_prompt(ask(1).prompt)
    backend = build(base_url=serving(*TOKENIZER, "--context", len(ids) + 10), max_model_len=4096)
    with pytest.raises(PromptTooLong, match="maximum context length is"):
        backend.generate(ask(1, ids=ids, limit=11))
    assert backend.generate(ask(1, ids=ids, limit=10)).text
    with pytest.raises(PromptTooLong, match="more than max_model_len=4096"):
        backend.generate(ask(1, ids=ids, limit=4096))


@pytest.mark.parametrize("field", ["max_model_len", "meta"])
def test_a_context_that_the_server_tells_is_held_against_the_runs(serving, build, field):
    url = serving("--context", "2048", "--tell-context", field)
    said = refused(build, base_url=url, max_model_len=4096)
    assert "takes 2048 tokens" in said
    assert "use length=2048 or less" in said
    assert build(base_url=url, max_model_len=1024).describe()["max_model_len"] == 1024
    assert build(base_url=url).describe()["max_model_len"] == 2048


def test_prompts_as_ids_are_refused_where_the_server_takes_none(serving, build):
    said = refused(build, base_url=serving(), prompt="ids")
    assert "the server takes no token ids" in said
    assert "prompt must be a string" in said


def test_a_certificate_of_ones_own_is_trusted_where_it_is_named(serving, build, ask, tmp_path):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(
        tmp_path / "server.pem"
    )
    url = serving("--certificate", tmp_path / "server.pem")
    said = refused(build, base_url=url)
    assert f"the certificate of {url} is not trusted" in said
    assert "backend.verify=FILE" in said
    for verify in (False, str(tmp_path / "ca.pem")):
        assert build(base_url=url, verify=verify).generate(ask(1)).text == " 1000001"
    said = refused(build, base_url=serving().replace("http:", "https:"))
    assert "should it begin with http://?" in said


BAD = {
    "base_url is missing": {},
    "must begin with http:// or https://": {"base_url": "localhost:8000"},
    "must end with the path": {"base_url": "http://x/v1?key=1"},
    "holds a user or a password": {"base_url": "http://me:pass@x/v1"},
    "stands for the port of a server": {"base_url": "http://127.0.0.1:{port}/v1"},
    "unknown backend.api 'caht'. Did you mean 'chat'?": {"base_url": "http://x", "api": "caht"},
    "unknown backend.prompt 'id'": {"base_url": "http://x", "prompt": "id"},
    "backend.retries=-1: must be an integer in 0 to": {"base_url": "http://x", "retries": -1},
    "backend.concurrency=0": {"base_url": "http://x", "concurrency": 0},
    "backend.request_seconds=0": {"base_url": "http://x", "request_seconds": 0},
    "backend.verify=none.pem: holds no cert": {"base_url": "https://x", "verify": "none.pem"},
    "backend.extra.temperature: is set by": {
        "base_url": "http://x",
        "extra": {"temperature": 1},
    },
    "must be the name of an environment variable": {
        "base_url": "http://x",
        "api_key_env": "sk-123",
    },
    "unknown key backend.serve.comand": {"serve": {"comand": "x"}},
    "there is no program no-such-program": {"serve": {"command": "no-such-program {port}"}},
    "has no {port} where the server's port goes": {"serve": {"command": "sleep 5"}},
    "cannot be split into words": {"serve": {"command": "sleep '5"}},
    "must be a program and its arguments": {"serve": {"command": [["sleep"]]}},
    "backend.serve.health=health: must be a path": {"serve": {"health": "health"}},
    "backend.serve.startup_seconds=0": {"serve": {"startup_seconds": 0}},
}


@pytest.mark.parametrize("words", BAD)
def test_a_setting_that_is_wrong_is_said_before_anything_is_sent(words):
    with pytest.raises(ConfigurationError) as caught:
        OpenAIServer(**{"api_key_env": None, **BAD[words]})
    assert words in str(caught.value)
    assert "sk-123" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "place",
    [
        {"base_url": "http://x/KEY"},
        {"base_url": "http://x", "extra": {"a": ["KEY"]}},
        {"serve": {"command": ["sleep", "--key", "KEY", "{port}"]}},
    ],
)
def test_a_key_among_the_settings_is_refused_and_not_shown(monkeypatch, place):
    key = "sk-secret-1234"
    monkeypatch.setenv("MY_KEY", key)
    settings = json.loads(json.dumps(place).replace("KEY", key))
    with pytest.raises(ConfigurationError, match="holds the key") as caught:
        OpenAIServer(**settings, api_key_env="MY_KEY")
    assert key not in str(caught.value)
    monkeypatch.setenv("MY_KEY", "two\nlines-of-it")
    with pytest.raises(ConfigurationError, match="no HTTP header may have"):
        OpenAIServer(base_url="http://x", api_key_env="MY_KEY")

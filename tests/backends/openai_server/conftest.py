"""Backends against servers in this process."""

import importlib.util
from pathlib import Path

import pytest

from backends.base import Request
from backends.openai_server import OpenAIServer


def _serving():
    path = Path(__file__).parent.parent.parent / "servers" / "serving.py"
    spec = importlib.util.spec_from_file_location("serving", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


helper = _serving()


@pytest.fixture
def serving():
    """Start a server with these options; it ends with the test."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        yield lambda *options: stack.enter_context(helper.serving(*options))


@pytest.fixture
def command():
    return helper.command


@pytest.fixture
def build():
    """Build a backend that loses no time; it is closed with the test."""
    built = []

    def make(**settings):
        fast = {"backoff_seconds": 0.01, "request_seconds": 10.0, "api_key_env": None}
        backend = OpenAIServer(**(fast | settings))
        built.append(backend)
        return backend

    yield make
    for one in built:
        one.close()


@pytest.fixture
def ask():
    """Make a needle request; the answer is its number, 7 digits."""

    def make(number=0, limit=32, ids=(1, 2, 3)):
        return Request(number, prompt_of(number), tuple(ids), limit)

    return make


def prompt_of(number):
    return (
        f"One of the special magic numbers for big-house is: {1000000 + number}.\n"
        "What is the special magic number for big-house mentioned in the provided text? "
        "The special magic number for big-house mentioned in the provided text is"
    )

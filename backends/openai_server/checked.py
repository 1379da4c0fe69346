"""All settings of a server together, checked before anything is started or sent."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any

from backends.base import ConfigurationError
from backends.openai_server import settings as checks
from backends.openai_server.offer import Trial
from backends.openai_server.retry import Policy
from backends.openai_server.secret import Key


@dataclass(frozen=True, slots=True)
class Checked:
    """The settings, as the backend uses them.

    Attributes:
        serve: how a server is started.
        key: what the server lets one in with.
        url: address of the interface; PORT may stand for the port of a server to be started.
        trial: interface, form of the prompts and further fields, as the user asked for them.
        concurrency: requests in flight at a time.
        policy: when a request is sent again.
        request_seconds: the most that one try of a request may take.
        tls: how certificates are checked.
    """

    serve: checks.Serve
    key: Key
    url: str
    trial: Trial
    concurrency: int
    policy: Policy
    request_seconds: float
    tls: ssl.SSLContext | bool


def checked(
    *,
    base_url: str | None,
    model: str | None,
    api: str,
    prompt: str,
    api_key_env: str | None,
    verify: bool | str,
    concurrency: int,
    request_seconds: float,
    retries: int,
    backoff_seconds: float,
    max_wait_seconds: float,
    extra: dict[str, Any] | None,
    serve: dict[str, Any] | None,
) -> Checked:
    """Check the settings of `OpenAIServer`, whose constructor explains them.

    Raises:
        ConfigurationError: one is wrong, or holds the key.
    """
    how_to_serve = checks.serve_settings(serve)
    key = Key.from_environment(api_key_env)
    _refuse_key_in(key, {"base_url": base_url, "model": model, "extra": extra, "serve": serve})
    url = checks.base_url(base_url, how_to_serve)
    checks.one_of("api", api, checks.APIS)
    return Checked(
        serve=how_to_serve,
        key=key,
        url=url,
        concurrency=checks.whole("concurrency", concurrency, 1, checks.MAX_CONCURRENCY),
        policy=Policy(
            checks.whole("retries", retries, 0, checks.MAX_RETRIES),
            checks.seconds("backoff_seconds", backoff_seconds),
            checks.seconds("max_wait_seconds", max_wait_seconds),
        ),
        request_seconds=checks.seconds("request_seconds", request_seconds),
        trial=Trial(
            extra=checks.extra_fields(extra),
            api=api,
            prompt=checks.one_of("prompt", prompt, checks.PROMPTS),
        ),
        tls=checks.tls(verify),
    )


def _refuse_key_in(key: Key, settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if key.is_in(value):
            raise ConfigurationError(
                f"backend.{name}: holds the key, which would be written down; leave it to the "
                f"environment variable {key.variable}."
            )

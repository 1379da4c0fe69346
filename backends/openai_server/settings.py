"""The settings of a server, checked before anything is sent."""

from __future__ import annotations

import difflib
import math
import shlex
import shutil
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from backends.base import ConfigurationError

APIS = ("completions", "chat")
PROMPTS = ("auto", "ids", "text")
SERVE_KEYS = ("command", "health", "startup_seconds")
PORT = "{port}"
MODEL_PATH = "{model_path}"
OWN_FIELDS = frozenset(
    {
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "model",
        "n",
        "prompt",
        "stream",
        "temperature",
    }
)
"""Fields of a request that the backend sets itself."""
MAX_CONCURRENCY = 1024
MAX_RETRIES = 100
MAX_SECONDS = 1_000_000


HEALTH = "/health"
STARTUP_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Serve:
    """How a server is started.

    Attributes:
        command: program and arguments; None where others manage the server.
        health: path under the server's root that answers 200 once it is ready.
        startup_seconds: how long it may take until then.
    """

    command: tuple[str, ...] | None = None
    health: str = HEALTH
    startup_seconds: float = STARTUP_SECONDS

    def described(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        command = None if self.command is None else list(self.command)
        return {
            "command": command,
            "health": self.health,
            "startup_seconds": self.startup_seconds,
        }


def serve_settings(values: Mapping[str, Any] | None) -> Serve:
    """Return how a server is to be started.

    Raises:
        ConfigurationError: a key or a value is wrong.
    """
    values = values or {}
    if not isinstance(values, Mapping):
        raise ConfigurationError(
            f"backend.serve={values!r}: must hold {', '.join(SERVE_KEYS)}, for instance "
            "backend.serve.command=[my-server,--port,'{port}']."
        )
    for key in values:
        if key not in SERVE_KEYS:
            raise unknown(f"key backend.serve.{key}", str(key), SERVE_KEYS)
    health = values.get("health", HEALTH)
    if not isinstance(health, str) or not health.startswith("/"):
        raise ConfigurationError(
            f"backend.serve.health={health}: must be a path that begins with /, such as /health."
        )
    startup_seconds = values.get("startup_seconds", STARTUP_SECONDS)
    return Serve(
        command=_command(values.get("command")),
        health=health,
        startup_seconds=seconds("serve.startup_seconds", startup_seconds),
    )


def _command(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    try:
        words = shlex.split(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigurationError(
            f"backend.serve.command={value}: cannot be split into words ({error}); give a list."
        ) from error
    plain = isinstance(words, Sequence) and all(isinstance(one, str | int) for one in words)
    if not words or not plain:
        raise ConfigurationError(
            f"backend.serve.command={value}: must be a program and its arguments, as a text or a "
            "list."
        )
    command = tuple(str(one) for one in words)
    if shutil.which(command[0]) is None:
        raise ConfigurationError(
            f"backend.serve.command: there is no program {command[0]} to run; install it, or give "
            "its path."
        )
    return command


def base_url(value: str | None, serve: Serve) -> str:
    """Return the address of the interface; of a server that is to be started, PORT may be in it.

    Raises:
        ConfigurationError: it is missing, is none, or holds a password.
    """
    if value is None:
        if serve.command is None:
            raise ConfigurationError(
                "backend.base_url is missing: the address of the server's OpenAI interface, for "
                "instance backend.base_url=http://127.0.0.1:8000/v1; or let backend.serve.command "
                "start one."
            )
        if not any(PORT in one for one in serve.command):
            raise ConfigurationError(
                f"backend.serve.command: has no {PORT} where the server's port goes; add it, or "
                "say with backend.base_url where the server listens."
            )
        value = f"http://127.0.0.1:{PORT}/v1"
    if PORT in value and serve.command is None:
        raise ConfigurationError(
            f"backend.base_url={value}: {PORT} stands for the port of a server that "
            "backend.serve.command starts; write the port."
        )
    try:
        # Any port does for a check, and none is taken yet.
        url = httpx.URL(value.replace(PORT, "1"))
    except (httpx.InvalidURL, TypeError) as error:
        raise ConfigurationError(f"backend.base_url={value!r}: is no address ({error}).") from error
    if url.userinfo:
        raise ConfigurationError(
            "backend.base_url: holds a user or a password, which would be written down; give the "
            "key in the environment variable that backend.api_key_env names."
        )
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigurationError(
            f"backend.base_url={value}: must begin with http:// or https:// and name a host, for "
            "instance http://127.0.0.1:8000/v1."
        )
    if url.query or url.fragment:
        raise ConfigurationError(
            f"backend.base_url={value}: must end with the path, mostly /v1; leave out what "
            "follows ? or #."
        )
    return value.rstrip("/")


def tls(verify: bool | str) -> ssl.SSLContext | bool:
    """Return how certificates are checked.

    Raises:
        ConfigurationError: a path is given that holds no certificates.
    """
    if isinstance(verify, bool):
        return verify
    path = Path(verify)
    try:
        context = ssl.create_default_context()
        context.load_verify_locations(
            cafile=None if path.is_dir() else verify, capath=verify if path.is_dir() else None
        )
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"backend.verify={verify}: holds no certificate that can be read ({error}); must be "
            "true, false, or a PEM file or folder."
        ) from error
    return context


def extra_fields(values: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return further fields of each request.

    Raises:
        ConfigurationError: one of them is the backend's own.
    """
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigurationError(
            f"backend.extra={values}: must be fields of a request, for instance "
            "+backend.extra.ignore_eos=true."
        )
    taken = sorted(OWN_FIELDS & set(values))
    if taken:
        raise ConfigurationError(
            f"backend.extra.{taken[0]}: is set by the backend, which asks greedily and one answer "
            "at a time; leave it out."
        )
    return dict(values)


# --- plain values -------------------------------------------------------------------------------


def unknown(what: str, name: str, allowed: Sequence[str]) -> ConfigurationError:
    """Make the error for a name that is not one of `allowed`."""
    close = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return ConfigurationError(f"unknown {what}.{hint} Allowed: {', '.join(allowed)}.")


def one_of(key: str, value: str, allowed: Sequence[str]) -> str:
    """Return a name that must be one of `allowed`."""
    if value not in allowed:
        raise unknown(f"backend.{key} {value!r}", str(value), allowed)
    return value


def whole(key: str, value: int, low: int, high: int) -> int:
    """Return a number that must lie within [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigurationError(f"backend.{key}={value}: must be an integer in {low} to {high}.")
    return value


def seconds(key: str, value: float) -> float:
    """Return a time that must be above 0."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or not 0 < value <= MAX_SECONDS:
        raise ConfigurationError(
            f"backend.{key}={value}: must be a number of seconds above 0 and at most {MAX_SECONDS}."
        )
    return float(value)

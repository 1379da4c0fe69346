"""The key of a server: read from the environment, sent, and never shown."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any

from backends.base import ConfigurationError

LEAST_SECRET_CHARACTERS = 8
"""Shorter values, such as EMPTY, are placeholders: masking them would only garble answers."""
MASK = "(key)"

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")


@dataclass(frozen=True)
class Key:
    """What a server lets one in with.

    Attributes:
        variable: the environment variable it comes from; None where none is named.
        value: the key; "" where there is none.
    """

    variable: str | None
    value: str = field(default="", repr=False)

    @classmethod
    def from_environment(cls, variable: str | None) -> Key:
        """Read a key; one that is not there is no error until a server asks for it.

        Raises:
            ConfigurationError: the name is none of a variable, or the value cannot be sent.
        """
        if variable is None:
            return cls(None)
        if not _VARIABLE.fullmatch(variable):
            # Not echoed: it may be the key itself.
            raise ConfigurationError(
                "backend.api_key_env: must be the name of an environment variable in capitals, "
                "such as OPENAI_API_KEY, and not the key itself."
            )
        value = os.environ.get(variable, "").strip()
        if not value.isascii() or not value.isprintable() or " " in value:
            raise ConfigurationError(
                f"the key in {variable} has characters that no HTTP header may have; set it to "
                "the key alone."
            )
        return cls(variable, value)

    @property
    def is_secret(self) -> bool:
        """Whether there is a value that must not be shown."""
        return len(self.value) >= LEAST_SECRET_CHARACTERS

    def headers(self) -> dict[str, str]:
        """Return the header that carries the key."""
        return {"Authorization": f"Bearer {self.value}"} if self.value else {}

    def masked(self, text: str) -> str:
        """Return a text without the key: servers echo what they are sent."""
        return text.replace(self.value, MASK) if self.is_secret else text

    def masked_json(self, value: Any) -> Any:
        """Return what JSON holds without the key, in whatever way it was escaped there."""
        if isinstance(value, str):
            return self.masked(value)
        if isinstance(value, list):
            return [self.masked_json(one) for one in value]
        if isinstance(value, dict):
            return {self.masked(key): self.masked_json(one) for key, one in value.items()}
        return value

    def is_in(self, value: object) -> bool:
        """Tell whether a setting holds the key."""
        if isinstance(value, dict):
            return any(self.is_in(one) for pair in value.items() for one in pair)
        if isinstance(value, list | tuple):
            return any(self.is_in(one) for one in value)
        return self.is_secret and self.value in str(value)

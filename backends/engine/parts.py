"""The collaborators that an engine is built from, and that a seeded fault may replace."""

from __future__ import annotations

from dataclasses import dataclass

from backends.engine.cache.base import Sequence
from backends.engine.cache.offload import OffloadCache
from backends.engine.model import Decoder
from backends.engine.sparse import Selection
from backends.engine.steps import Attention


class TokenInput:
    """Where the token that a step of one token starts from is laid."""

    def lay(self, sequence: Sequence, token: int) -> int:
        """Return the token that the step reads: the one that was just chosen.

        Args:
            sequence: that it continues.
            token: its id.
        """
        del sequence
        return token


@dataclass(frozen=True, slots=True)
class Parts:
    """Classes of which an engine makes one object each.

    Attributes:
        offload_cache: keeps keys and values in CPU memory; makes block pool and prefix index.
        attention: attends and merges.
        decoder: the arithmetic between tokens and logits.
        token_input: takes the token that a step of one token starts from.
        selection: asks a sparse policy which blocks are read.
    """

    offload_cache: type[OffloadCache]
    attention: type[Attention]
    decoder: type[Decoder]
    token_input: type[TokenInput]
    selection: type[Selection]

"""Which CPU blocks hold the keys and values of which tokens, so that a later prompt can reuse them.

A block is known by its own tokens and by the block before it, hence by every token up to its
end. A hash of both finds it, chained as in vLLM's prefix cache (address below); the tokens and the
block before confirm it, so a collision costs time and never gives a wrong answer.
https://docs.vllm.ai/en/v0.8.0/design/v1/prefix_caching.html

Why reuse is cut at multiples of chunk_tokens
    Prefill runs each chunk as one set of products, and a library chooses how to sum, and so the
    last bit of a row, by the shapes of a product. Rows of keys and values have the same bits in
    two requests if they come from chunks that start at the same position and have the same
    number of rows; what is in rows after them, or in later chunks, plays no part. Hence two
    rules, and with them a hit gives the bits of a miss:

    - Only full chunks are registered: the last chunk of a prompt is shorter in most prompts, and
      each token of the answer is a chunk of its own.
    - A hit ends at a multiple of chunk_tokens, so that the chunks still to compute start where
      they would have started without it. Blocks are shared whole, so it also ends at a multiple of
      block_tokens: at a common multiple of both. One prompt token at least is left to compute,
      since its logits are wanted.

    Where the whole prompt is one chunk (chunk_tokens null) there is nothing to reuse. An index
    serves one engine: attend_tokens, policy, kernel, dtype and threads decide bits too.

How a request goes, for the caller
    Match and `share` first: `take` may evict what nobody has shared yet. If it raises OutOfMemory,
    give the shared blocks back. Write to taken blocks only. Register when the rows are in the
    blocks (not in a tail or under way) and known to be good; give every block back at the end.
    A request that is cancelled, or fails, before its prompt is computed gives back what it holds
    and registers nothing.

Plain integers: no tensor is touched here.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import lcm

from backends.engine.cache.blocks import BlockPool

HashFunction = Callable[[bytes, bytes], bytes]
"""(hash of the block before, int32 token ids as bytes) -> hash; b"" before the first block."""

NO_BLOCK = -1
"""What comes before the first block of a prompt."""


def hash_block(before: bytes, tokens: bytes) -> bytes:
    """Return the full BLAKE2b digest (RFC 7693) of the hash before and the tokens."""
    return hashlib.blake2b(before + tokens).digest()


def registrable_tokens(prompt_tokens: int, block_tokens: int, chunk_tokens: int | None) -> int:
    """Return how many tokens of a finished prompt may be registered: whole blocks, full chunks.

    Blocks of full chunks past the last common multiple are left out, since no hit ends there.
    With `chunk_tokens` None, the whole prompt at once, it is 0.
    """
    if chunk_tokens is None:
        return 0
    step = lcm(block_tokens, chunk_tokens)
    return prompt_tokens // step * step


def reusable_tokens(prompt_tokens: int, block_tokens: int, chunk_tokens: int | None) -> int:
    """Return the most tokens of a prompt that a hit may cover, and leave one or more to compute."""
    return registrable_tokens(prompt_tokens - 1, block_tokens, chunk_tokens)


@dataclass(slots=True)
class _Entry:
    """What a block holds.

    Attributes:
        before: the block of the tokens before, or NO_BLOCK.
        digest: the chained hash.
        tokens: its int32 token ids.
        after: the known blocks that continue this one.
    """

    before: int
    digest: bytes
    tokens: bytes
    after: set[int] = field(default_factory=set)


class PrefixIndex:
    """Finds the blocks of a prompt's beginning, and keeps them when nobody uses them any more.

    Args:
        pool: of the blocks; from now on it asks this index to evict when it runs short.
        block_tokens: tokens in a block.
        chunk_tokens: a match ends at a multiple of it, and of `block_tokens`.
        hash_function: to find blocks with; it need not be good for matches to be right.

    Raises:
        ValueError: the pool has an index already.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_tokens: int,
        chunk_tokens: int = 1,
        *,
        hash_function: HashFunction = hash_block,
    ) -> None:
        if pool.evict is not None:
            raise ValueError("the pool has a prefix index already")
        pool.evict = self.evict
        self._pool = pool
        self._block_tokens = block_tokens
        self._chunk_tokens = chunk_tokens
        self._hash = hash_function
        self._by_digest: dict[bytes, list[int]] = {}
        # Least recently used first. A use counts for the last block of a prefix first and for
        # the first block last, so no block is older than one that continues it.
        self._entries: OrderedDict[int, _Entry] = OrderedDict()

    @property
    def known_blocks(self) -> int:
        """How many blocks are known, used or idle."""
        return len(self._entries)

    def match(self, token_ids: Sequence[int], limit_tokens: int) -> list[int]:
        """Return the blocks of the longest known beginning; no reference is taken.

        Args:
            token_ids: the prompt.
            limit_tokens: the most tokens to match, see `reusable_tokens`.
        """
        limit = max(min(limit_tokens, len(token_ids)), 0)
        known = self._known(self._keys(token_ids, limit // self._block_tokens))
        covered = len(known) * self._block_tokens
        usable = registrable_tokens(covered, self._block_tokens, self._chunk_tokens)
        matched = known[: usable // self._block_tokens]
        self._touch(matched)
        return matched

    def register(self, token_ids: Sequence[int], blocks: Sequence[int], tokens: int) -> None:
        """Say that a request's first blocks hold the keys and values of its first tokens.

        Where a beginning is known already, its first block stays the known one.

        Args:
            token_ids: the prompt.
            blocks: of the request, in the order of positions; those registered are in use.
            tokens: how many tokens, see `registrable_tokens`; a last, partial block is left out.

        Raises:
            ValueError: there are fewer tokens or blocks than said, or a block is not in use, is
                named twice, or is known to hold something else. Nothing is registered.
        """
        count = tokens // self._block_tokens
        if not 0 <= tokens <= len(token_ids) or count > len(blocks):
            raise ValueError(
                f"{tokens} tokens are not in {len(token_ids)} token ids and {len(blocks)} blocks "
                f"of {self._block_tokens}"
            )
        own = list(blocks[:count])
        keys = list(self._keys(token_ids, count))
        chain = self._known(keys)
        self._check_own(own, chain)
        for block, (digest, content) in list(zip(own, keys, strict=True))[len(chain) :]:
            before = chain[-1] if chain else NO_BLOCK
            self._add(block, _Entry(before, digest, content))
            chain.append(block)
        self._touch(chain)

    def evict(self, count: int) -> int:
        """Free the least recently used idle blocks, the end of a prefix before its beginning.

        An idle block may be continued by one in use: when a request computed a block anew, which
        stays the first one's, and went on. Such blocks go last, and what continues them is
        forgotten, without harm to its user. So every idle block can be freed.

        Returns:
            How many were freed: `count`, or all idle ones if there are fewer.
        """
        freed = 0
        for only_ends in (True, False):
            for block in list(self._entries):
                if freed >= count:
                    return freed
                entry = self._entries.get(block)
                if entry is None or self._pool.references(block) or (only_ends and entry.after):
                    continue
                self._forget(block)
                freed += 1
        return freed

    def forget_all(self) -> None:
        """Forget every block; idle ones become free."""
        for block in self._entries:
            self._pool.drop(block)
        self._entries.clear()
        self._by_digest.clear()

    def _keys(self, token_ids: Sequence[int], count: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield hash and content of the first `count` blocks of a prompt."""
        digest = b""
        for start in range(0, count * self._block_tokens, self._block_tokens):
            tokens = array("i", token_ids[start : start + self._block_tokens]).tobytes()
            digest = self._hash(digest, tokens)
            yield digest, tokens

    def _known(self, keys: Iterable[tuple[bytes, bytes]]) -> list[int]:
        """Return the blocks of the longest known beginning."""
        chain: list[int] = []
        before = NO_BLOCK
        for digest, tokens in keys:
            for block in self._by_digest.get(digest, ()):
                entry = self._entries[block]
                if entry.before == before and entry.tokens == tokens:
                    chain.append(block)
                    before = block
                    break
            else:
                break
        return chain

    def _check_own(self, own: list[int], chain: list[int]) -> None:
        """Raise ValueError unless these blocks may be registered after a known `chain`."""
        expected = dict(zip(own, chain, strict=False))
        for block in own:
            if not self._pool.references(block):
                raise ValueError(f"block {block} is not in use")
            if block in self._entries and expected.get(block) != block:
                raise ValueError(f"block {block} holds other tokens")
        if len(set(own)) != len(own):
            raise ValueError(f"blocks {own} are not all different")

    def _add(self, block: int, entry: _Entry) -> None:
        self._pool.keep(block)
        self._entries[block] = entry
        self._by_digest.setdefault(entry.digest, []).append(block)
        if entry.before != NO_BLOCK:
            self._entries[entry.before].after.add(block)

    def _touch(self, chain: list[int]) -> None:
        """Note a use of a prefix, its end first."""
        for block in reversed(chain):
            self._entries.move_to_end(block)

    def _forget(self, block: int) -> None:
        """Forget a block, and all that continue it: without it they cannot be confirmed."""
        before = self._entries[block].before
        if before != NO_BLOCK:
            self._entries[before].after.remove(block)
        doomed = [block]
        while doomed:
            last = doomed.pop()
            entry = self._entries.pop(last)
            same_digest = self._by_digest[entry.digest]
            same_digest.remove(last)
            if not same_digest:
                del self._by_digest[entry.digest]
            self._pool.drop(last)
            doomed.extend(entry.after)

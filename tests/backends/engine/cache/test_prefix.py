import hashlib
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from backends.base import OutOfMemory
from backends.engine.cache.blocks import BlockPool
from backends.engine.cache.prefix import (
    PrefixIndex,
    hash_block,
    registrable_tokens,
    reusable_tokens,
)


def always_collides(before, tokens):
    return b"same"


def often_collides(before, tokens):
    return bytes([sum(before + tokens) % 3])


HASHES = {
    "blake2b": hash_block,
    "always collides": always_collides,
    "often collides": often_collides,
}

sizes = st.integers(1, 12)


@settings(deadline=None)
@given(prompt=st.integers(1, 200), block=sizes, chunk=sizes)
def test_tokens_are_cut_at_whole_blocks_of_full_chunks(prompt, block, chunk):
    edges = [edge for edge in range(prompt + 1) if edge % block == 0 and edge % chunk == 0]
    assert registrable_tokens(prompt, block, chunk) == max(edges)
    assert reusable_tokens(prompt, block, chunk) == max(edge for edge in edges if edge < prompt)


@settings(deadline=None)
@given(first=st.integers(1, 100), second=st.integers(1, 100), block=sizes, chunk=sizes)
def test_a_hit_computes_the_chunks_of_a_miss(first, second, block, chunk):
    """Two prompts, one the beginning of the other: list the chunks that each one computes."""

    def chunks(start, prompt):
        return [(edge, min(edge + chunk, prompt)) for edge in range(start, prompt, chunk)]

    registered = registrable_tokens(first, block, chunk)
    reused = min(registered, reusable_tokens(second, block, chunk))
    assert reused < second
    assert registered % block == reused % block == 0
    of_first, of_second = chunks(0, first), chunks(0, second)
    before = [piece for piece in of_second if piece[1] <= reused]
    assert before == [piece for piece in of_first if piece[1] <= reused]
    assert before + chunks(reused, second) == of_second


def test_a_prompt_that_is_one_chunk_reuses_nothing():
    assert registrable_tokens(4096, 256, None) == reusable_tokens(4096, 256, None) == 0


def test_the_hash_is_the_whole_digest_of_the_chain():
    before, ids = hashlib.blake2b(b"x").digest(), b"\x01\x00\x00\x00\xff\xff\xff\x7f"
    assert array("i", [1, 2**31 - 1]).tobytes() == ids
    assert hash_block(before, ids) == hashlib.blake2b(before + ids).digest()
    assert len(hash_block(b"", ids)) == 64


BLOCK, BLOCKS = 2, 9


class Request:
    def __init__(self, prompt, table, written):
        self.prompt = prompt
        self.table = table
        self.written = written


class Requests(RuleBasedStateMachine):
    """Requests that come, write, register, fork, are cancelled, against a naive model.

    The model knows what is physically in each block (`memory`: the tokens up to the block's end),
    which beginnings are known and when each was last used, and who holds what.
    """

    hash_function = staticmethod(hash_block)
    chunk = 4

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.index = PrefixIndex(self.pool, BLOCK, self.chunk, hash_function=self.hash_function)
        self.memory = [()] * BLOCKS
        self.known = {}
        self.last_use = {}
        self.clock = 0
        self.live = []

    def references(self, block):
        return sum(request.table.count(block) for request in self.live)

    def use(self, prefixes):
        self.clock += 1
        self.last_use.update(dict.fromkeys(prefixes, self.clock))

    def idle(self):
        return [prefix for prefix, block in self.known.items() if not self.references(block)]

    def continued_by(self, prefix):
        return [other for other in self.known if other[: len(prefix)] == prefix != other]

    def evict_one(self):
        """Evict as the rules say, the slow way; return whether there was one to evict."""
        idle = self.idle()
        ends = [prefix for prefix in idle if not self.continued_by(prefix)]
        if not idle:
            return False
        victim = min(ends or idle, key=lambda prefix: (self.last_use[prefix], -len(prefix)))
        for prefix in [victim, *self.continued_by(victim)]:
            del self.known[prefix]
        return True

    def expected_match(self, prompt, limit):
        edges = range(BLOCK, limit + 1, BLOCK)
        hits = []
        for edge in edges:
            if prompt[:edge] not in self.known:
                break
            hits.append(prompt[:edge])
        while len(hits) * BLOCK % self.chunk:
            hits.pop()
        return hits

    # Most prompts begin alike.
    prompts = st.builds(
        lambda alike, rest: (0,) * alike + tuple(rest),
        st.integers(1, 7),
        st.lists(st.integers(0, 1), max_size=2),
    )

    @rule(prompt=prompts, answer=st.integers(1, 3))
    def serve(self, prompt, answer):
        request = self.admit(prompt, answer)
        if request is not None:
            self.register_written(request, whole=True)
            self.leave(request)

    @rule(prompt=prompts)
    def serve_beside_a_longer_one(self, prompt):
        first, second = self.admit(prompt, 1), self.admit((*prompt, 0, 0), 1)
        for request in (first, second):
            if request is not None:
                self.register_written(request, whole=True)
        if first is not None:
            self.leave(first)

    @rule(prompt=prompts, answer=st.integers(1, 3))
    def start(self, prompt, answer):
        self.admit(prompt, answer)

    def admit(self, prompt, answer):
        limit = reusable_tokens(len(prompt), BLOCK, self.chunk)
        hits = self.expected_match(prompt, limit)
        matched = self.index.match(prompt, limit)
        assert matched == [self.known[prefix] for prefix in hits]
        assert [self.memory[block] for block in matched] == hits
        self.use(hits)
        self.pool.share(matched)
        request = Request(prompt, list(matched), len(matched) * BLOCK)
        self.live.append(request)
        used = {block for other in self.live for block in other.table}
        needed = -(-(len(prompt) + answer) // BLOCK) - len(matched)
        if needed > BLOCKS - len(used):
            with pytest.raises(OutOfMemory):
                self.pool.take(needed)
            self.leave(request)
            return None
        for _ in range(needed - (BLOCKS - len(used) - len(self.idle()))):
            assert self.evict_one()
        taken = self.pool.take(needed)
        assert len(set(taken)) == needed
        assert not set(taken) & (used | set(self.known.values()))
        for block in taken:
            self.memory[block] = ()
        request.table += taken
        return request

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def write(self, data):
        """Fill a block that the request took for itself; the partial last one stays torn."""
        request = data.draw(st.sampled_from(self.live))
        position = request.written // BLOCK
        if request.written + BLOCK <= len(request.prompt):
            request.written += BLOCK
            self.memory[request.table[position]] = request.prompt[: request.written]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), whole=st.booleans())
    def register(self, data, whole):
        self.register_written(data.draw(st.sampled_from(self.live)), whole)

    def register_written(self, request, whole):
        prompt = request.prompt
        if whole:
            for edge in range(BLOCK, len(prompt) + 1, BLOCK):
                if edge > request.written:
                    self.memory[request.table[edge // BLOCK - 1]] = prompt[:edge]
                    request.written = edge
        # A request may register more than once, after any of its chunks.
        tokens = (
            request.written if whole else registrable_tokens(request.written, BLOCK, self.chunk)
        )
        self.index.register(prompt, request.table, tokens)
        edges = range(BLOCK, tokens + 1, BLOCK)
        for edge, block in zip(edges, request.table, strict=False):
            self.known.setdefault(prompt[:edge], block)
        self.use([prompt[:edge] for edge in edges])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data):
        """A second holder of the same blocks, which writes none of them."""
        request = data.draw(st.sampled_from(self.live))
        if request.table:
            self.pool.share(request.table)
            self.live.append(Request((), list(request.table), 0))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end_or_cancel(self, data):
        self.leave(data.draw(st.sampled_from(self.live)))

    def leave(self, request):
        self.live.remove(request)
        self.pool.give_back(request.table)
        gone = [block for block in request.table if not self.references(block)]
        if gone:
            with pytest.raises(ValueError, match="not all in use"):
                self.pool.give_back(request.table)

    @rule(count=st.sampled_from([1, 1, 1, 0, 2, BLOCKS]))
    def evict(self, count):
        freed = sum(self.evict_one() for _ in range(count))
        assert self.index.evict(count) == freed

    @rule(dice=st.integers(1, 20))
    def forget_all(self, dice):
        if dice == 20:
            self.index.forget_all()
            self.known = {}

    @rule(prompt=prompts, limit=st.integers(-1, 14))
    def match(self, prompt, limit):
        hits = self.expected_match(prompt, min(limit, len(prompt)))
        matched = self.index.match(prompt, limit)
        assert [self.memory[block] for block in matched] == hits
        assert matched == [self.known[prefix] for prefix in hits]
        self.use(hits)

    @invariant()
    def every_block_is_one_of_free_used_idle(self):
        used = {block for request in self.live for block in request.table}
        idle = {self.known[prefix] for prefix in self.idle()}
        assert self.index.known_blocks == len(self.known) == len(set(self.known.values()))
        assert self.pool.used_blocks == len(used)
        assert self.pool.idle_blocks == len(idle)
        assert self.pool.free_blocks == BLOCKS - len(used) - len(idle)
        for block in range(BLOCKS):
            assert self.pool.references(block) == self.references(block)

    @invariant()
    def known_blocks_hold_what_was_registered(self):
        for prefix, block in self.known.items():
            assert self.memory[block] == prefix

    def teardown(self):
        for request in list(self.live):
            self.leave(request)
        self.index.forget_all()
        assert self.pool.free_blocks == BLOCKS


@pytest.mark.parametrize(
    ("name", "chunk_tokens"), [("blake2b", 2), ("always collides", 2), ("often collides", 4)]
)
def test_requests_against_the_model(name, chunk_tokens):
    class Machine(Requests):
        hash_function = staticmethod(HASHES[name])
        chunk = chunk_tokens

    run_state_machine_as_test(
        Machine, settings=settings(deadline=None, max_examples=60, stateful_step_count=40)
    )


def registered(tokens, blocks=6, hash_function=hash_block):
    """An index of blocks of two tokens that knows one prompt, which nobody uses any more."""
    pool = BlockPool(blocks)
    index = PrefixIndex(pool, 2, hash_function=hash_function)
    table = pool.take(len(tokens) // 2)
    index.register(tokens, table, len(tokens))
    pool.give_back(table)
    return pool, index, table


@pytest.mark.parametrize("name", HASHES)
def test_a_collision_is_no_match(name):
    _, index, table = registered([1, 2, 3, 4, 5, 6], hash_function=HASHES[name])
    assert index.match([1, 2, 3, 4, 5, 6], 6) == table
    assert index.match([1, 2, 3, 4, 6, 5], 6) == table[:2]
    assert index.match([3, 4, 1, 2, 5, 6], 6) == []
    # The tokens of the second block, but after another first one.
    assert index.match([5, 6, 3, 4], 4) == []


def test_hashes_are_chained():
    calls = []

    def numbered(before, tokens):
        calls.append((before, tokens))
        return b"hash %d" % len(calls)

    registered([1, 2, 3, 4], hash_function=numbered)
    ids = [array("i", pair).tobytes() for pair in ([1, 2], [3, 4])]
    assert calls == [(b"", ids[0]), (b"hash 1", ids[1])]


def test_a_match_ends_at_a_chunk():
    pool = BlockPool(6)
    index = PrefixIndex(pool, 2, 6)
    table = pool.take(6)
    index.register(range(12), table, 12)
    assert index.match(range(12), 12) == table
    assert index.match(range(12), 11) == table[:3]
    assert index.match([*range(10), 0, 0], 12) == table[:3]
    assert index.match([*range(5), 0], 6) == []


def test_the_first_to_register_stays():
    pool, index, table = registered([1, 2, 3, 4])
    other = pool.take(3)
    index.register([1, 2, 3, 4, 5, 6], other, 6)
    assert index.match([1, 2, 3, 4, 5, 6], 6) == [*table, other[2]]
    assert pool.give_back(other) == other[:2]


def test_the_least_recently_used_goes_first_and_ends_before_beginnings():
    pool, index, old = registered([1, 2, 3, 4])
    new = pool.take(2)
    index.register([1, 2, 9, 9], new, 4)
    pool.give_back(new)
    index.match([1, 2, 3, 4], 4)
    assert index.evict(1) == 1
    assert index.match([1, 2, 9, 9], 4) == old[:1]
    assert index.evict(5) == 2
    assert pool.take(6) == [4, 5, new[0], new[1], old[1], old[0]]


def test_taking_evicts_no_more_than_it_needs():
    pool, index, table = registered([1, 2, 3, 4, 5, 6])
    assert len(pool.take(4)) == 4
    assert index.match([1, 2, 3, 4, 5, 6], 6) == table[:2]
    assert (pool.free_blocks, pool.idle_blocks) == (0, 2)


def test_an_idle_beginning_of_a_used_block_can_be_freed():
    pool, index, _ = registered([1, 2], blocks=3)
    table = pool.take(2)
    index.register([1, 2, 3, 4], table, 4)
    pool.take(1)
    assert index.known_blocks == 0
    with pytest.raises(OutOfMemory):
        pool.take(1)
    assert pool.give_back(table) == table


def test_an_idle_beginning_of_a_used_block_goes_last():
    pool, index, old = registered([1, 2])
    used = pool.take(2)
    index.register([1, 2, 3, 4], used, 4)
    late = pool.take(1)
    index.register([7, 7], late, 2)
    pool.give_back(late)
    assert index.evict(1) == 1
    assert index.match([7, 7], 2) == []
    assert index.match([1, 2, 3, 4], 4) == [*old, used[1]]


def test_a_long_prompt_is_forgotten_from_its_beginning():
    pool, index, _ = registered([1, 2], blocks=3003)
    table = pool.take(3001)
    index.register([1, 2, *range(6000)], table, 6002)
    assert pool.take(2) != []
    assert index.known_blocks == 0


def test_what_is_not_so_is_not_registered():
    pool, index, table = registered([1, 2, 3, 4])
    own = pool.take(2)
    pool.share(table)
    wrong = [
        ([7, 7], [5], "block 5 is not in use"),
        ([7, 7, 8, 8], [own[0], own[0]], "not all different"),
        ([7, 7, 8, 8], [own[0], table[1]], f"block {table[1]} holds other tokens"),
        ([1, 2, 3, 4], [table[1], table[0]], f"block {table[1]} holds other tokens"),
        ([1, 2, 3, 4, 5, 6], table, "6 tokens are not in 6 token ids and 2 blocks of 2"),
    ]
    for tokens, blocks, message in wrong:
        with pytest.raises(ValueError, match=message):
            index.register(tokens, blocks, len(tokens))
    with pytest.raises(ValueError, match="3 tokens are not in 2 token ids"):
        index.register([7, 7], own, 3)
    with pytest.raises(OverflowError):
        index.register([7, 7, 2**31, 0], own, 4)
    assert index.match([7, 7, 8, 8], 4) == []
    assert index.known_blocks == 2
    index.register([7, 7, 8], own, 3)
    assert index.match([7, 7, 8, 8], 4) == own[:1]


def test_a_pool_has_one_index():
    pool = BlockPool(2)
    PrefixIndex(pool, 2)
    with pytest.raises(ValueError, match="has a prefix index already"):
        PrefixIndex(pool, 2)

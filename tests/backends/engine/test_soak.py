"""Requests by the hundred through one engine: what fresh ones answer, and memory that stays flat.

The long one, with real prompts of up to 32768 tokens, is scripts/check_engine.py's.
"""

import gc
import random

from backends.engine import offload
from scripts.check.memory import growths, sample_memory
from scripts.check.soak import draw_lengths

REQUESTS, FRESH = 200, 60
CONTEXT = 200
MOST_NEW_TOKENS = 16
SETTINGS = {
    "max_model_len": CONTEXT,
    "chunk_tokens": 24,
    "attend_tokens": 8,
    "num_gpu_blocks": 3,
    "kvcache_block_size": 10,
}
RSS_BOUND_BYTES = 2 << 20


def test_hundreds_of_requests_equal_fresh_ones_and_memory_is_flat(tiny, prompt, ask):
    lengths = draw_lengths(REQUESTS, 1, CONTEXT - MOST_NEW_TOKENS, seed=11)
    requests = [(prompt(tokens, seed), new) for seed, (tokens, new) in enumerate(lengths)]
    engine = offload(model_path=str(tiny), **SETTINGS)
    answers, memory = [], []
    gc.collect()
    for number, (ids, new_tokens) in enumerate(requests, start=1):
        answers.append(ask(engine, ids, new_tokens, request_id=number))
        if number % 10 == 0:
            memory.append(sample_memory("soak", 1, number, "cpu"))
    engine.close()

    late = range(REQUESTS - FRESH // 3, REQUESTS)
    earlier = random.Random(5).sample(range(late.start), FRESH - len(late))
    for number in (*late, *earlier):
        fresh = ask(offload(model_path=str(tiny), **SETTINGS), *requests[number])
        assert fresh.token_ids == answers[number].token_ids, number
        assert fresh.logits_digest == answers[number].logits_digest, number
        assert fresh.top2_margin == answers[number].top2_margin, number

    (host,) = growths(memory)
    assert len(memory) == REQUESTS // 10
    assert host.largest - host.first <= RSS_BOUND_BYTES, host

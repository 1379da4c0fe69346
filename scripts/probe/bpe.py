"""The probe's tokenizer: byte-level BPE whose digits and hexadecimal letters never merge.

Every digit is a token of its own (the pre-tokenizer isolates digits), and no merge yields a token
of two or more of the letters a to f alone. So a number is always its digits, and a UUID is always
its 36 characters, at fixed offsets, whatever stands before it.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SPECIAL_TOKENS = (END_OF_TEXT, PAD, USER, ASSISTANT)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>\\n' + message['content'] + '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"
)

_SPACE = "Ġ"  # how the byte-level alphabet writes a space
_HEX_RUN = re.compile(f"{_SPACE}?[a-f]{{2,}}")

Pair = tuple[str, str]


def pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """Return the split before BPE: single digits, then GPT-2's byte-level split (as SmolLM has)."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def count_pieces(weighted_texts: Iterable[tuple[str, int]]) -> Counter[str]:
    """Count the pre-tokenizer's pieces over texts, each text counted `weight` times."""
    split = pre_tokenizer()
    counts: Counter[str] = Counter()
    for text, weight in weighted_texts:
        for piece, _ in split.pre_tokenize_str(text):
            counts[piece] += weight
    return counts


def learn_merges(piece_counts: Mapping[str, int], num_tokens: int) -> list[Pair]:
    """Learn BPE merges, most frequent pair first, leaving out every run of hexadecimal letters.

    Args:
        piece_counts: how often each piece occurs, in the byte-level alphabet.
        num_tokens: how many new tokens to learn; fewer come when the pieces run out of pairs.

    Returns:
        Merges in order. Ties go to the pair that sorts first, so that the result is one.
    """
    words = [list(piece) for piece in piece_counts]
    weights = list(piece_counts.values())
    pair_counts: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[int]] = defaultdict(set)
    for index, word in enumerate(words):
        for pair in pairwise(word):
            pair_counts[pair] += weights[index]
            where[pair].add(index)
    heap = [(-count, pair) for pair, count in pair_counts.items()]
    heapq.heapify(heap)
    merges: list[Pair] = []
    learnt: set[str] = set()
    while heap and len(learnt) < num_tokens:
        negative_count, best = heapq.heappop(heap)
        if pair_counts[best] != -negative_count or negative_count == 0:
            continue  # a newer entry stands in the heap
        token = best[0] + best[1]
        if _HEX_RUN.fullmatch(token):
            continue
        changed: set[Pair] = set()
        for index in list(where[best]):
            before = words[index]
            after = _merge(before, best)
            for pair in pairwise(before):
                pair_counts[pair] -= weights[index]
                where[pair].discard(index)
                changed.add(pair)
            for pair in pairwise(after):
                pair_counts[pair] += weights[index]
                where[pair].add(index)
                changed.add(pair)
            words[index] = after
        for pair in changed:
            if pair_counts[pair] > 0:
                heapq.heappush(heap, (-pair_counts[pair], pair))
        learnt.add(token)  # two merges can spell the same token
        merges.append(best)
    return merges


def _merge(word: list[str], pair: Pair) -> list[str]:
    merged: list[str] = []
    position = 0
    while position < len(word):
        if tuple(word[position : position + 2]) == pair:
            merged.append(pair[0] + pair[1])
            position += 2
        else:
            merged.append(word[position])
            position += 1
    return merged


def build_tokenizer(piece_counts: Mapping[str, int], vocab_size: int) -> Tokenizer:
    """Train the tokenizer: special tokens first, then the 256 bytes, then the merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = learn_merges(piece_counts, vocab_size - len(SPECIAL_TOKENS) - len(alphabet))
    tokens = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def tokenizer_config(max_length_tokens: int) -> dict[str, object]:
    """Return tokenizer_config.json as transformers reads it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "model_max_length": max_length_tokens,
        "pad_token": PAD,
    }

"""Which tokenizers may be counted in pieces, and that the pieces add up for those."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram
from tokenizers.trainers import BpeTrainer

from ruler_bench.splitting import backend_splits_at_spaces, is_cut, pattern_splits_at_spaces

GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4_POSSESSIVE = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
CORPUS = ["One of the special magic numbers for odd-cat is: 1234567.\nThe grass isn't green. "] * 3


def split(pattern: str, behavior: str = "isolated") -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior=behavior)


def byte_level(*, regex: bool = False, prefix: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)


def trained(
    pre_tokenizer: pre_tokenizers.PreTokenizer | None,
    normalizer: normalizers.Normalizer | None = None,
    added: tuple[AddedToken, ...] = (),
) -> Tokenizer:
    """A byte-pair tokenizer whose merges cross spaces wherever its splitting lets them."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    backend.add_tokens(list(added))
    return backend


SEQUENCE = pre_tokenizers.Sequence
SPLITTING = {
    "gpt2": trained(byte_level(regex=True)),
    "gpt2 with a space before": trained(byte_level(regex=True, prefix=True)),
    "digits": trained(SEQUENCE([pre_tokenizers.Digits(True), byte_level(regex=True)])),
    "gpt4": trained(SEQUENCE([split(GPT4), byte_level()])),
    "gpt4, gaps removed": trained(
        SEQUENCE([pre_tokenizers.Split(Regex(GPT4), "removed", invert=True), byte_level()])
    ),
    "o200k": trained(SEQUENCE([split(O200K), byte_level()])),
    "one digit first": trained(SEQUENCE([split(r"\p{N}"), byte_level(regex=True)])),
    "metaspace": trained(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "metaspace first": trained(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "nfkc, lower case": trained(
        byte_level(regex=True), normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "special tokens": trained(
        byte_level(regex=True), added=(AddedToken("<|end|>"), AddedToken("   "))
    ),
}
NOT_SPLITTING = {
    "nothing splits": trained(None),
    "bytes unsplit": trained(byte_level()),
    "unknown pattern": trained(SEQUENCE([split(r"\w+ \w+|\s+"), byte_level(regex=True)])),
    "gaps span spaces": trained(SEQUENCE([split(r"\p{N}"), byte_level()])),
    "space joins the word before": trained(
        SEQUENCE([split(r"\s+", "merged_with_previous"), byte_level(regex=True)])
    ),
    "text begins otherwise": trained(byte_level(regex=True), normalizers.Prepend("x")),
    "ends stripped": trained(byte_level(regex=True), normalizers.Strip()),
    "replaces spaces": trained(byte_level(regex=True), normalizers.Replace(" ", "_")),
    "token takes the space after": trained(
        byte_level(regex=True), added=(AddedToken("One", rstrip=True),)
    ),
    "token spans a space": trained(byte_level(regex=True), added=(AddedToken("of the"),)),
}

PIECES = [
    "One",
    " of",
    " the",
    " the",
    " ",
    "  ",
    ".",
    "?",
    " 1",
    "23",
    "a",
    " B",
    "'s",
    " '",
    "é",
    " é",
    "<|end|>",
    " <|end|>",
    "   ",
    "/",
    "-",
    "DON'T",
    "ﬁ",
]
TEXT = st.lists(st.sampled_from([*PIECES, "\n", "\r\n", "\t", " \u201c"]), max_size=14).map("".join)


@pytest.mark.parametrize("name", SPLITTING)
@given(left=TEXT, right=TEXT)
@settings(max_examples=150, deadline=None)
def test_pieces_add_up(name: str, left: str, right: str) -> None:
    backend = SPLITTING[name]

    def count(text: str) -> int:
        return len(backend.encode(text, add_special_tokens=False))

    assert backend_splits_at_spaces(backend)
    if left and right and is_cut(left, right):
        assert count(left + right) == count(left) + count(right)


@pytest.mark.parametrize("name", NOT_SPLITTING)
def test_what_is_unknown_or_crosses_spaces_is_not_split(name: str) -> None:
    assert not backend_splits_at_spaces(NOT_SPLITTING[name])


def test_a_unigram_model_on_whole_text_is_not_split() -> None:
    backend = Tokenizer(Unigram([("<unk>", 0.0), ("a", -1.0), ("a b", -1.0)], unk_id=0))
    assert not backend_splits_at_spaces(backend)


@pytest.mark.parametrize("pattern", [GPT4, GPT4_POSSESSIVE, O200K])
def test_known_patterns(pattern: str) -> None:
    assert pattern_splits_at_spaces(pattern)


@pytest.mark.parametrize("pattern", [r"\p{N}", r" ?\p{L}+", r"\s+|\S+ \S+", r"(\s+|a b)|\s+", ""])
def test_patterns_that_leave_a_space_in_doubt(pattern: str) -> None:
    assert not pattern_splits_at_spaces(pattern)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("a", " b", True),
        (".", ' "x', True),
        ("a", "b", False),
        ("a", "\nb", False),
        ("a", "  b", False),
        ("a", " ", False),
        ("a ", " b", False),
        ("a\n", " b", False),
        ("a", " \u0301b", False),
    ],
)
def test_places_for_a_cut(left: str, right: str, expected: bool) -> None:
    assert is_cut(left, right) is expected

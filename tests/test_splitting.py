"""Where which tokenizers may be cut for counting, and that the pieces add up there."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram
from tokenizers.trainers import BpeTrainer

from ruler_bench.splitting import (
    DIGITS,
    SPACES,
    WORDS,
    Cuts,
    backend_cuts,
    is_cut,
    pattern_cuts,
)

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
GPT2 = byte_level(regex=True)
CUTTING = {
    "gpt2": (WORDS, trained(GPT2)),
    "gpt4": (WORDS, trained(SEQUENCE([split(GPT4), byte_level()]))),
    "gpt4, gaps removed": (
        WORDS,
        trained(
            SEQUENCE([pre_tokenizers.Split(Regex(GPT4), "removed", invert=True), byte_level()])
        ),
    ),
    "o200k": (WORDS, trained(SEQUENCE([split(O200K), byte_level()]))),
    "qwen": (DIGITS, trained(SEQUENCE([split(GPT4.replace("{1,3}", "")), byte_level()]))),
    "digits first": (DIGITS, trained(SEQUENCE([pre_tokenizers.Digits(True), GPT2]))),
    "digits last": (DIGITS, trained(SEQUENCE([GPT2, pre_tokenizers.Digits(True)]))),
    "runs of digits": (WORDS, trained(SEQUENCE([pre_tokenizers.Digits(False), GPT2]))),
    "one digit first": (DIGITS, trained(SEQUENCE([split(r"\p{N}"), GPT2]))),
    "a space put before": (SPACES, trained(byte_level(regex=True, prefix=True))),
    "digits, a space put before": (
        SPACES,
        trained(SEQUENCE([pre_tokenizers.Digits(True), byte_level(regex=True, prefix=True)])),
    ),
    "metaspace": (SPACES, trained(pre_tokenizers.Metaspace(prepend_scheme="always"))),
    "metaspace first": (SPACES, trained(pre_tokenizers.Metaspace(prepend_scheme="first"))),
    "metaspace, digits": (
        SPACES,
        trained(SEQUENCE([pre_tokenizers.Metaspace(), pre_tokenizers.Digits(True)])),
    ),
    "nfkc, lower case": (
        DIGITS,
        trained(
            SEQUENCE([pre_tokenizers.Digits(True), GPT2]),
            normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
        ),
    ),
    "special tokens": (WORDS, trained(GPT2, added=(AddedToken("<|end|>"), AddedToken("   ")))),
    "special tokens with digits": (
        WORDS,
        trained(SEQUENCE([pre_tokenizers.Digits(True), GPT2]), added=(AddedToken("<|end_1|>"),)),
    ),
    "special tokens with words": (SPACES, trained(GPT2, added=(AddedToken("odd-"),))),
}
NOT_SPLITTING = {
    "nothing splits": trained(None),
    "bytes unsplit": trained(byte_level()),
    "unknown pattern": trained(SEQUENCE([split(r"\w+ \w+|\s+"), GPT2])),
    "gaps span spaces": trained(SEQUENCE([split(r"\p{N}"), byte_level()])),
    "space joins the word before": trained(
        SEQUENCE([split(r"\s+", "merged_with_previous"), byte_level(regex=True)])
    ),
    "text begins otherwise": trained(GPT2, normalizers.Prepend("x")),
    "ends stripped": trained(GPT2, normalizers.Strip()),
    "replaces spaces": trained(GPT2, normalizers.Replace(" ", "_")),
    "token takes the space after": trained(GPT2, added=(AddedToken("One", rstrip=True),)),
    "token spans a space": trained(GPT2, added=(AddedToken("of the"),)),
}

PIECES = ["One", " of", "odd-", "-", " ", "  ", ".", "?", "1", " 1", "23", "a", " B", "'s", " '"]
PIECES += ["é", " e\u0301", "\u0301", "½", "<|end|>", " <|end_1|>", "/", "DON'T", "ﬁ", "3f-0a"]
PIECES += ["\n", "\r\n", "\t", " \u201c", "  7"]
TEXT = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


@pytest.mark.parametrize("name", CUTTING)
@given(text=TEXT)
@settings(max_examples=250, deadline=None)
def test_pieces_add_up(name: str, text: str) -> None:
    expected, backend = CUTTING[name]

    def count(piece: str) -> int:
        return len(backend.encode(piece, add_special_tokens=False))

    cuts = backend_cuts(backend)
    assert cuts is expected
    assert sum(map(count, cuts.split(text))) == count(text)
    for place in cuts.finditer(text):
        assert is_cut(cuts, text[: place.start()], text[place.start() :])


@pytest.mark.parametrize("name", NOT_SPLITTING)
def test_what_is_unknown_or_crosses_spaces_is_not_cut(name: str) -> None:
    assert backend_cuts(NOT_SPLITTING[name]) is None


def test_a_unigram_model_on_whole_text_is_not_cut() -> None:
    backend = Tokenizer(Unigram([("<unk>", 0.0), ("a", -1.0), ("a b", -1.0)], unk_id=0))
    assert backend_cuts(backend) is None


@pytest.mark.parametrize("pattern", [GPT4, GPT4_POSSESSIVE, O200K])
def test_known_patterns(pattern: str) -> None:
    assert pattern_cuts(pattern, ["<|endoftext|>"]) is WORDS


def test_a_special_token_is_never_cut() -> None:
    assert pattern_cuts(GPT4, ["<|a1|>"]) is SPACES
    assert pattern_cuts(GPT4, ["<|a b|>"]) is None


@pytest.mark.parametrize("pattern", [r"\p{N}", r" ?\p{L}+", r"\s+|\S+ \S+", r"(\s+|a b)|\s+", ""])
def test_patterns_that_leave_a_space_in_doubt(pattern: str) -> None:
    assert pattern_cuts(pattern, []) is None


@pytest.mark.parametrize(
    ("text", "cuts", "expected"),
    [
        ("is: 12.\nThe sky", SPACES, ["is:", " 12.\nThe", " sky"]),
        ("a  b \u0301c \n d", SPACES, ["a  b \u0301c \n d"]),
        ("a wet-nose 3f-12", WORDS, ["a", " wet", "-nose", " 3", "f", "-12"]),
        ("a--b -c", WORDS, ["a", "--b", " -c"]),
        ("is: 54.\n3", DIGITS, ["is:", " 5", "4", ".\n3"]),
        ("", DIGITS, [""]),
    ],
)
def test_places_for_a_cut(text: str, cuts: Cuts, expected: list[str]) -> None:
    assert cuts.split(text) == expected

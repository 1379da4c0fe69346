"""Tokenizers against transformers and tiktoken; BOS exactly once; errors that say what to do."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from ruler_bench.errors import UsageError
from ruler_bench.splitting import DIGITS, WORDS
from ruler_bench.tokenizer import (
    FolderTokenizer,
    TiktokenTokenizer,
    TransformersTokenizer,
    batches,
    load_tokenizer,
)

ROOT = Path(__file__).parent.parent
SMOLLM2 = Path(__file__).parent / "data" / "tokenizers" / "smollm2"

TEXTS = st.lists(
    st.text(max_size=8)
    | st.sampled_from(
        ["<|im_start|>", "<|im_end|>", " 12345", "\n\n", "  ", "odd-cat", " é", "<s>"]
    ),
    max_size=10,
).map("".join)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tokenizer to change."""
    copy = tmp_path / "tokenizer"
    shutil.copytree(SMOLLM2, copy)
    return copy


@pytest.fixture(scope="session")
def bytes_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer without its merges, which loads at once: each byte is a token."""
    copy = tmp_path_factory.mktemp("bytes") / "tokenizer"
    shutil.copytree(SMOLLM2, copy)
    content = json.loads((copy / "tokenizer.json").read_text())
    kept = {one["content"] for one in content["added_tokens"]}
    model = content["model"]
    vocabulary = {one: at for one, at in model["vocab"].items() if len(one) == 1 or one in kept}
    content["model"] = {**model, "vocab": vocabulary, "merges": []}
    (copy / "tokenizer.json").write_text(json.dumps(content))
    return copy


@pytest.fixture
def small(bytes_alone: Path, tmp_path: Path) -> Path:
    """A copy to change where no word matters."""
    copy = tmp_path / "tokenizer"
    shutil.copytree(bytes_alone, copy)
    return copy


def set_config(folder: Path, **values: Any) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def change_backend(folder: Path, change: Callable[[BackendTokenizer], None]) -> None:
    backend = BackendTokenizer.from_file(str(folder / "tokenizer.json"))
    change(backend)
    backend.save(str(folder / "tokenizer.json"))


def add_bos_and_eos(backend: BackendTokenizer) -> None:
    backend.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[
            ("<|im_start|>", backend.token_to_id("<|im_start|>")),
            ("<|im_end|>", backend.token_to_id("<|im_end|>")),
        ],
    )


# --- folders ------------------------------------------------------------------------------------


def plain(folder: Path) -> None:
    pass


def truncating_and_padding(folder: Path) -> None:
    def change(backend: BackendTokenizer) -> None:
        backend.enable_truncation(max_length=3)
        backend.enable_padding(length=40)

    change_backend(folder, change)


def tokens_of_the_config_only(folder: Path) -> None:
    set_config(
        folder,
        pad_token="<|pad|>",
        additional_special_tokens=["odd-cat"],
        added_tokens_decoder={
            "60000": {
                "content": "<s>",
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "single_word": False,
                "special": True,
            }
        },
    )


def special_tokens_as_text(folder: Path) -> None:
    set_config(folder, split_special_tokens=True)


def bos_and_eos(folder: Path) -> None:
    change_backend(folder, add_bos_and_eos)


def bos_by_config(folder: Path) -> None:
    set_config(folder, add_bos_token=True)


def no_bos_by_config(folder: Path) -> None:
    change_backend(folder, add_bos_and_eos)
    set_config(folder, add_bos_token=False)


FOLDERS = [
    plain,
    truncating_and_padding,
    tokens_of_the_config_only,
    special_tokens_as_text,
    bos_and_eos,
    bos_by_config,
    no_bos_by_config,
]


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda prepare: prepare.__name__)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[FolderTokenizer, Any]:
    """Ours and transformers' view of one folder."""
    copy = tmp_path_factory.mktemp("tokenizer") / "copy"
    shutil.copytree(SMOLLM2, copy)
    request.param(copy)
    return FolderTokenizer(str(copy), copy), AutoTokenizer.from_pretrained(copy)


@given(text=TEXTS)
@settings(max_examples=60, deadline=None)
def test_folder_counts_as_the_reference_does(pair: tuple[FolderTokenizer, Any], text: str) -> None:
    ours, theirs = pair
    assert ours.count(text) == len(theirs.tokenize(text))


def test_folder_adds_bos_as_transformers_does(pair: tuple[FolderTokenizer, Any]) -> None:
    ours, theirs = pair
    bos, eos = theirs.bos_token_id, theirs.eos_token_id
    expected = theirs("Where is it?")["input_ids"]
    if expected[-1] == eos:
        expected.pop()
    assert ours.encode_prompt("Where is it?") == expected
    assert ours.adds_bos == (expected[0] == bos)


def test_bos_is_there_once_and_eos_never(folder: Path) -> None:
    bos_and_eos(folder)
    ours = load_tokenizer(str(folder))
    bos, eos = 1, 2
    for text in ("hello", "<|im_start|>hello", ours.chat_prompt("hello")):
        ids = ours.encode_prompt(text)
        assert ids[0] == bos
        assert ids[1:3].count(bos) == 0
        assert ids[-1] != eos
    assert ours.adds_bos
    assert ours.count("hello") == len(ours.encode_prompt("hello")) - 1


def test_folder_without_bos_adds_none() -> None:
    ours = load_tokenizer(str(SMOLLM2))
    assert not ours.adds_bos
    assert len(ours.encode_prompt("hello there")) == ours.count("hello there")


def test_chat_prompt_is_transformers() -> None:
    theirs = AutoTokenizer.from_pretrained(SMOLLM2)
    expected = theirs.apply_chat_template(
        [{"role": "user", "content": "What is it?"}], tokenize=False, add_generation_prompt=True
    )
    assert load_tokenizer(str(SMOLLM2)).chat_prompt("What is it?") == expected


def test_chat_template_of_the_config_and_by_name(small: Path) -> None:
    (small / "chat_template.jinja").unlink()
    set_config(small, chat_template="{{ messages[0].content }}!")
    assert load_tokenizer(str(small)).chat_prompt("hi") == "hi!"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    set_config(small, chat_template=named)
    assert load_tokenizer(str(small)).chat_prompt("hi") == "y"


def test_no_chat_template(small: Path) -> None:
    (small / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match="has no chat template; use template=base"):
        load_tokenizer(str(small)).chat_prompt("hi")


def test_decodes_without_special_tokens() -> None:
    ours = load_tokenizer(str(SMOLLM2))
    assert ours.decode(ours.encode_prompt(" It is 42.<|im_end|>")) == " It is 42."


def test_many_texts_are_counted_in_order() -> None:
    ours = load_tokenizer(str(SMOLLM2))
    texts = ["a b c", "", "12345", "the grass is green. " * 50]
    assert ours.counts(texts) == [ours.count(text) for text in texts]
    assert ours.counts([]) == []


@given(lengths=st.lists(st.integers(0, 9), max_size=20), limit=st.integers(1, 12))
def test_batches_keep_order_and_size(lengths: list[int], limit: int) -> None:
    texts = ["x" * length for length in lengths]
    cut = list(batches(texts, limit))
    assert [text for batch in cut for text in batch] == texts
    assert all(len(batch) == 1 or sum(map(len, batch)) <= limit for batch in cut)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: set_config(folder, unk_token="<unk>"),
        lambda folder: change_backend(folder, add_bos_and_eos),
        lambda folder: (folder / "chat_template.jinja").write_text("x"),
    ],
)
def test_content_decides_the_fingerprint(folder: Path, change: Callable[[Path], None]) -> None:
    before = load_tokenizer(str(folder)).fingerprint
    assert before == load_tokenizer(str(SMOLLM2)).fingerprint
    change(folder)
    assert load_tokenizer(str(folder)).fingerprint != before


def test_a_folder_needs_neither_torch_nor_transformers() -> None:
    script = (
        "import sys; from ruler_bench.tasks import DataSpec, make_task, generate;"
        "from ruler_bench.tokenizer import load_tokenizer;"
        "task = make_task(dict(name='t', kind='niah', haystack='essay', key_type='words',"
        " value_type='numbers', num_keys=1, num_values=1, num_queries=1, tokens_to_generate=128,"
        " metric='all'));"
        "generate(DataSpec(task, 1024, 1, 'chat', load_tokenizer(sys.argv[1])), 1);"
        "print([one for one in ('torch', 'transformers', 'datasets', 'pandas', 'numpy', 'nltk')"
        " if one in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(SMOLLM2)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert done.stdout.strip() == "[]"


# --- names that are wrong -----------------------------------------------------------------------


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no tokenizer; expected tokenizer\.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "../a", "~/no-such-tokenizer", "a/b/c"])
def test_missing_folder(name: str) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        load_tokenizer(name)


def test_a_file_is_no_folder(small: Path) -> None:
    with pytest.raises(UsageError, match="is a file"):
        load_tokenizer(str(small / "tokenizer.json"))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b'{"model": 1}'),
        ("tokenizer.json", b"\xff"),
        ("tokenizer_config.json", b""),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"\xff"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("special_tokens_map.json", b"{"),
    ],
    ids=lambda one: one if isinstance(one, str) else repr(one[:12]),
)
def test_a_damaged_folder_is_one_line(small: Path, file: str, content: bytes) -> None:
    (small / file).write_bytes(content)
    with pytest.raises(UsageError, match=r"copy the tokenizer anew\.$") as caught:
        load_tokenizer(str(small))
    assert str(small) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("others", [(), ("vocab.json", "merges.txt")])
def test_a_folder_in_place_of_a_file(small: Path, file: str, others: Sequence[str]) -> None:
    (small / file).unlink()
    (small / file).mkdir()
    for other in others:
        (small / other).write_text("{}")
    with pytest.raises(UsageError) as caught:
        load_tokenizer(str(small))
    assert str(caught.value).startswith(f"{small / file} ")
    assert "\n" not in str(caught.value)


WRONG_VALUES = [
    *(
        ("added_tokens_decoder", value)
        for value in (
            5,
            "x",
            [1],
            [{"content": "a"}],
            {"x": {"content": "a"}},
            {"-1": {"content": "a"}},
            {"1": "a"},
            {"1": None},
            {"1": {}},
            {"1": {"content": 5}},
            {"1": {"content": "a", "lstrip": "x"}},
        )
    ),
    *(
        (key, value)
        for key in ("extra_special_tokens", "additional_special_tokens")
        for value in (5, True, "x", [5], [None], [{"content": 5}], {"a": 5})
    ),
    *(("bos_token", value) for value in (5, True, [], {}, {"content": 5})),
]


@pytest.mark.parametrize(("key", "value"), WRONG_VALUES)
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_value_that_cannot_be_is_one_line(small: Path, file: str, key: str, value: Any) -> None:
    set_config(small, extra_special_tokens=None)
    config = json.loads((small / "tokenizer_config.json").read_text())
    config.pop(key, None)
    (small / "tokenizer_config.json").write_text(json.dumps(config))
    held = json.loads((small / file).read_text()) if (small / file).exists() else {}
    (small / file).write_text(json.dumps({**held, key: value}))
    with pytest.raises(UsageError, match=r"is wrong; write .*, or copy the") as caught:
        load_tokenizer(str(small))
    assert str(caught.value).startswith(f"{small / file}: {key}=")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [5, True, {"default": "x"}, ["x"], [5], [{"template": "x"}], [{"name": "a"}], [{"name": 5}]],
    ids=repr,
)
def test_a_chat_template_that_is_none_is_one_line(small: Path, value: Any) -> None:
    (small / "chat_template.jinja").unlink()
    set_config(small, chat_template=value)
    tokenizer = load_tokenizer(str(small))
    with pytest.raises(UsageError, match=r"tokenizer_config\.json: chat_template=") as caught:
        tokenizer.chat_prompt("hi")
    assert "\n" not in str(caught.value)


def test_a_chat_template_that_is_no_text(small: Path) -> None:
    (small / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"chat_template\.jinja cannot be read .*not UTF-8"):
        load_tokenizer(str(small)).chat_prompt("hi")


@pytest.mark.parametrize("name", ["a" * 5000, "~no-such-user-anywhere/tokenizer"])
def test_a_name_that_cannot_be_looked_up(name: str) -> None:
    with pytest.raises(UsageError, match=r"cannot be looked up .*give a folder") as caught:
        load_tokenizer(name)
    assert "\n" not in str(caught.value)


def test_unknown_hub_name_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise OSError("no-one/nothing is not a local folder\nand is not a valid identifier")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", missing)
    with pytest.raises(UsageError, match="'no-one/nothing' cannot be loaded") as caught:
        load_tokenizer("no-one/nothing")
    assert "\n" not in str(caught.value)


# --- transformers -------------------------------------------------------------------------------


def test_transformers_route_agrees_with_the_folders(folder: Path) -> None:
    bos_and_eos(folder)
    ours, theirs = FolderTokenizer("x", folder), TransformersTokenizer("x", folder)
    for text in ("The sky is blue. 12345\n\n é", "<|im_start|>user", ""):
        assert ours.count(text) == theirs.count(text)
        assert ours.counts([text, "a"]) == theirs.counts([text, "a"])
        assert ours.encode_prompt(text) == theirs.encode_prompt(text)
    ids = ours.encode_prompt("It is here.")
    assert ours.decode(ids) == theirs.decode(ids) == "It is here."
    assert ours.chat_prompt("hi") == theirs.chat_prompt("hi")
    assert ours.adds_bos
    assert theirs.adds_bos
    assert ours.cuts is theirs.cuts is DIGITS
    assert theirs.fingerprint == TransformersTokenizer("y", folder).fingerprint


def test_an_older_folder_goes_through_transformers(folder: Path, tmp_path: Path) -> None:
    backend = json.loads((folder / "tokenizer.json").read_text())["model"]
    old = tmp_path / "old"
    old.mkdir()
    (old / "vocab.json").write_text(json.dumps(backend["vocab"]))
    merges = [one if isinstance(one, str) else " ".join(one) for one in backend["merges"]]
    (old / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    (old / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = load_tokenizer(str(old))
    assert isinstance(tokenizer, TransformersTokenizer)
    assert tokenizer.count("The grass is green.") == len(
        AutoTokenizer.from_pretrained(old).tokenize("The grass is green.")
    )


# --- tiktoken -----------------------------------------------------------------------------------


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> tiktoken.Encoding:
    """An encoding that needs no download, under the name of a real one."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {b"th": 256, b"the": 257, b" the": 258}
    small = tiktoken.Encoding(
        "cl100k_base",
        pat_str=r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 300},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: small)
    return small


def test_tiktoken_counts_without_special_tokens(encoding: tiktoken.Encoding) -> None:
    ours = load_tokenizer("cl100k_base")
    assert isinstance(ours, TiktokenTokenizer)
    assert ours.count("the the 1234") == len(encoding.encode("the the 1234"))
    assert ours.encode_prompt("the") == [257]
    assert ours.decode([257, 258, 300]) == "the the"
    assert not ours.adds_bos
    assert ours.cuts is WORDS


def test_tiktoken_refuses_its_special_tokens(encoding: tiktoken.Encoding) -> None:
    with pytest.raises(UsageError, match="special token"):
        load_tokenizer("cl100k_base").count("a<|endoftext|>")


def test_tiktoken_has_no_chat_template(encoding: tiktoken.Encoding) -> None:
    with pytest.raises(UsageError, match="no chat template"):
        load_tokenizer("cl100k_base").chat_prompt("hi")


def test_tiktoken_content_decides_the_fingerprint(
    encoding: tiktoken.Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load_tokenizer("cl100k_base").fingerprint
    other = tiktoken.Encoding(
        "cl100k_base",
        pat_str=encoding._pat_str,
        mergeable_ranks={**encoding._mergeable_ranks, b"he": 259},
        special_tokens=encoding._special_tokens,
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: other)
    assert load_tokenizer("cl100k_base").fingerprint != before


def test_tiktoken_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install tiktoken"):
        load_tokenizer("o200k_base")


def test_tiktoken_without_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(name: str) -> None:
        raise ConnectionError("Max retries exceeded (Caused by Failed to resolve host)\nmore")

    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    with pytest.raises(UsageError, match=r"set TIKTOKEN_CACHE_DIR .* llama-index-core") as caught:
        load_tokenizer("o200k_base")
    assert "(ConnectionError)" in str(caught.value)
    assert "retries" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("chosen", [None, "/my/cache"])
def test_tiktoken_file_of_the_user_else_of_llama_index(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen: str | None
) -> None:
    shipped = tmp_path / "core" / "_static" / "tiktoken_cache"
    shipped.mkdir(parents=True)
    real = importlib.util.find_spec
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: found if name == "llama_index" else real(name)
    )
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    if chosen:
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", chosen)
    seen: list[str | None] = []

    def get_encoding(name: str) -> tiktoken.Encoding:
        seen.append(os.environ.get("TIKTOKEN_CACHE_DIR"))
        return tiktoken.Encoding(
            name,
            pat_str=r"\S+|\s+",
            mergeable_ranks={bytes([byte]): byte for byte in range(256)},
            special_tokens={},
        )

    monkeypatch.setattr(tiktoken, "get_encoding", get_encoding)
    load_tokenizer("cl100k_base")
    assert seen == [chosen or str(shipped)]
    assert os.environ.get("TIKTOKEN_CACHE_DIR") == chosen

"""Tokenizers: counting as RULER counts, and prompts as an engine takes them.

Three kinds stand behind one interface: a folder with tokenizer.json (read with the tokenizers
library alone), anything transformers can load (hub names, older folders), and tiktoken encodings.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ruler_bench.errors import UsageError
from ruler_bench.splitting import Cuts, backend_cuts, pattern_cuts

if TYPE_CHECKING:
    import tiktoken
    from tokenizers import Encoding
    from tokenizers import Tokenizer as BackendTokenizer

TIKTOKEN_ENCODINGS = frozenset(
    {"r50k_base", "p50k_base", "p50k_edit", "cl100k_base", "o200k_base", "o200k_harmony"}
)
"""Names taken as tiktoken encodings. "gpt2" is left to the hub, which has a model of that name."""

BATCH_CHARS = 1_000_000
"""Characters encoded at once: an encoding takes about 60 bytes a character while it lives."""

FINGERPRINTED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
OTHER_TOKENIZER_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
)
NAMED_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer(Protocol):
    """Text to tokens and back.

    Attributes:
        name: as the user gave it.
        fingerprint: hash of everything that decides the tokens; no path enters it.
        adds_bos: whether `encode_prompt` prepends BOS to ordinary text.
        cuts: the places where a text may be cut and counted in pieces (see
            `ruler_bench.splitting`); None where only the whole text can be counted.
    """

    name: str
    fingerprint: str
    adds_bos: bool
    cuts: Cuts | None

    def count(self, text: str) -> int:
        """Return the number of tokens as RULER counts them: without BOS and EOS."""
        ...

    def counts(self, texts: Sequence[str]) -> list[int]:
        """Return `count` of each text; may use every core."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids an engine takes.

        BOS is there exactly once if the tokenizer adds one, also where the text (a chat template)
        begins with it; an EOS is never appended.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens."""
        ...

    def chat_prompt(self, user: str) -> str:
        """Return `user` as one turn of the tokenizer's own chat template, up to where the answer
        begins.

        Raises:
            UsageError: the tokenizer has no chat template, or it cannot be rendered.
        """
        ...


def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer by folder, tiktoken encoding or hub name.

    Raises:
        UsageError: nothing by that name, or it cannot be loaded.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if (folder / "tokenizer.json").is_file():
            return FolderTokenizer(name, folder)
        if any((folder / file).is_file() for file in OTHER_TOKENIZER_FILES):
            return TransformersTokenizer(name, folder)
        raise UsageError(
            f"tokenizer {name!r}: the folder holds no tokenizer; expected tokenizer.json"
            f" or one of {', '.join(OTHER_TOKENIZER_FILES)}."
        )
    if name in TIKTOKEN_ENCODINGS:
        return TiktokenTokenizer(name)
    if folder.exists() or name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        what = "is a file" if folder.exists() else "does not exist"
        raise UsageError(f"tokenizer {name!r} {what}; give a folder, a hub name or an encoding.")
    return TransformersTokenizer(name, None)


def has_tokenizer(folder: Path) -> bool:
    """Tell whether a folder holds a tokenizer."""
    return any((folder / file).is_file() for file in ("tokenizer.json", *OTHER_TOKENIZER_FILES))


class FolderTokenizer:
    """A local folder with tokenizer.json; needs neither torch nor transformers.

    The special tokens of tokenizer_config.json are added as transformers does, and truncation or
    padding saved with the tokenizer is switched off, which would falsify counts.

    Raises:
        UsageError: a file of the folder cannot be read.
    """

    def __init__(self, name: str, folder: Path) -> None:
        from tokenizers import Tokenizer as BackendTokenizer  # noqa: PLC0415

        self.name = name
        self._folder = folder
        self._config = _read_config(folder)
        try:
            self._backend: BackendTokenizer = BackendTokenizer.from_file(
                str(folder / "tokenizer.json")
            )
        except Exception as error:  # the library raises plain Exception
            raise _unreadable(name, error) from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = bool(self._config.get("split_special_tokens"))
        self._add_special_tokens()
        self.fingerprint = _hash_files([folder / file for file in FINGERPRINTED_FILES])
        self._prefix = self._bos_prefix()
        self.adds_bos = bool(self._prefix)
        self.cuts = backend_cuts(self._backend)

    def count(self, text: str) -> int:
        """See `Tokenizer.count`."""
        return self.counts([text])[0]

    def counts(self, texts: Sequence[str]) -> list[int]:
        """See `Tokenizer.counts`."""
        return [
            len(encoding)
            for batch in batches(texts, BATCH_CHARS)
            for encoding in self._encode(batch)
        ]

    def encode_prompt(self, text: str) -> list[int]:
        """See `Tokenizer.encode_prompt`."""
        return _with_prefix(self._prefix, self._encode([text])[0].ids)

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def chat_prompt(self, user: str) -> str:
        """See `Tokenizer.chat_prompt`."""
        from ruler_bench.chat import render_chat  # noqa: PLC0415 (jinja2, only where needed)

        template = self._chat_template()
        if template is None:
            raise _no_chat_template(self.name)
        tokens = {
            key: text
            for key in NAMED_SPECIAL_TOKENS
            if (text := _token_text(self._config.get(key))) is not None
        }
        return render_chat(self.name, template, user, tokens)

    def _encode(self, texts: Sequence[str]) -> list[Encoding]:
        return self._backend.encode_batch_fast(list(texts), add_special_tokens=False)

    def _add_special_tokens(self) -> None:
        from tokenizers import AddedToken  # noqa: PLC0415

        known = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        declared = [
            AddedToken(**{k: v for k, v in entry.items() if k != "id"})
            for _, entry in sorted(
                (self._config.get("added_tokens_decoder") or {}).items(), key=lambda kv: int(kv[0])
            )
        ]
        extra = (
            self._config.get("extra_special_tokens")
            or self._config.get("additional_special_tokens")
            or []
        )
        named = [self._config.get(key) for key in NAMED_SPECIAL_TOKENS]
        texts = [_token_text(token) for token in [*named, *(_values(extra))]]
        declared += [AddedToken(text, special=True, normalized=False) for text in texts if text]
        for token in declared:
            if token.content not in known:
                known.add(token.content)
                self._backend.add_tokens([token])

    def _bos_prefix(self) -> list[int]:
        """Return the ids the tokenizer puts before a text: BOS, or nothing.

        tokenizer.json decides, as in transformers 5; add_bos_token in tokenizer_config.json does
        not count beside it.
        """
        return _prefix_before(
            self._backend.encode("a", add_special_tokens=True).ids,
            self._backend.encode("a", add_special_tokens=False).ids,
        )

    def _chat_template(self) -> str | None:
        file = self._folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = self._config.get("chat_template")
        if isinstance(template, list):  # several by name
            template = {one["name"]: one["template"] for one in template}.get("default")
        return template if isinstance(template, str) else None


class TransformersTokenizer:
    """Whatever transformers' AutoTokenizer loads. Code from a hub is not executed.

    Args:
        name: as the user gave it.
        folder: where it lies, or None for a hub name.

    Raises:
        UsageError: it cannot be loaded.
    """

    def __init__(self, name: str, folder: Path | None) -> None:
        from transformers import AutoTokenizer  # noqa: PLC0415 (seconds)

        self.name = name
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                name if folder is None else str(folder), local_files_only=folder is not None
            )
        except Exception as error:  # OSError, ValueError, ImportError, and worse from parsers
            raise _unreadable(name, error) from error
        self._prefix = _prefix_before(
            self._tokenizer("a")["input_ids"],
            self._tokenizer("a", add_special_tokens=False)["input_ids"],
        )
        self.adds_bos = bool(self._prefix)
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        self.cuts = None if backend is None else backend_cuts(backend)
        self.fingerprint = self._hash_content(backend)

    def count(self, text: str) -> int:
        """See `Tokenizer.count`."""
        return len(self._tokenizer.tokenize(text))

    def counts(self, texts: Sequence[str]) -> list[int]:
        """See `Tokenizer.counts`."""
        return [
            len(ids)
            for batch in batches(texts, BATCH_CHARS)
            for ids in self._tokenizer(
                list(batch),
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )["input_ids"]
        ]

    def encode_prompt(self, text: str) -> list[int]:
        """See `Tokenizer.encode_prompt`."""
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return _with_prefix(self._prefix, ids)

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def chat_prompt(self, user: str) -> str:
        """See `Tokenizer.chat_prompt`."""
        from ruler_bench.chat import render_chat  # noqa: PLC0415

        if not self._tokenizer.chat_template:
            raise _no_chat_template(self.name)
        tokens = {key: str(text) for key, text in self._tokenizer.special_tokens_map.items()}
        return render_chat(self.name, self._tokenizer.get_chat_template(), user, tokens)

    def _hash_content(self, backend: Any) -> str:
        content: dict[str, Any] = {
            "class": type(self._tokenizer).__name__,
            "chat_template": self._tokenizer.chat_template,
            "special_tokens": {k: str(v) for k, v in self._tokenizer.special_tokens_map.items()},
            "prefix": self._prefix,
        }
        if backend is None:
            content["vocabulary"] = self._tokenizer.get_vocab()
        else:
            content["backend"] = json.loads(backend.to_str()) | {"truncation": 0, "padding": 0}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class TiktokenTokenizer:
    """A tiktoken encoding, counted as RULER's OpenAI route does.

    Its file comes from TIKTOKEN_CACHE_DIR where that is set, else from an installed
    llama-index-core, which ships two of them; else tiktoken downloads it.

    Raises:
        UsageError: tiktoken is not installed, or the encoding's file cannot be had.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._encoding = _load_encoding(name)
        self.adds_bos = False
        pattern: str = self._encoding._pat_str
        self.cuts = pattern_cuts(pattern, self._encoding.special_tokens_set)
        digest = hashlib.sha256(pattern.encode())
        for token, rank in self._encoding._mergeable_ranks.items():
            digest.update(b"%d:%d:%b;" % (rank, len(token), token))
        digest.update(json.dumps(self._encoding._special_tokens, sort_keys=True).encode())
        self.fingerprint = digest.hexdigest()

    def count(self, text: str) -> int:
        """See `Tokenizer.count`."""
        return len(self.encode_prompt(text))

    def counts(self, texts: Sequence[str]) -> list[int]:
        """See `Tokenizer.counts`."""
        return [self.count(text) for text in texts]

    def encode_prompt(self, text: str) -> list[int]:
        """See `Tokenizer.encode_prompt`.

        Raises:
            UsageError: the text holds a special token of the encoding, which tiktoken refuses.
        """
        try:
            return list(self._encoding.encode(text))
        except ValueError as error:
            raise UsageError(
                f"tokenizer {self.name!r}: the prompt holds a special token of the encoding, "
                "which tiktoken refuses; use another template."
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        special = set(self._encoding._special_tokens.values())
        return str(self._encoding.decode([one for one in ids if one not in special]))

    def chat_prompt(self, user: str) -> str:
        """See `Tokenizer.chat_prompt`; an encoding has no chat template."""
        raise _no_chat_template(self.name)


def batches(texts: Sequence[str], max_chars: int) -> Iterator[Sequence[str]]:
    """Yield `texts` in order, in slices of at most `max_chars` characters or of one text."""
    start = chars = 0
    for index, text in enumerate(texts):
        if index > start and chars + len(text) > max_chars:
            yield texts[start:index]
            start, chars = index, 0
        chars += len(text)
    if start < len(texts):
        yield texts[start:]


def _with_prefix(prefix: list[int], ids: list[int]) -> list[int]:
    return ids if ids[: len(prefix)] == prefix else prefix + ids


def _prefix_before(full: list[int], plain: list[int]) -> list[int]:
    """Return what `full` has before `plain`; nothing if `plain` is not in it."""
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    return []


def _read_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, completed from special_tokens_map.json."""
    merged: dict[str, Any] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / file
        if not path.is_file():
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(f"{path} is not JSON: {_first_line(error)}") from error
        if not isinstance(content, dict):
            raise UsageError(f"{path} must hold a JSON object.")
        merged |= content
    return merged


def _values(tokens: Any) -> list[Any]:
    return list(tokens.values()) if isinstance(tokens, dict) else list(tokens)


def _token_text(token: Any) -> str | None:
    """Return the text of a token as configurations write it: a string or an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _hash_files(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.name}:{len(content)}:".encode())
            digest.update(content)
    return digest.hexdigest()


def _load_encoding(name: str) -> tiktoken.Encoding:
    if importlib.util.find_spec("tiktoken") is None:
        raise UsageError(f"tokenizer {name!r} needs tiktoken: pip install tiktoken")
    import tiktoken  # noqa: PLC0415

    shipped = _shipped_encodings()
    before = os.environ.get("TIKTOKEN_CACHE_DIR")
    if before is None and shipped is not None:
        os.environ["TIKTOKEN_CACHE_DIR"] = str(shipped)
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:  # requests' errors, or a file with another hash
        raise UsageError(
            f"tokenizer {name!r}: its file cannot be had ({_first_line(error)}); set"
            " TIKTOKEN_CACHE_DIR to a folder that holds it, or pip install llama-index-core."
        ) from error
    finally:
        if before is None:
            os.environ.pop("TIKTOKEN_CACHE_DIR", None)


def _shipped_encodings() -> Path | None:
    spec = importlib.util.find_spec("llama_index")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        cache = Path(folder) / "core" / "_static" / "tiktoken_cache"
        if cache.is_dir():
            return cache
    return None


def _no_chat_template(name: str) -> UsageError:
    return UsageError(f"template=chat: tokenizer {name!r} has no chat template; use template=base.")


def _unreadable(name: str, error: Exception) -> UsageError:
    return UsageError(f"tokenizer {name!r} cannot be loaded: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

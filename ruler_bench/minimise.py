"""`python -m ruler_bench.minimise RUN`: the shortest sequence of requests that changes an answer.

    python -m ruler_bench.minimise results/RUN
    python -m ruler_bench.minimise results/RUN --ordinal 4 --arm shuffled
    python -m ruler_bench.minimise --replay results/RUN/reproducer
    python -m ruler_bench.minimise --replay DIR backend=gpu_only backend.chunk_tokens=512

RUN is a run folder in which one engine answered a sample otherwise than a fresh one. What that
engine served before the sample is asked again, less and less of it, each time of a new engine in a
new process, to the shortest sequence after which the answer still changes; then the prompts and the
answers of what is left are shortened. RUN/reproducer gets the requests, the expected and the wrong
answer, and a README.md with the command that replays them.

With overrides (backend=NAME, backend.KEY=VALUE, device=, threads=, model.path=) the requests go to
another engine. Replaying holds the answer after the others against that of a fresh engine with the
same settings.

Exit status: 3 the answer changes (of RUN: and the reproducer is written), 0 a replay shows no
change, 5 the change of RUN does not show again, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ruler_bench.command_line import Parser, status_of
from ruler_bench.errors import UsageError
from ruler_bench.leak.join import PERSISTENT
from ruler_bench.leak.rebuild import IN_PROCESS, PROCESS
from ruler_bench.manifest import REPRODUCER
from ruler_bench.minimise_replay import ReplayOptions, replay
from ruler_bench.minimise_search import SearchOptions, minimise

MAX_REPEATS = 1000

USAGE = (
    "RUN [--ordinal N] [--arm NAME] [--max-requests N] [--repeat N] [--out DIR], or "
    "python -m ruler_bench.minimise --replay DIR [backend=NAME] [backend.KEY=VALUE ...]"
)


def main() -> int:
    """Run the command line in sys.argv and return the exit status."""
    return status_of(lambda: run(parse(sys.argv[1:])))


def run(options: SearchOptions | ReplayOptions) -> int:
    """Replay a reproducer or look for one, and return the exit status.

    Raises:
        ConfigurationError: the run or the reproducer cannot be built anew.
    """
    return replay(options) if isinstance(options, ReplayOptions) else minimise(options)


def parse(arguments: Sequence[str]) -> SearchOptions | ReplayOptions:
    """Check the command line.

    Raises:
        UsageError: it is wrong.
    """
    parser = Parser("minimise", __doc__, USAGE)
    parser.add_argument("words", nargs="*", metavar="RUN", help="a run folder; then key=value")
    parser.add_argument("--replay", type=Path, metavar="DIR", help="replay a reproducer")
    parser.add_argument("--ordinal", metavar="N", help="the answer to look at; default: the first")
    parser.add_argument(
        "--arm",
        metavar="NAME",
        help=f"whose answer; default: {PERSISTENT}, or the first other arm of one engine that "
        "differs from fresh ones where it does not",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"default: RUN/{REPRODUCER}")
    parser.add_argument(
        "--max-requests",
        metavar="N",
        help="look for less only as long as all probes together have asked no more than N requests "
        "(the answer alone and all of the run are asked in any case); what is found by then is "
        "written, and not called the smallest; default: no limit",
    )
    parser.add_argument(
        "--repeat", metavar="N", help="how often to ask what matters; default: 3, in a replay 1"
    )
    parser.add_argument(
        "--fresh",
        choices=(PROCESS, IN_PROCESS),
        default=PROCESS,
        help="each engine in a process of its own, or all in one, which is faster and sees less",
    )
    read = parser.parse_intermixed_args(arguments)
    overrides = tuple(one for one in read.words if "=" in one)
    paths = [one for one in read.words if "=" not in one]
    given = [key for key in ("ordinal", "arm", "out", "max_requests") if getattr(read, key)]
    if read.replay is not None and (paths or given):
        what = paths[0] if paths else f"--{given[0].replace('_', '-')}"
        parser.error(f"{what} does not go with --replay")
    if read.replay is None and len(paths) != 1:
        parser.error("name one run folder" if not paths else f"one run folder, not {len(paths)}")
    repeats = _whole("--repeat", read.repeat, 1, MAX_REPEATS)
    if read.replay is not None:
        return ReplayOptions(read.replay, overrides, repeats, read.fresh)
    return SearchOptions(
        run=Path(paths[0]),
        overrides=overrides,
        arm=read.arm,
        ordinal=_whole("--ordinal", read.ordinal, 0, None),
        out=read.out,
        max_requests=_whole("--max-requests", read.max_requests, 1, None),
        repeats=repeats,
        fresh=read.fresh,
    )


def _whole(option: str, text: str | None, low: int, high: int | None) -> int | None:
    if text is None:
        return None
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    if number < low or (high is not None and number > high):
        allowed = f"of at least {low}" if high is None else f"in {low} to {high}"
        raise UsageError(f"{option} {text}: must be a whole number {allowed}.")
    return number


if __name__ == "__main__":
    sys.exit(main())

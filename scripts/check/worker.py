"""A process of its own for one job: the job comes in on stdin, messages go out on stdout."""

from __future__ import annotations

import os
import pickle
import sys

from scripts.check.serving import Message, serve


def main() -> int:
    """Serve the job on stdin."""
    job = pickle.load(sys.stdin.buffer)
    # What an engine prints must not come between the messages.
    messages = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def emit(message: Message) -> None:
        pickle.dump(message, messages)
        messages.flush()

    serve(job, emit)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Calls pip once for each line of standard input, from one start: a JSON list of words.

Prints a line for each: a JSON list of exit status and what pip printed. Loading pip takes longer
than what it has to do here, so each call is a copy of this process.
"""

import importlib
import json
import os
import sys
import tempfile

from pip._internal.cli.main import main

importlib.import_module("pip._internal.commands.install")


def call(words: list[str]) -> tuple[int, str]:
    with tempfile.TemporaryFile("w+", encoding="utf-8") as printed:
        child = os.fork()
        if child == 0:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            status = main(words)
            sys.stdout.flush()
            os._exit(status)
        _, ended = os.waitpid(child, 0)
        printed.seek(0)
        return os.waitstatus_to_exitcode(ended), printed.read()


for line in sys.stdin:
    print(json.dumps(call(json.loads(line))), flush=True)

"""In place of vLLM's, transformers' and llama.cpp's servers: the tests' own, by their command line.

Of the words only `--port` counts. Without it (a version is asked for, or which modules there are)
it says that it is a stand-in.
"""

import runpy
import sys
from pathlib import Path

SERVER = Path(__file__).parent.parent / "servers" / "faulty.py"


def main(words: list[str]) -> None:
    if "--port" not in words:
        print("version 0, a stand-in")
        return
    sys.argv = [str(SERVER), "--port", words[words.index("--port") + 1]]
    runpy.run_path(str(SERVER), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])

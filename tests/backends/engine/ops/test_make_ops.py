import subprocess
import sys

import torch

from backends.engine.ops import make_ops


def test_a_cpu_gets_torch():
    assert make_ops(torch.device("cpu"), torch.float32).name == "torch"


def test_triton_is_imported_only_when_asked_for():
    code = "import sys, backends.engine.ops; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

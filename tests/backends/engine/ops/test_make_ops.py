import importlib.util
import subprocess
import sys

import pytest
import torch

from backends.engine.ops import make_ops


def test_a_cpu_gets_torch():
    assert make_ops(torch.device("cpu"), torch.float32).name == "torch"


def test_a_gpu_gets_triton_where_it_can_be_used(monkeypatch):
    pytest.importorskip("triton")
    gpu = torch.device("cuda")
    assert make_ops(gpu, torch.bfloat16).name == "triton"
    assert make_ops(gpu, torch.float64).name == "torch"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert make_ops(gpu, torch.bfloat16).name == "torch"


def test_triton_is_imported_only_when_asked_for():
    code = "import sys, backends.engine.ops; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

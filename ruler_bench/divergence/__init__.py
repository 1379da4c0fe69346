"""Where two recorded runs of our engine part; the command is `python -m ruler_bench.divergence`."""

from ruler_bench.divergence.comparison import Comparison, compare
from ruler_bench.divergence.recording import NAMES, Recording, read_recording

__all__ = ["NAMES", "Comparison", "Recording", "compare", "read_recording"]

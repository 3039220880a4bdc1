import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TRITON_INTERPRET"] = (
    "1"  # kernels.py runs on the CPU; tests/machine_code.py compiles it
)
torch.set_num_threads(1)  # several small processes on few cores: more threads are slower


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)

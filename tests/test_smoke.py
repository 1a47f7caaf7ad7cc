from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

KERNELS_ALONE = """
import sys
from importlib.machinery import PathFinder

ABSENT = {"transformers", "vllm", "pydantic", "rich", "yaml", "httpx", "tenacity", "safetensors", "mosaic"}
find_spec = PathFinder.find_spec
PathFinder.find_spec = staticmethod(
    lambda name, *rest: None if name.partition(".")[0] in ABSENT else find_spec(name, *rest)
)
sys.meta_path[:] = [finder for finder in sys.meta_path if isinstance(finder, type)]  # without editable installs' own

import torch

before = set(sys.modules)
import mosaic_kernels as mk

print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
for name in mk.__all__:
    assert getattr(mk, name) is not None
layout = mk.Layout([0, 2, 3], segment_trajectory=[0, 0])
reward = mk.terminal_reward(torch.tensor([1.0]), layout, None, "chain")
advantage = mk.segment_gae(reward, torch.zeros(3), layout, lam=0.5, correction="chain").advantage
assert advantage.tolist() == [0.25, 0.5, 1.0]
hidden = torch.randn(3, 4, requires_grad=True)
logprob = mk.linear_logprob(hidden, torch.randn(5, 4), torch.tensor([0, 1, 2])).logprob
mk.policy_loss(logprob, logprob.detach(), torch.ones(3), layout).loss.backward()
assert hidden.grad.abs().sum() > 0
assert mk.branch_attention(*torch.randn(3, 3, 2, 4).unbind(), layout).shape == (3, 2, 4)
"""


def test_the_kernels_need_torch_alone():
    run = subprocess.run([sys.executable, "-c", KERNELS_ALONE], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["mosaic_kernels"], "importing the kernels imports these packages too"

"""Every Triton kernel, in every specialisation that its op uses, compiled for three generations of GPUs."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")

from mosaic_kernels._backend import TRITON_INTERPRETED
from tests import triton_static, triton_static_linear_logprob

pytestmark = pytest.mark.skipif(TRITON_INTERPRETED, reason="TRITON_INTERPRET=1 leaves nothing to compile")
OPS = {"linear_logprob": triton_static_linear_logprob}
CALLS = [(op, call) for op, module in OPS.items() for call in module.CALLS]


@pytest.mark.parametrize("chip", triton_static.CHIPS)
@pytest.mark.parametrize(("op", "call"), CALLS)
def test_fits_the_chip(op, call, chip):
    module = OPS[op]
    launches = triton_static.recorded(module.CALLS[call], chip)
    assert launches
    for launch in launches:
        seen = triton_static.compiled(launch, chip)
        print(chip, call, launch.name, seen)
        assert seen["shared"] <= triton_static.SHARED_OF_BLOCK[chip] and seen["blocks"] >= 1
        if "fp32" in call and launch.name in module.PRODUCTS:
            # IEEE float32 has no matrix instruction, and what it spills is for the table to report
            assert not any(seen["instructions"].get(name) for name in triton_static.MATRIX_INSTRUCTION.values())
            continue
        assert seen["spilled"] == 0 and seen["local_accesses"] == 0, (launch.name, seen)
        if launch.name in module.PRODUCTS:
            assert seen["instructions"].get(triton_static.MATRIX_INSTRUCTION[chip]), (launch.name, seen)


def test_every_launch_option_is_part_of_a_launch():
    """A launch recorded for another chip or dtype is another specialisation: the recorder tells them apart."""
    module = triton_static_linear_logprob
    first, again, half = (
        set(triton_static.recorded(module.CALLS[call], chip))
        for call, chip in (("bf16", 90), ("bf16", 90), ("fp16", 90))
    )
    assert first == again and {launch.name for launch in first} >= set(module.PRODUCTS) - {"expected_kernel"}
    assert not {x for x in first if x.name in module.PRODUCTS} & half
    assert triton_static.recorded(module.CALLS["bf16"], 80) != triton_static.recorded(module.CALLS["bf16"], 90)


def test_floors_worked_by_hand():
    module = triton_static_linear_logprob
    forward, both, frozen = module.FLOORS[:3]
    # 2 x 8192 x 4096 x 131072 = 8.796e12 FLOPs a product, at 989 TFLOP/s 8.894 ms
    assert forward.milliseconds(module.CHIPS["H100"]) == pytest.approx(8.894, rel=1e-3)
    assert both.milliseconds(module.CHIPS["H100"]) == pytest.approx(4 * 8.894, rel=1e-3)
    assert frozen.milliseconds(module.CHIPS["A100"]) == pytest.approx(2 * 28.19, rel=1e-3)
    # one row has nothing to multiply: 1.074 GB of weight at 3.35 TB/s
    one = module.Floor("", 1, 4096, 131072, 1, 2 * 131072 * 4096)
    assert one.milliseconds(module.CHIPS["H100"]) == pytest.approx(0.3205, rel=1e-3)


def test_no_specialisation_for_new_numbers():  # pitfall 7
    """Lengths, temperatures, splits and ids change nothing that a kernel is compiled for."""
    from functools import partial

    import torch

    from mosaic_kernels.linear_logprob import triton

    def call(rows: int, temperature: float, start: int) -> None:
        hidden, weight = torch.zeros(rows, 512, dtype=torch.bfloat16), torch.zeros(8192, 512, dtype=torch.bfloat16)
        target, active = torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.bool)
        arguments = (hidden, weight, None, target, active, torch.full((rows,), temperature), None, None, None, None)
        triton.forward(*arguments, start, 3 * 8192, False)
        ones = torch.ones(rows)
        triton.backward(*arguments, start, 3 * 8192, ones, ones, None, ones, None, False, torch.bfloat16, True, False)

    every = [
        triton_static.recorded(partial(call, *numbers), 90)
        for numbers in ((1, 0.5, 0), (2, 1.0, 8192), (300, 0.7, 1), (9000, 2.0, 16384))
    ]
    assert all(set(one) == set(every[0]) for one in every)

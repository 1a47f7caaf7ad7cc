"""Triton kernel that lists the rows to work on; the host never learns how many there are, and so never waits."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T", "start", "size", "total"])
def compact_kernel(
    active_ptr,
    target_ptr,
    temperature_ptr,
    kept_state_ptr,
    dlogprob_ptr,
    dentropy_ptr,
    start,
    size,
    total,
    T,
    rows_ptr,
    local_target_ptr,
    inverse_temperature_ptr,
    count_ptr,
    BLOCK: tl.constexpr,
):
    """The active rows in their order, each one's target among this rank's ids (or -1) and 1 / temperature.

    Without dlogprob, for the forward pass: 1 / temperature is NaN, and so will be the results, in a row whose target,
    temperature or kept id means nothing. With it: such rows, whose results depend on nothing, and those whose gradient
    from above is 0, are left out.
    """
    count = tl.zeros((), tl.int32)
    for first in range(0, T, BLOCK):
        row = first + tl.arange(0, BLOCK)
        live = tl.load(active_ptr + row, mask=row < T, other=0) != 0
        target = tl.load(target_ptr + row, mask=live, other=0)
        valid = (target >= 0) & (target < total)
        inverse = tl.full((BLOCK,), 1.0, tl.float32)
        if temperature_ptr is not None:
            temperature = tl.load(temperature_ptr + row, mask=live, other=1.0)
            valid &= (temperature > 0.0) & (temperature < float("inf"))
            inverse = 1.0 / temperature
        if kept_state_ptr is not None:
            valid &= tl.load(kept_state_ptr + row, mask=live, other=0) != 2
        if dlogprob_ptr is None:
            inverse = tl.where(valid, inverse, float("nan"))
        else:
            above = tl.load(dlogprob_ptr + row, mask=live, other=0.0) != 0.0
            if dentropy_ptr is not None:
                above |= tl.load(dentropy_ptr + row, mask=live, other=0.0) != 0.0
            live &= valid & above
        local = target - start
        local = tl.where((local >= 0) & (local < size), local, -1).to(tl.int32)
        chosen = live.to(tl.int32)
        n = count + tl.cumsum(chosen, axis=0) - chosen
        tl.store(rows_ptr + n, row, mask=live)
        tl.store(local_target_ptr + n, local, mask=live)
        tl.store(inverse_temperature_ptr + n, inverse, mask=live)
        count += tl.sum(chosen, axis=0)
    tl.store(count_ptr, count)

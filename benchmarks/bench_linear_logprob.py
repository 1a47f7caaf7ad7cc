"""Log-probs straight from hidden states, beside one product `hidden @ weight.T` of the same dtype in PyTorch (GEMM)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.case import Case, Check, Outputs, Problem, compiled_sides, largest_error, our_sides, ours
from mosaic_kernels import linear_logprob

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMOLLM2 = {"hidden": 576, "vocabulary": 49152}
QWEN3_4B = {"hidden": 2560, "vocabulary": 151936}
# The highest logit of a trained model's row lies at 22 to 32.
TOP_LOGIT = 27.0
EVERY_ROW = "mosaic cpu, every row"
OWN_ERROR = "error of PyTorch's float32 product"
PEERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "eager": peers.eager_logprob,
    "torch.compile": peers.compiled_logprob,
    "F.linear_cross_entropy": peers.native_reference,
    "F.linear_cross_entropy chunked": peers.native_chunked,
    "trl chunked": peers.trl_chunked,
    "trl selective_log_softmax": peers.trl_selective,
    "cut-cross-entropy torch_compile": peers.cut_cross_entropy_compiled,
    "cut-cross-entropy triton": peers.cut_cross_entropy_triton,
    "liger chunked": peers.liger_chunked,
    "liger triton": peers.liger_triton,
}
# Left out of quick runs: compiling, and a backward of 80 to 150 GEMMs, each take longer than all other sides.
SLOW = ("torch.compile", "cut-cross-entropy torch_compile", "F.linear_cross_entropy chunked")


def random_weight(vocabulary: int, hidden: int, top_logit: float) -> Tensor:
    """[V, H] normal entries such that rows of unit-normal hidden states reach about `top_logit`.

    Drawn for 8,192 rows; every further block has the same rows with their columns shuffled, which is as random to a
    product and twenty times as fast to make.
    """
    highest = math.sqrt(2 * math.log(vocabulary)) - 0.3  # about the largest of V unit normals
    base = torch.randn(min(vocabulary, 8192), hidden) * (top_logit / highest / math.sqrt(hidden))
    weight = torch.empty(vocabulary, hidden)
    for start in range(0, vocabulary, base.shape[0]):
        block = weight[start : start + base.shape[0]]
        torch.index_select(base[: block.shape[0]], 1, torch.randperm(hidden), out=block)
    return weight


def some_rows(mask: Tensor, vocabulary: int, hidden: int) -> Tensor:
    """Indices of scored rows for the comparison with float64: as many as about a second of arithmetic allows."""
    rows = mask.nonzero().flatten()
    wanted = max(32, min(512, int(3e10 / (2 * vocabulary * hidden))))
    return rows[torch.linspace(0, rows.numel() - 1, min(wanted, rows.numel())).long()]


def float64_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[rows, V] in float64, without a float64 copy of the whole weight."""
    hidden = hidden.double()
    return torch.cat([hidden @ part.double().T for part in weight.split(16384)], 1)


def forward(tokens: int, hidden: int, vocabulary: int, dtype: str, masked: float = 0.0, top_logit: float = TOP_LOGIT):
    """logprob [T]; with `masked`, that share of the rows is not scored."""
    state = torch.randn(tokens, hidden).to(DTYPES[dtype])
    weight = random_weight(vocabulary, hidden, top_logit).to(DTYPES[dtype])
    target = torch.randint(vocabulary, (tokens,))
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[torch.randperm(tokens)[: round(masked * tokens)]] = False
    facts: dict[str, float] = {}

    @functools.cache
    def truth_of_rows() -> tuple[Tensor, Tensor]:
        truth, rows, own = float64_logprob(state, weight, target, mask)
        facts.update({OWN_ERROR: own, "rows compared with float64": float(rows.numel())})
        return truth, rows

    def check(side: str, outputs: Outputs) -> list[Check]:
        if side == "GEMM":
            return []
        truth, rows = truth_of_rows()
        return [Check("logprob", largest_error(outputs[0][rows], truth), tolerance(side, dtype))]

    def mosaic(**backend: str) -> Outputs:
        return (linear_logprob(state, weight, target, mask=mask if masked else None, **backend).logprob,)

    def every_row() -> Outputs:
        return (linear_logprob(state, weight, target, backend="cpu").logprob,)

    sides = {
        "GEMM": lambda: (state @ weight.T,),
        **ours(linear_logprob, without_gradients(mosaic)),
        EVERY_ROW: without_gradients(every_row),
    }
    # peers score every row: what they save on masked rows, they save by their own ignored targets
    their_target = target.masked_fill(~mask, -100) if masked else target
    for name, call in PEERS.items():
        seen = target if name in ("eager", "torch.compile", "trl selective_log_softmax") else their_target
        sides[name] = without_gradients(lambda call=call, seen=seen: (call(state, weight, seen),))
    scored = int(mask.sum())
    size = state.element_size()
    return Problem(
        sides=sides,
        limit="GEMM",
        check=check,
        # weight and scored rows once, target and log-prob of every row
        bytes=size * (vocabulary * hidden + scored * hidden) + 12 * tokens,
        flops=2 * scored * hidden * vocabulary,
        facts=facts,
    )


def float64_logprob(state: Tensor, weight: Tensor, target: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, float]:
    """The truth for some rows, those rows, and how far PyTorch's own float32 product and log_softmax lie from it."""
    rows = some_rows(mask, *weight.shape)
    of_rows = target[rows, None]
    truth = float64_logits(state[rows], weight).log_softmax(-1).gather(1, of_rows)[:, 0]
    own = (state[rows].float() @ weight.float().T).log_softmax(-1).gather(1, of_rows)[:, 0]
    return truth, rows, largest_error(own, truth)


def tolerance(side: str, dtype: str) -> float:
    """Ours have float32 logits in any dtype. Others round logits of up to 32 to bf16 (steps of 0.25) or fp16."""
    return 1e-3 if side.startswith("mosaic") or dtype == "fp32" else 0.5


def without_gradients(call: Callable[..., Outputs]) -> Callable[..., Outputs]:
    return torch.no_grad()(call)


def forward_backward(tokens: int, hidden: int, vocabulary: int, dtype: str) -> Problem:
    """logprob [T] and the gradients of a random projection of it with respect to hidden and weight."""
    state = torch.randn(tokens, hidden).to(DTYPES[dtype]).requires_grad_()
    weight = random_weight(vocabulary, hidden, TOP_LOGIT).to(DTYPES[dtype]).requires_grad_()
    target, upstream = torch.randint(vocabulary, (tokens,)), torch.randn(tokens)
    truths = functools.cache(lambda: float64_gradients(state.detach(), weight.detach(), target, upstream))

    def check(side: str, outputs: Outputs) -> list[Check]:
        if side == "GEMM":
            return []
        # relative to the largest gradient; a peer's gradients suffer from its rounded logits
        loose = {"fp32": 1e-3, "bf16": 0.03, "fp16": 0.03}[dtype] * (1 if side.startswith("mosaic") else 10)
        allowed = (tolerance(side, dtype), loose, loose)
        return [
            Check(what, largest_error(output[rows], truth, relative=what != "logprob"), most)
            for (what, rows, truth), output, most in zip(truths(), outputs, allowed)
        ]

    def with_gradients(logprob: Tensor) -> Outputs:
        gradients = torch.autograd.grad(logprob, (state, weight), upstream.to(logprob.dtype))
        return logprob.detach(), *gradients

    def gemm() -> Outputs:
        with torch.no_grad():
            return (state @ weight.T,)

    def mosaic(**backend: str) -> Outputs:
        return with_gradients(linear_logprob(state, weight, target, **backend).logprob)

    def theirs(call: Callable[[Tensor, Tensor, Tensor], Tensor], package: str) -> Callable[[], Outputs]:
        # backward runs the package's code too, so its failures are the package's
        return peers.peer(package)(lambda: with_gradients(call(state, weight, target)))

    size = state.element_size()
    return Problem(
        sides={
            "GEMM": gemm,
            **ours(linear_logprob, mosaic),
            **{name: theirs(call, name.partition(" ")[0]) for name, call in PEERS.items()},
        },
        limit="GEMM",
        check=check,
        # as forward, twice (logits are computed again), and both gradients written
        bytes=3 * size * (vocabulary * hidden + tokens * hidden) + 16 * tokens,
        # logits, logits again, dhidden, dweight
        flops=8 * tokens * hidden * vocabulary,
    )


def float64_gradients(state: Tensor, weight: Tensor, target: Tensor, upstream: Tensor) -> list:
    """(name, rows, truth) of logprob, dhidden and dweight, each for some of its rows.

    dweight needs the log-sum-exp of every row; it is taken from float32 logits, whose error of 1e-5 does not show.
    """
    rows = some_rows(torch.ones_like(target, dtype=torch.bool), *weight.shape)[:128]
    logits = float64_logits(state[rows], weight)
    logprob = logits.log_softmax(-1)
    ids, at = target[rows, None], torch.arange(rows.numel())
    dlogits = -logprob.exp() * upstream[rows, None].double()
    dlogits[at, target[rows]] += upstream[rows].double()
    dhidden = sum(d @ part.double() for d, part in zip(dlogits.split(16384, 1), weight.split(16384)))

    columns = torch.cat([target[:32], torch.arange(32)]).unique()
    vocabulary = weight.float().T
    lse = torch.cat([(part.float() @ vocabulary).logsumexp(-1) for part in state.split(256)]).double()
    share = (state.double() @ weight[columns].double().T - lse[:, None]).exp()
    share = (target[:, None] == columns).double() - share
    dweight = (share * upstream[:, None].double()).T @ state.double()
    return [
        ("logprob", rows, logprob.gather(1, ids)[:, 0]),
        ("dhidden", rows, dhidden),
        ("dweight", columns, dweight),
    ]


def target_cases(quick: bool) -> list[Case]:
    """What the targets speak of: GEMM and ours; with masks, ours of the same rows without them."""
    mine = compiled_sides(linear_logprob)
    repeats = 4 if quick else 11
    head = {"tokens": 2048, **SMOLLM2}
    large = {"tokens": 256 if quick else 512, **QWEN3_4B}
    return [
        Case(
            "linear_logprob",
            problem,
            {**sizes, "dtype": dtype, **masked},
            (*mine, EVERY_ROW if masked else "GEMM"),
            repeats,
        )
        for problem, sizes, masked in (
            (forward, head, {}),
            (forward, head, {"masked": 0.9}),
            (forward_backward, head, {}),
            (forward, large, {}),
        )
        for dtype in ("bf16", "fp32")
    ]


def peer_cases(quick: bool) -> list[Case]:
    """Everybody on the smaller head, at a T at which the slowest still ends."""
    sides = ("GEMM", *our_sides(linear_logprob), *PEERS)
    return [
        Case(
            "linear_logprob",
            problem,
            {"tokens": 128 if quick else 1024, **SMOLLM2, "dtype": dtype},
            sides,
            3 if quick else 5,
        ).without(SLOW if quick else ())
        for problem in (forward, forward_backward)
        for dtype in ("bf16", "fp32")
    ]


def cases(quick: bool) -> list[Case]:
    return target_cases(quick) + peer_cases(quick)


def tokens_sweep(quick: bool) -> list[Case]:
    """Time against T."""
    sides = ("GEMM", *compiled_sides(linear_logprob), "eager")
    sizes = (64, 192, 512) if quick else (64, 128, 256, 512, 1024, 2048, 4096)
    return [Case("linear_logprob", forward, {"tokens": t, **SMOLLM2, "dtype": "bf16"}, sides, 3) for t in sizes]


def masked_sweep(quick: bool) -> list[Case]:
    """Time against the share of rows that are masked."""
    sides = ("GEMM", *compiled_sides(linear_logprob), "eager")
    sizes = {"tokens": 256 if quick else 2048, **SMOLLM2, "dtype": "bf16"}
    shares = (0.0, 0.5, 0.9) if quick else (0.0, 0.25, 0.5, 0.75, 0.9, 0.99)
    return [Case("linear_logprob", forward, {**sizes, "masked": share}, sides, 3) for share in shares]


def error_cases(quick: bool) -> list[Case]:
    """Error against the height of the logits, for logits in float32, fp16 and bf16 (eager), and for ours."""
    tops = (22.0, 27.0, 32.0) if quick else (22.0, 24.5, 27.0, 29.5, 32.0)
    sides = (*our_sides(linear_logprob), "eager")
    return [
        Case("linear_logprob", forward, {"tokens": 64, **SMOLLM2, "dtype": dtype, "top_logit": top}, sides)
        for dtype in ("fp32", "fp16", "bf16")
        for top in tops
    ]


def memory_cases(quick: bool) -> list[Case]:
    """Memory against T V: the largest of quick is the target's."""
    mine = compiled_sides(linear_logprob)
    sizes = [
        {"tokens": t, **SMOLLM2, "dtype": "bf16"} for t in ((256, 2048) if quick else (256, 512, 1024, 2048, 4096))
    ]
    sides = (*our_sides(linear_logprob), "eager")
    if not quick:
        sizes.append({"tokens": 2048, "hidden": 576, "vocabulary": 151936, "dtype": "bf16"})
        sides += ("F.linear_cross_entropy chunked", "trl chunked", "liger chunked")
    return [
        # others take long where they need much
        Case("linear_logprob", problem, size, mine if quick and size["tokens"] == 2048 else sides)
        for problem in (forward, forward_backward)
        for size in sizes
    ]


def tiny(case: Case) -> Case:
    """The same case at a size that takes milliseconds."""
    sizes = {**case.sizes, "tokens": 12, "hidden": 16, "vocabulary": 100}
    return Case(case.op, case.problem, sizes, case.sides, 1)


def test_linear_logprob(time_side: Callable[[Case, str], None], case: Case, side: str):
    time_side(case, side)

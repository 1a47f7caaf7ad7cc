"""What can be said of a Triton kernel without a GPU: the launches a call makes, compiled and inspected for each chip.

Each op's tests list calls; the launches are recorded from the op's own host code, so that what is inspected is what
runs. `figures` makes the rows of a table.
"""

from __future__ import annotations

import functools
import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

CHIPS = (80, 90, 100)
# Of one multiprocessor: bytes of shared memory that one block may take, and that all blocks share; the blocks' limit.
SHARED_OF_BLOCK = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
SHARED_OF_ALL = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
REGISTERS, WARPS, BLOCKS = 65536, 64, 32
# The SASS names of the matrix instructions of each generation, and what else is worth counting.
MATRIX_INSTRUCTION = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
COUNTED = ("HMMA", "HGMMA", "UTCHMMA", "FFMA", "MUFU", "LDGSTS", "UTMALDG", "LDG", "STG", "LDS", "STS", "BAR", "SHFL")
_TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "i1",
}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Launch:
    """One kernel as a call launches it: all that Triton compiles a specialisation for."""

    kernel: JITFunction
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]  # arguments known to be multiples of 16
    warps: int
    stages: int

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    @property
    def given(self) -> str:
        """The optional pointers that are there, which tell a kernel's specialisations apart."""
        optional = [name for name, value in self.constants if value is None]
        return "all" if not optional else "without " + ", ".join(name.removesuffix("_ptr") for name in optional)


def recorded(call: Callable[[], Any], chip: int) -> list[Launch]:
    """The distinct launches that `call` would make on a GPU of that generation; nothing runs, outputs are garbage."""
    launches: dict[Launch, None] = {}

    def record(kernel, *arguments, grid, warmup, **options):
        launches[_launch_of(kernel, arguments, options)] = None

    with (
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: divmod(chip, 10)),
    ):
        call()
    return list(launches)


def _launch_of(kernel: JITFunction, arguments: tuple, options: dict[str, Any]) -> Launch:
    values = dict(zip(kernel.arg_names, arguments)) | {k: v for k, v in options.items() if k in kernel.arg_names}
    signature, constants, aligned = {}, {}, []
    for parameter in kernel.params:
        name, value = parameter.name, values[parameter.name]
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and specialised):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
            aligned += [name] if value.data_ptr() % 16 == 0 else []
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"
        elif type(value) is int:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            aligned += [name] if specialised and value % 16 == 0 else []
        else:
            signature[name] = "fp32"
    return Launch(
        kernel,
        tuple(signature.items()),
        tuple(constants.items()),
        tuple(aligned),
        options["num_warps"],
        options["num_stages"],
    )


@functools.cache
def compiled(launch: Launch, chip: int) -> dict[str, Any]:
    """Registers, bytes spilled and of shared memory, blocks on a multiprocessor, and counts of SASS instructions."""
    places = {name: (at,) for at, name in enumerate(launch.kernel.arg_names)}
    source = ASTSource(
        launch.kernel,
        dict(launch.signature),
        dict(launch.constants),
        {places[name]: [["tt.divisibility", 16]] for name in launch.aligned},
    )
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": True}
    binary = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    registers, stack, static, local = map(
        int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage).groups()
    )
    mnemonics = Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)", code, re.MULTILINE))
    threads = 32 * binary.metadata.num_warps
    shared = max(binary.metadata.shared, static)
    return {
        "registers": registers,
        "spilled": stack + local,
        "local_accesses": mnemonics["LDL"] + mnemonics["STL"],
        "shared": shared,
        "warps": threads // 32,
        "blocks": _blocks(chip, registers, threads, shared),
        "instructions": {name: mnemonics[name] for name in COUNTED if mnemonics[name]},
    }


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / name, *arguments], check=True, capture_output=True, text=True).stdout


def _blocks(chip: int, registers: int, threads: int, shared: int) -> int:
    """Blocks that a multiprocessor holds at once; registers go by 256 a warp, and a block has 1 KiB of its own."""
    of_warp = math.ceil(registers * 32 / 256) * 256
    return min(
        REGISTERS // (of_warp * (threads // 32)),
        SHARED_OF_ALL[chip] // (shared + 1024),
        WARPS // (threads // 32),
        BLOCKS,
    )


def figures(calls: dict[str, Callable[[], Any]], chips: tuple[int, ...] = CHIPS) -> list[dict[str, Any]]:
    """Rows of the static table: one for each distinct launch of `calls` (by name) on each chip."""
    rows, seen = [], set()
    for chip in chips:
        for name, call in calls.items():
            for launch in recorded(call, chip):
                if (launch, chip) not in seen:
                    seen.add((launch, chip))
                    rows.append({"chip": chip, "call": name, "kernel": launch.name} | compiled(launch, chip))
    return rows

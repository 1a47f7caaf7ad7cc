"""Memory: how far a call's resident memory rises above its inputs and outputs, in a process of its own.

Resident memory counts whatever a side allocates, PyTorch's tensors and C++ buffers alike. Each measurement is a fork of
a process that has imported everything and run nothing: no cache of an earlier call can hide what a call needs. The C
library is told to give every larger block back to the system at once, and a warm-up at a tiny size loads what is loaded
once: thread pools, compiled code.

Run as a module it is that process: it reads pickled (case, tiny case, side) from stdin and prints one JSON line each.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.case import Case, NotApplicable, Outputs
from benchmarks.machine import ROOT
from benchmarks.measure import OK, Row

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# glibc: blocks from 64 KiB on are mapped one by one and unmapped when freed.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 16),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 16),
    "MALLOC_MMAP_MAX_": "1000000",
}
Request = tuple[Case, Case, str]


def measure_memory(requests: list[Request], *, timeout: float = 600) -> list[Row]:
    """One row a request: the peak of one call of the side beyond its inputs and outputs."""
    if not hasattr(os, "fork"):
        reason = "not measured: this system cannot fork a fresh process"
        return [Row.of(case, side, status=reason) for case, _, side in requests]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory"],
        input=pickle.dumps(requests),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **ALLOCATOR},
        timeout=timeout,
        check=True,
    )
    rows = []
    for (case, _, side), line in zip(requests, run.stdout.decode().splitlines(), strict=True):
        status, extra, method = json.loads(line)
        rows.append(Row.of(case, side, status=status, extra_memory=extra, note=method))
    return rows


def resident(field: str = "VmRSS") -> int:
    """Bytes of resident memory now, or their peak for "VmHWM"."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise OSError(f"{STATUS} has no {field}")


def peak_rise(run: Callable[[], Outputs]) -> tuple[int, Outputs, str]:
    """How far resident memory rose above its level before `run`, what `run` returned, and how it was seen."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        pass  # not glibc
    try:
        CLEAR.write_text("5")  # sets the peak to the present level
        before = resident()
    except OSError:
        return _sampled_rise(run)
    outputs = run()
    return resident("VmHWM") - before, outputs, "peak of the kernel's own count"


def _sampled_rise(run: Callable[[], Outputs]) -> tuple[int, Outputs, str]:
    """As `peak_rise` where the system keeps no resettable peak: looks every millisecond, and may miss a short peak."""
    try:
        import psutil
    except ImportError:
        raise NotApplicable("this system keeps no resettable peak, and psutil is not installed") from None
    process, done = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, process.memory_info().rss)
            time.sleep(1e-3)

    watcher = threading.Thread(target=watch)
    watcher.start()
    outputs = run()
    done.set()
    watcher.join()
    return max(peak, process.memory_info().rss) - before, outputs, "sampled every millisecond"


def extra_memory(case: Case, tiny: Case, side: str) -> tuple[str, int | None, str]:
    """(status, bytes beyond inputs and outputs, how it was seen) of one call, in this process."""
    try:
        tiny.build().sides[side]()
        problem = case.build()
        rise, outputs, method = peak_rise(problem.sides[side])
    except (NotApplicable, NotImplementedError) as reason:
        return f"not applicable: {reason}", None, ""
    return OK, max(0, rise - sum(output.untyped_storage().nbytes() for output in outputs)), method


def _in_a_fork(request: Request) -> str:
    """The answer to one request, computed by a child of this process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        code = 1
        try:
            os.write(writer, json.dumps(extra_memory(*request)).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read().decode()
    _, status = os.waitpid(child, 0)
    return text if status == 0 and text else json.dumps((f"failed: the process ended with status {status}", None, ""))


if __name__ == "__main__":
    # Unpickling imports the benchmarks, and with them torch and the kernels, before the first fork.
    for request in pickle.load(sys.stdin.buffer):
        print(_in_a_fork(request), flush=True)

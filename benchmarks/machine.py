"""What a measurement was made on: processor, versions, commit."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
SYSTEM_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# What decides how fast these kernels can be.
FLAGS = ("avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16")
PACKAGES = (
    "mosaic-rl",
    "torch",
    "trl",
    "cut-cross-entropy",
    "liger-kernel",
    "verl",
    "torchrl",
    "triton",
    "transformers",
)


@cache
def processor() -> dict[str, str]:
    """Model name, family, model number and flags of the first processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {"model name": platform.processor() or platform.machine()}
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_slug() -> str:
    """A file name for this kind of machine: model name, family and model number, cores; no host's name."""
    cpu = processor()
    name = re.sub(r"\((R|TM|tm|r)\)|CPU|@.*", " ", cpu.get("model name", "unknown"))
    numbers = "".join(
        f" {word}{cpu[key]}" for word, key in (("family", "cpu family"), ("model", "model")) if key in cpu
    )
    return re.sub(r"[^a-z0-9]+", "-", f"{name}{numbers} {cores()} cores".lower()).strip("-")


@cache
def last_level_cache() -> int | None:
    """Bytes of the largest cache that the first processor uses, or None where the system does not tell."""
    sizes = []
    for entry in sorted(SYSTEM_CACHES.glob("index*/size")) if SYSTEM_CACHES.exists() else ():
        number, unit = re.fullmatch(r"(\d+)([KMG]?)", entry.read_text().strip()).groups()
        sizes.append(int(number) << {"": 0, "K": 10, "M": 20, "G": 30}[unit])
    return max(sizes, default=None)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["torch"] = torch.__version__  # with the build's tag
    return found


def commit() -> str:
    """The commit's short hash, with "+changes" if tracked files differ from it, or "unknown" outside a checkout."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        status = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    # what a run itself writes does not make it a run of changed code
    changed = any("benchmarks/results/" not in line for line in status.stdout.splitlines())
    return head.stdout.strip() + ("+changes" if changed else "")


def cores_used_by_others() -> Callable[[], float | None]:
    """Starts counting; the call returned says how many cores everything else on the machine kept busy since then."""
    start, others = time.monotonic(), _busy_seconds_of_others()

    def so_far() -> float | None:
        now = _busy_seconds_of_others()
        return None if now is None else max(0.0, (now - others) / (time.monotonic() - start))

    return so_far


def _busy_seconds_of_others() -> float | None:
    """Processor seconds since the start of the system that were spent outside this process and its children."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = (int(field) for field in fields[:8])
    own = os.times()
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy - own.user - own.system - own.children_user - own.children_system


def describe() -> dict:
    """Everything that a row of results must carry besides its figures."""
    cpu = processor()
    return {
        "machine": machine_slug(),
        "cpu": cpu.get("model name", "unknown"),
        "flags": [flag for flag in FLAGS if flag in cpu.get("flags", "").split()],
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "last_level_cache": last_level_cache(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": versions(),
    }

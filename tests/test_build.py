from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mosaic_kernels import available_backends
from mosaic_kernels._backend import BACKENDS, extension, pick

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("csrc", "mosaic", "mosaic_kernels", "CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", "setup.py")
DATA = (".safetensors", ".json", ".html", ".jinja", ".yaml")


def test_the_extension_is_built_and_loads():
    assert available_backends()["cpu"] == "available"
    assert callable(extension.segment_gae)


def test_every_backend_is_available_or_says_why_not():
    state = available_backends()
    assert tuple(state) == BACKENDS and state["reference"] == "available"
    reasons = "available|the package triton is not installed|there is no NVIDIA GPU|the GPU has|triton is older"
    assert re.match(reasons, state["triton"]) and "no op has a CUDA kernel" in state["cuda"]


class Refusing:
    @staticmethod
    def supports(size):
        return "" if size < 3 else f"size {size} is not below 3"


def test_pick_takes_the_fastest_that_serves_the_call():
    reference = object()
    modules = {"cpu": Refusing, "reference": reference}
    assert pick("op", None, modules, size=2) is Refusing
    assert pick("op", None, modules, size=3) is reference
    assert pick("op", "reference", modules, size=2) is reference
    with pytest.raises(NotImplementedError, match="op: backend='cpu' cannot serve this call: size 3 is not below 3"):
        pick("op", "cpu", modules, size=3)
    with pytest.raises(NotImplementedError, match="it has no cuda kernel in this version"):
        pick("op", "cuda", modules, size=2)
    with pytest.raises(ValueError, match="backend must be None or one of reference, cpu, triton, cuda, got 'CPU'"):
        pick("op", "CPU", modules, size=2)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The sources without anything built, and a virtual environment that holds nothing but pip."""
    root = tmp_path_factory.mktemp("build")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / "source" / name, ignore=shutil.ignore_patterns("_C.*", "__pycache__"))
        elif source.exists():
            shutil.copy(source, root / "source" / name)
    subprocess.run([sys.executable, "-m", "venv", root / "venv"], check=True)
    return root


def build_wheel(checkout: Path, **variables: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CXX")}
    return subprocess.run(
        [
            checkout / "venv/bin/python",
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "-w",
            checkout / "wheels",
            checkout / "source",
        ],
        env={**environment, "MOSAIC_CUDA": "0", **variables},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_a_wheel_builds_in_isolation_without_torch(checkout):
    done = build_wheel(checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (checkout / "wheels").glob("mosaic_rl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(checkout / "unpacked")
    (library,) = (name for name in names if name.startswith("mosaic_kernels/_C."))
    data = {p.relative_to(ROOT).as_posix() for p in (ROOT / "mosaic").rglob("*") if p.suffix in DATA}
    assert data <= set(names)
    assert not any(name.startswith(("tests/", "csrc/")) for name in names)
    load = (
        "import importlib.util as u, sys\n"
        "spec = u.spec_from_file_location('_C', sys.argv[1]); module = u.module_from_spec(spec)\n"
        "spec.loader.exec_module(module); print(module.segment_gae.__doc__, u.find_spec('torch'))"
    )
    python = checkout / "venv/bin/python"
    run = subprocess.run([python, "-I", "-c", load, checkout / "unpacked" / library], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.rstrip().endswith("None"), run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"CXX": "no-such-compiler"}, "no C++17 compiler is found (looked for no-such-compiler). On Debian or Ubuntu"),
        ({"MOSAIC_CUDA": "yes"}, "MOSAIC_CUDA must be 0, 1 or unset, got yes"),
        ({"MOSAIC_CUDA": "1", "CUDACXX": "/no/nvcc", "PATH": "/usr/bin:/bin"}, "MOSAIC_CUDA=1, but no working nvcc"),
    ],
)
def test_a_build_that_cannot_work_says_what_is_missing(checkout, variables, message):
    done = build_wheel(checkout, **variables)
    assert done.returncode != 0 and message in done.stdout + done.stderr

"""Builds the compiled kernels by calling CMake; CMakeLists.txt is the only description of that build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
HOW_TO_INSTALL = (
    "On Debian or Ubuntu: apt install g++ python3-dev. On Fedora: dnf install gcc-c++ python3-devel. "
    "On macOS: xcode-select --install. Another compiler is chosen with the CXX environment variable."
)


def missing_tool() -> str:
    """What the build lacks on this machine, or the empty string."""
    if not shutil.which("cmake"):
        return "CMake 3.24 or newer is missing. Install it with: pip install 'cmake>=3.24'"
    compilers = [os.environ["CXX"].split()[0]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    if os.name == "posix" and not any(map(shutil.which, compilers)):
        return f"no C++17 compiler is found (looked for {', '.join(compilers)}). {HOW_TO_INSTALL}"
    return ""


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        if missing := missing_tool():
            raise SystemExit(f"mosaic_kernels cannot be built: {missing}")
        build_dir = Path(self.build_temp).resolve() / "cmake"
        target_dir = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        settings = {
            "CMAKE_BUILD_TYPE": "Debug" if self.debug else "Release",
            "CMAKE_LIBRARY_OUTPUT_DIRECTORY": target_dir,
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
        }
        # --fresh: a cache left by an earlier isolated build names a Ninja and a pybind11 that are gone by now.
        configure = ["cmake", "--fresh", "-S", ROOT, "-B", build_dir, *(f"-D{k}={v}" for k, v in settings.items())]
        if shutil.which("ninja"):
            configure += ["-G", "Ninja"]
        try:
            subprocess.run(configure, check=True)
            subprocess.run(["cmake", "--build", build_dir, "--parallel"], check=True)
        except subprocess.CalledProcessError as error:
            raise SystemExit(
                f"mosaic_kernels cannot be built: CMake failed, its messages stand above ({error}). "
                f"It needs a C++17 compiler and Python's headers. {HOW_TO_INSTALL}"
            ) from None


setup(ext_modules=[Extension("mosaic_kernels._C", sources=[])], cmdclass={"build_ext": CMakeBuild})

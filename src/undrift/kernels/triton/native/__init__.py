"""The C++ beside this file: compiled once a machine, and then what uncompiled steps on a GPU run.

A layer's noise in Python takes as long as all else of a layer's step, and a GPU waits for it. In C++ it takes a
fraction of that, but has to be compiled for the PyTorch that is installed. A compiler is asked for it in the
background, and until it is through (some twenty seconds, once), or where there is none, steps go on in Python. They
give the same numbers, by the same kernels.

UNDRIFT_NATIVE=0 leaves it at Python; UNDRIFT_NATIVE=wait has the first step wait for the compiler.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import threading
import warnings
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from undrift._errors import UndriftWarning
from undrift.kernels.triton.native import compiler

ENVIRONMENT = "UNDRIFT_NATIVE"
SOURCE = Path(__file__).with_name("module.cpp")
_TORCH, _LIBRARIES = Path(torch.__file__).parent, ("torch_python", "torch_cpu", "c10")

module: Any = None  # `module.cpp`, once it is there
# Nothing is known yet: `look`.
pending = os.environ.get(ENVIRONMENT) != "0" and sys.platform == "linux" and torch.version.hip is None


def look(wait: bool | None = None) -> None:
    """Load the module if it is there, and see to it that it will be; called by each pass while it is `pending`.

    Args:
        wait: for the compiler to be through; by default what UNDRIFT_NATIVE says.
    """
    global module, pending
    if not pending:
        return
    try:
        there = _there()
        if not there:
            _compiling().through(os.environ.get(ENVIRONMENT) == "wait" if wait is None else wait)
            there = _there()
        if there:
            module = _loaded(built())
            pending = False
    except (OSError, ImportError, AttributeError, RuntimeError) as error:
        pending = False
        warnings.warn(
            f"uncompiled steps on a GPU wait for Python: what would spare them that could not be made ({error}). "
            "Needed: a C++20 compiler (g++ or clang++), Python's headers, and a folder for caches that can be written "
            f"to. Results are the same. Install what is missing, or set {ENVIRONMENT}=0 to hear no more of it.",
            UndriftWarning,
            stacklevel=2,
        )


@cache
def built() -> Path:
    """Return where the compiled module is kept: one for each source, PyTorch, Python and kind of machine."""
    sources = [path.read_bytes() for path in sorted(SOURCE.parent.glob("*.[ch]*"))]
    against = [(_TORCH / "lib" / f"lib{name}.so").stat() for name in _LIBRARIES]
    torchs = (torch.__version__, torch.version.git_version, [(each.st_size, each.st_mtime_ns) for each in against])
    here = (sys.version, sysconfig.get_config_var("SOABI"), platform.machine(), platform.libc_ver())
    mark = hashlib.sha256(repr((sources, torchs, here)).encode()).hexdigest()[:16]
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "undrift" / f"native-{mark}.so"


def _there() -> bool:
    """Return whether the module is there: whole, and nobody else's. What is broken is taken away."""
    place = built()
    if not place.exists():
        return False
    if place.stat().st_uid not in {os.geteuid(), 0}:
        raise OSError(f"{place} belongs to somebody else")
    if not compiler.whole(place.read_bytes()):
        place.unlink()
        return False
    return True


class _Compiler(threading.Thread):
    """Runs the compiler, in a process that goes on if this one ends."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
        found = next(filter(None, (shutil.which(name) for name in names if name)), None)
        if found is None:
            raise OSError("no C++ compiler was found")
        self.command, self.failed = _command(found), ""

    def run(self) -> None:
        place = built()
        words = [sys.executable, "-I", compiler.__file__, str(place), *self.command]
        try:
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, start_new_session=True)  # noqa: S603
            if done.returncode:
                lines = (done.stdout + done.stderr).decode(errors="replace").splitlines()
                self.failed = next((line for line in lines if "rror" in line), f"{self.command[0]} failed")[:300]
        except OSError as error:
            self.failed = str(error)

    def through(self, wait: bool) -> None:
        """Raise an error if it has failed."""
        if wait:
            self.join()
        if self.failed:
            raise OSError(self.failed)
        if not self.is_alive() and not _there():
            raise OSError(f"what {self.command[0]} made is not there")


@cache
def _compiling() -> _Compiler:
    started = _Compiler()
    started.start()
    return started


def _command(program: str) -> list[str]:
    include = [_TORCH / "include", _TORCH / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    return [
        program, "-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *(f"-I{each}" for each in include),
        str(SOURCE), f"-L{_TORCH / 'lib'}", *(f"-l{each}" for each in _LIBRARIES),
    ]  # fmt: skip


def _loaded(path: Path) -> Any:
    loader = ExtensionFileLoader("undrift_native", str(path))
    spec = spec_from_file_location("undrift_native", path, loader=loader)
    assert spec is not None, "it was given a loader"
    found = module_from_spec(spec)
    loader.exec_module(found)
    if torch.cuda.is_available():  # else kernels run in Triton's interpreter, and Python calls them
        driver, ours = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(str(_TORCH / "lib/libtorch_cuda.so"))
        found.bind(_address(driver.cuLaunchKernel), _address(ours.aoti_torch_get_current_cuda_stream))
    return found


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0

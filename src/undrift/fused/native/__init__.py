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

ENVIRONMENT = "UNDRIFT_NATIVE"
SOURCE = Path(__file__).with_name("module.cpp")
_TORCH = Path(torch.__file__).parent

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
        if not built().exists():
            _compiling().through(os.environ.get(ENVIRONMENT) == "wait" if wait is None else wait)
        if built().exists():
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
    about = (sources, torch.__version__, torch.version.git_version, sys.version, platform.machine())
    mark = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "undrift" / f"native-{mark}.so"


class _Compiler(threading.Thread):
    """Runs the compiler, which goes on if this process ends, and leaves its output whole or not at all."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
        found = next(filter(None, (shutil.which(name) for name in names if name)), None)
        if found is None:
            raise OSError("no C++ compiler was found")
        self.command, self.failed = _command(found), ""

    def run(self) -> None:
        there = built()
        part, log = there.with_suffix(f".{os.getpid()}"), there.with_suffix(".log")
        script = 'part=$1 there=$2; shift 2; "$@" -o "$part" && exec mv "$part" "$there"; rm -f "$part"; exit 1'
        words = ["/bin/sh", "-c", script, "sh", str(part), str(there), *self.command]
        try:
            there.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with log.open("wb") as said:
                done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True)  # noqa: S603
            if done.returncode:
                lines = log.read_text(errors="replace").splitlines()
                self.failed = next((line for line in lines if "error" in line), f"{self.command[0]} failed")[:300]
        except OSError as error:
            self.failed = str(error)

    def through(self, wait: bool) -> None:
        """Raise an error if it has failed."""
        if wait:
            self.join()
        if self.failed:
            raise OSError(self.failed)


@cache
def _compiling() -> _Compiler:
    compiler = _Compiler()
    compiler.start()
    return compiler


def _command(compiler: str) -> list[str]:
    include = [_TORCH / "include", _TORCH / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    return [
        compiler, "-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *(f"-I{each}" for each in include),
        str(SOURCE), f"-L{_TORCH / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10",
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

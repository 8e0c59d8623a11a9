"""The C++ for a layer's noise: compiled beside the first steps, loaded once it is there; steps do without, too."""

import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import undrift
from fused_support import _native_module
from undrift._errors import UndriftWarning
from undrift.kernels import dispatch
from undrift.kernels.triton import native

Compiler = Callable[[str], None]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Give what puts a program in the compiler's place; nothing is known or compiled yet."""
    _native_module()  # by the real compiler, for `given`
    monkeypatch.setattr(native, "module", None)
    monkeypatch.setattr(native, "pending", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.delenv(native.ENVIRONMENT, raising=False)

    def put(script: str) -> None:
        program = tmp_path / "compiler"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("CXX", str(program))

    for kept in (native.built, native._compiling):
        kept.cache_clear()
    yield put
    for kept in (native.built, native._compiling):
        kept.cache_clear()


def given(tmp_path: Path) -> str:
    """Return a script that waits for a file `go` and writes what was compiled before where it is told to."""
    module = _native_module()
    if isinstance(module, str):
        pytest.skip(module)
    last = "for last; do :; done"
    size = Path(module.__file__).stat().st_size - native.compiler.DIGEST
    return f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; {last}; head -c {size} {module.__file__} > $last"


def seen(tmp_path: Path) -> list[str]:
    """Return the kinds of file in the cache."""
    return sorted(path.suffix for path in (tmp_path / "caches" / "undrift").iterdir())


def test_steps_go_on_until_it_is_there(tmp_path: Path, compiler: Compiler) -> None:
    compiler(given(tmp_path))
    for _ in range(3):
        native.look()
        assert native.module is None
        assert native.pending
    (tmp_path / "go").touch()
    deadline = time.monotonic() + 60
    while native.pending:
        native.look()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert hasattr(native.module, "again")
    assert seen(tmp_path) == [".lock", ".so"]
    assert (tmp_path / "caches" / "undrift").stat().st_mode & 0o077 == 0


def test_a_second_process_finds_it(tmp_path: Path, compiler: Compiler) -> None:
    (tmp_path / "go").touch()
    compiler(given(tmp_path))
    native.look(wait=True)
    compiler("exit 1")
    native._compiling.cache_clear()
    native.module, native.pending = None, True
    native.look()
    assert native.module is not None


def test_whoever_wants_to_waits(tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "go").touch()
    compiler(given(tmp_path))
    monkeypatch.setenv(native.ENVIRONMENT, "wait")
    native.look()
    assert native.module is not None


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'module.cpp:1: fatal error: Python.h: no such file'; exit 1", "Python.h: no such file"),
        ("exit 7", "compiler failed"),
        ("for last; do :; done; echo nonsense > $last", "invalid ELF header|file too short"),
    ],
)
def test_what_cannot_be_compiled_is_said_once(script: str, why: str, tmp_path: Path, compiler: Compiler) -> None:
    """What was found, what is needed, what to do; and nothing half written is left."""
    compiler(script)
    with pytest.warns(UndriftWarning, match=f"({why}).*Needed: a C\\+\\+20 compiler.*Install.*{native.ENVIRONMENT}=0"):
        native.look(wait=True)
    assert (native.module, native.pending) == (None, False)
    assert seen(tmp_path) == ([".lock", ".so"] if "ELF" in why else [".lock"])
    native.look(wait=True)  # an error if it warned again


@pytest.mark.parametrize("left", [50_000, -1, 10])
def test_what_is_broken_is_compiled_again(left: int, tmp_path: Path, compiler: Compiler) -> None:
    """A part of a library would end the process that loads it; so would one with other bytes."""
    (tmp_path / "go").touch()
    compiler(given(tmp_path))
    native.look(wait=True)
    content = native.built().read_bytes()
    native.built().unlink()  # this process has it open
    native.built().write_bytes(content[:left] if left != 10 else content[:9000] + b"?" + content[9001:])
    native._compiling.cache_clear()
    native.module, native.pending = None, True
    native.look()
    assert native.pending  # it was taken away
    native.look(wait=True)
    assert native.module is not None
    assert native.built().read_bytes() == content


def test_somebody_else_s_is_not_loaded(tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "go").touch()
    compiler(given(tmp_path))
    native.look(wait=True)
    native.module, native.pending = None, True
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if native.built().stat().st_uid == 0:
        os.chown(native.built(), 54321, -1)
    with pytest.warns(UndriftWarning, match="belongs to somebody else"):
        native.look()


def test_several_processes_compile_once(tmp_path: Path, compiler: Compiler) -> None:
    place, program = tmp_path / "made.so", tmp_path / "compiler"
    compiler(f"echo x >> {tmp_path}/ran; sleep 0.3; for last; do :; done; echo library > $last")
    words = [sys.executable, native.compiler.__file__, str(place), str(program)]
    running = [subprocess.Popen(words) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert (tmp_path / "ran").read_text() == "x\n"
    assert native.compiler.whole(place.read_bytes())


@pytest.mark.parametrize("missing", ["compiler", "folder", "home"])
def test_what_is_missing_is_said(
    missing: str, tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler("exit 1")
    if missing == "compiler":
        monkeypatch.setattr(shutil, "which", lambda _name: None)
    elif missing == "folder":
        (tmp_path / "caches").write_text("a file")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", classmethod(lambda _cls: (_ for _ in ()).throw(RuntimeError("no home"))))
    why = {"compiler": "no C\\+\\+ compiler was found", "folder": "Not a directory|File exists", "home": "no home"}
    with pytest.warns(UndriftWarning, match=why[missing]):
        native.look(wait=True)


def test_it_is_for_cuda_and_asked_for_by_a_pass(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler("exit 1")
    model = undrift.perturb(torch.nn.Linear(3, 2))
    looked: list[bool] = []
    monkeypatch.setattr(native, "look", lambda: looked.append(True))
    model(torch.rand(2, 3))
    assert not looked  # a CPU has no use for it
    monkeypatch.setattr(dispatch, "quick", lambda _x, _y: True)
    monkeypatch.setattr(model.key, "_keys", lambda: None)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model.key._begin()
    assert looked == [True]


def test_a_process_that_wants_none_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "pending", False)
    monkeypatch.setattr(native, "built", lambda: pytest.fail("nothing is to be looked for"))
    native.look(wait=True)

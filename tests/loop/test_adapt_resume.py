"""Runs that are killed, stopped or fail end bit for bit where they would have ended."""

import copy
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

import undrift
from adapt_support import Labelled, Untouchable, small
from faults import full_disk
from support import convnet, images, same, snapshot
from undrift import History, Step
from undrift.adapt import adapt
from undrift.likelihood import Information, Shot, entropy

# An untrained network on random images may well end up with one answer for all; that is not the matter here.
pytestmark = pytest.mark.filterwarnings("ignore:COLLAPSED:undrift.UndriftWarning")


class Killed(Exception):
    pass


def fused(kind: type[Any], at: int | None, error: Callable[[], Any]) -> Any:
    """Return a likelihood that fails at its at-th batch, and prints as its kind does."""

    class Fused(kind):  # type: ignore[misc]
        calls = 0

        def __call__(self, logits: Tensor, step: Step) -> Tensor:
            self.calls += 1
            if self.calls == at:
                error()
            return super().__call__(logits, step)

    return Fused()


def kill() -> None:
    raise Killed


class StatisticsFirst(Shot):
    def __init__(self) -> None:
        super().__init__(statistics_first=True)


class Augmented(Labelled):
    """Noise from torch's global generator on each image, as random crops and flips have it."""

    def __getitem__(self, i: int) -> Any:
        return self.x[i] + 0.1 * torch.randn_like(self.x[i]), Untouchable()


RUNS: dict[str, tuple[type[Any], dict[str, Any], Callable[[Tensor], Any], dict[str, Any]]] = {
    "tensor, information": (Information, {}, lambda x: x, {}),
    "shuffled loader, shot": (Shot, {}, lambda x: DataLoader(Labelled(x), 6, shuffle=True), {"checkpoint_steps": 1}),
    "statistics first": (
        StatisticsFirst,
        {"adapt_optimiser": "adam", "estimator": "drawn"},
        lambda x: x,
        {"keep": "best", "checkpoint_steps": 2},
    ),
    "loader with its own generator": (
        Shot,
        {"norm_statistics": "batch", "train_samples": 2},
        lambda x: DataLoader(Labelled(x), 6, shuffle=True, generator=torch.Generator().manual_seed(8)),
        {"checkpoint_steps": 3},
    ),
    "augmentation": (Shot, {}, lambda x: DataLoader(Augmented(x), 6, shuffle=True), {"checkpoint_steps": 1}),
    "augmentation in workers": (
        Information,
        {},
        lambda x: DataLoader(Augmented(x), 6, shuffle=True, num_workers=1, persistent_workers=True),
        {"checkpoint_steps": 1},
    ),
}


# In the first epoch and in the second; processes take time to start, so one place is enough for them.
@pytest.mark.parametrize(("name", "at"), [(n, at) for n in RUNS for at in ([7] if "workers" in n else [2, 7])])
def test_a_killed_run_ends_bit_for_bit_where_it_would_have_ended(name: str, at: int, tmp_path: Path) -> None:
    kind, options, form, arguments = RUNS[name]
    x = images(24)
    path = tmp_path / "run.safetensors"

    def run(model: undrift.Perturbed, seed: int, at: int | None, checkpoint: Path | None) -> History:
        torch.manual_seed(seed)
        given = {k: v for k, v in arguments.items() if checkpoint or k != "checkpoint_steps"}
        return adapt(model, form(x), fused(kind, at, kill), 3, batch_size=6, checkpoint=checkpoint, **given)

    whole = small(**options)
    expected = run(whole, 5, None, None)
    with pytest.raises(Killed):
        run(small(**options), 5, at, path)
    torch.manual_seed(77)  # a new process knows nothing of the old one's seeds
    resumed = undrift.perturb(small(**options).remove(), **options, generator=torch.Generator().manual_seed(1))
    history = run(resumed, 6, None, path)
    assert same(snapshot(resumed), snapshot(whole))
    assert history == expected
    again = small(**options)
    assert run(again, 7, None, path) == expected  # a finished run has nothing left to do
    assert same(snapshot(again), snapshot(whole))


SCRIPT = """
import os, signal, sys
import torch
sys.path[:0] = ["tests", "tests/support"]
import undrift
from support import snapshot, images
from adapt_support import small
from undrift.adapt import adapt
from faults import full_disk
from undrift.likelihood import Shot

class Deadly(Shot):
    calls = 0
    def __call__(self, logits, step):
        self.calls += 1
        if self.calls == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(logits, step)

torch.set_num_threads(1)
model = small()
torch.manual_seed(5)
adapt(model, images(24), Deadly(), 3, batch_size=6, checkpoint=sys.argv[1])
"""


@pytest.mark.slow  # a killed run is resumed above, in this process
def test_a_process_killed_for_good_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    done = subprocess.run([sys.executable, "-c", SCRIPT, path], cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    whole, resumed = small(), small()
    torch.manual_seed(5)
    adapt(whole, images(24), Shot(), 3, batch_size=6)
    history = adapt(resumed, images(24), Shot(), 3, batch_size=6, checkpoint=path)
    assert len(history.steps) == 12
    assert same(snapshot(resumed), snapshot(whole))


@contextmanager
def called_in_a_survey(model: undrift.Perturbed, steps: Callable[[], int], call: Callable[[], Any]) -> Iterator[None]:
    """Call something in the survey of the first epoch of four steps: in the first pass after them without gradients."""
    calls: list[int] = []

    def look(_net: nn.Module, _args: object) -> None:
        if steps() == 4 and not torch.is_grad_enabled() and not calls:
            calls.append(1)
            call()

    hook = model.net.register_forward_pre_hook(look)
    yield
    hook.remove()


PRESSED = {"in a step": (1, 2), "while it is applied": (1, 3), "in a refresh": (1, 0), "in a survey": (0, 4)}


@pytest.mark.parametrize("where", PRESSED)
def test_ctrl_c_writes_the_checkpoint_and_says_where_it_stands(where: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    x = images(24)
    whole, model = small(), small()
    torch.manual_seed(5)
    expected = adapt(whole, x, Shot(statistics_first=True), 2, batch_size=6)

    def press() -> None:
        signal.raise_signal(signal.SIGINT)

    class Pressed(fused(StatisticsFirst, 7 if where == "in a step" else None, press).__class__):  # type: ignore[misc]
        refreshed = 0

        def refresh(self, model: undrift.Perturbed, batches: Any) -> None:
            self.refreshed += 1
            if self.refreshed == 2 and where == "in a refresh":
                press()
            super().refresh(model, batches)

    applied: list[int] = []

    def applying(*_: object) -> None:
        applied.append(1)
        if len(applied) == 7 and where == "while it is applied":
            press()

    likelihood = Pressed()
    hook = register_optimizer_step_pre_hook(applying)
    torch.manual_seed(5)
    with (
        called_in_a_survey(model, lambda: likelihood.calls, press) if where == "in a survey" else nullcontext(),
        pytest.raises(KeyboardInterrupt, match=r"epoch [12] of 2.*can be used.*checkpoint="),
    ):
        adapt(model, x, likelihood, 2, batch_size=6, checkpoint=path)
    hook.remove()
    assert torch.isfinite(model(x)).all()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    values = json.loads(header(path)["values"])
    assert (values["epoch"], values["done"]) == PRESSED[where]
    assert adapt(model, x, Shot(statistics_first=True), 2, batch_size=6, checkpoint=path) == expected
    assert same(snapshot(model), snapshot(whole))


def test_ctrl_c_while_a_resumed_run_finds_its_place(tmp_path: Path) -> None:
    class Pressing(Labelled):
        pressed = False

        def __getitem__(self, i: int) -> Any:
            if self.pressed:
                self.pressed = False
                signal.raise_signal(signal.SIGINT)
            return super().__getitem__(i)

    x, path = Pressing(images(24)), tmp_path / "run"
    whole, model = small(), small()
    torch.manual_seed(5)
    adapt(whole, x, Information(), 2, batch_size=6)
    torch.manual_seed(5)
    with pytest.raises(Killed):
        adapt(model, x, fused(Information, 7, kill), 2, batch_size=6, checkpoint=path, checkpoint_steps=1)
    x.pressed = True
    with pytest.raises(KeyboardInterrupt, match="epoch 2 of 2, after 2 of its 4 batches"):
        adapt(model, x, Information(), 2, batch_size=6, checkpoint=path, checkpoint_steps=1)
    adapt(model, x, Information(), 2, batch_size=6, checkpoint=path, checkpoint_steps=1)
    assert same(snapshot(model), snapshot(whole))


def header(path: Path) -> dict[str, str]:
    raw = path.read_bytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]


def test_it_runs_outside_of_the_main_thread() -> None:
    histories = []
    thread = threading.Thread(target=lambda: histories.append(adapt(small(), images(8), entropy, epochs=1)))
    thread.start()
    thread.join()
    assert len(histories) == 1


def test_a_checkpoint_of_another_run_is_refused_and_the_model_untouched(tmp_path: Path) -> None:
    path = tmp_path / "run"
    adapt(small(), images(8), entropy, 1, checkpoint=path)
    other = undrift.perturb(convnet())
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("source network .* there, .* here", lambda: adapt(other, images(8), entropy, 1, checkpoint=path)),
        ("adapt_lr 0.002 there, 0.1 here", lambda: adapt(small(adapt_lr=0.1), images(8), entropy, 1, checkpoint=path)),
        ("epochs 1 there, 2 here", lambda: adapt(small(), images(8), entropy, 2, checkpoint=path)),
        ("images 8 there, 9 here", lambda: adapt(small(), images(9), entropy, 1, checkpoint=path)),
        ("likelihood .*entropy", lambda: adapt(small(), images(8), Information(), 1, checkpoint=path)),
    ]
    state = snapshot(other)
    for match, call in calls:
        with pytest.raises(undrift.PerturbationMismatch, match=rf"checkpoint of another run \(.*{match}"):
            call()
    assert same(snapshot(other), state)


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    adapt(small(), images(8), entropy, 1, checkpoint=path)
    whole = path.read_bytes()
    for damage in (whole[: len(whole) // 2], b"", b"\x80\x04not a pickle"):
        path.write_bytes(damage)
        with pytest.raises(undrift.DataError, match="not a checkpoint that adapt can read"):
            adapt(small(), images(8), entropy, 1, checkpoint=path)
        assert path.read_bytes() == damage
    with pytest.raises(undrift.DataError, match="is a folder"):
        adapt(small(), images(8), entropy, 1, checkpoint=tmp_path)


def test_a_full_disk_keeps_the_last_checkpoint_and_the_model(tmp_path: Path) -> None:
    path, model = tmp_path / "run", small()
    disk = ExitStack()
    filling = fused(Information, 2, lambda: disk.enter_context(full_disk()))  # in the second epoch
    with disk, pytest.raises(undrift.DataError, match="disk is full"):
        adapt(model, images(8), filling, 4, checkpoint=path)
    assert json.loads(header(path)["values"])["epoch"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    assert torch.isfinite(model(images(8))).all()
    assert len(adapt(model, images(8), Information(), 4, checkpoint=path).epochs) == 4


def test_the_checkpoint_of_other_images_is_refused(tmp_path: Path) -> None:
    model = small()
    twin = copy.deepcopy(model)
    adapt(model, images(24), entropy, epochs=1, checkpoint=tmp_path / "run", progress=False)
    with pytest.raises(undrift.PerturbationMismatch, match="which images"):
        adapt(twin, 2 * images(24), entropy, epochs=1, checkpoint=tmp_path / "run", progress=False)


@pytest.mark.parametrize("where", ["at a survey", "after the last batch"])
def test_a_run_stopped_at_the_end_of_an_epoch_goes_on_with_the_same_order(where: str, tmp_path: Path) -> None:
    """A shuffling sampler draws once more when it is asked for a batch too many, and only then."""
    path = tmp_path / "run"

    def run(model: undrift.Perturbed, likelihood: Any = None, **given: Any) -> History:
        torch.manual_seed(5)
        asked = likelihood or Information()
        return adapt(model, Labelled(images(24)), asked, 3, batch_size=6, keep="best", **given)

    whole, model = small(), small()
    expected = run(whole)
    likelihood = fused(Information, None, kill)

    def stop() -> None:
        # Without a word on the way out, the file is the one that was written with the last batch.
        raise KeyboardInterrupt if where == "at a survey" else Killed

    with called_in_a_survey(model, lambda: likelihood.calls, stop), pytest.raises((KeyboardInterrupt, Killed)):
        run(model, likelihood, checkpoint=path, checkpoint_steps=1)
    assert json.loads(header(path)["values"])["done"] == 4
    assert json.loads(header(path)["values"])["over"] == (where == "at a survey")
    resumed = small()
    assert run(resumed, checkpoint=path, checkpoint_steps=1) == expected
    assert same(snapshot(resumed), snapshot(whole))


def test_older_checkpoints_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(Killed):
        adapt(small(), images(24), fused(Information, 7, kill), 2, batch_size=6, checkpoint=path, checkpoint_steps=1)
    now, tensors = header(path), load_file(path)
    values = json.loads(now["values"])
    older = {name: value for name, value in values.items() if name not in ("over", "idle_steps", "idle_epoch")}
    assert len(older) == len(values) - 3
    save_file(tensors, path, {**now, "values": json.dumps(older)})
    history = adapt(small(), images(24), Information(), 2, batch_size=6, checkpoint=path, checkpoint_steps=1)
    assert (len(history.steps), history.idle_steps) == (8, 0)

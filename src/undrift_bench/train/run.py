"""Train a source model: check, train, keep the best epoch, write one file."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from undrift._errors import DataError, OptionError
from undrift.images import Domain, FileDomain, split
from undrift.system import atomic
from undrift.system.progress import Bar
from undrift.system.validate import pick_device
from undrift_bench import zoo
from undrift_bench.train import checkpoint as checkpoints
from undrift_bench.train.checkpoint import Best
from undrift_bench.train.checks import check_domain, check_network
from undrift_bench.train.curve import draw_curve
from undrift_bench.train.epoch import Epoch, Loop, own_randomness
from undrift_bench.train.frames import frames
from undrift_bench.train.options import TrainOptions, resolve
from undrift_bench.train.source_file import SourceHeader, write_source


@dataclass(frozen=True, eq=False)
class TrainedSource:
    """The result of a training run.

    Attributes:
        path: the source model, to be loaded with `undrift_bench.train.load_source` or `undrift_bench.zoo.load`.
        network: the same in memory, in eval mode, on the device it was trained on.
        accuracy: on the validation images, a share of 1; None where there were none.
        epoch: the epoch whose weights were kept.
        history: one row per epoch, those before an interruption too.
        seconds: of this call, from reading images to the written file.
        curve: a PNG; None without matplotlib.
    """

    path: Path
    network: nn.Module
    accuracy: float | None
    epoch: int
    history: tuple[Epoch, ...]
    seconds: float
    curve: Path | None


def train_source(
    domain: Domain,
    out: str | PathLike[str],
    options: TrainOptions | str = "cifar",
    *,
    trunk: str | PathLike[str] | None = None,
    network: nn.Module | None = None,
    validation: Domain | None = None,
    device: torch.device | str = "auto",
    resume: bool = True,
    overwrite: bool = False,
    progress: bool = True,
    watch: Callable[[Epoch], None] | None = None,
    workers: int | None = None,
) -> TrainedSource:
    """Train a source model on a labelled domain and write it, the best validation's weights, to `out`.

    The same seed gives the same weights, on a CPU bit for bit. A run that was interrupted goes on when it is called
    again: its checkpoint lies beside `out` and is removed at the end. The whole domain must fit into the device's
    memory as uint8 (4,000 images of 256×256: 0.8 GB).

    Args:
        domain: images with labels; its preprocessing is what the network is trained with and what the file says. Its
            crop becomes a random crop in training.
        out: a .safetensors file to write; the curve becomes a .png of the same name.
        options: a preset ("cifar", "digits", "shot") or `TrainOptions`.
        trunk: weights to start from, such as ImageNet's ResNet-50; only the head is fresh then.
        network: the user's own module, trained in place, instead of `options.network` from the zoo.
        validation: images to choose the best epoch by; None splits `options.held_out` off the domain, which
            `undrift.images.split(domain, held_out, seed)` gives again.
        device: "auto" takes a GPU where there is one.
        resume: go on from a checkpoint; False starts over.
        overwrite: replace a finished `out` and its curve.
        watch: called with each epoch's figures.
        workers: processes that decode images; None takes as many as there are cores.

    Returns:
        The trained network with its figures.
    """
    start = time.perf_counter()
    options = resolve(options)
    path, checkpoint, curve = _places(out, resume, overwrite)
    domain = check_domain(domain, None)
    train, held = _parts(domain, validation, options)
    place = pick_device(device)
    name = options.network if network is None else f"{type(network).__module__}.{type(network).__qualname__}"
    run = checkpoints.identity(options, name, "" if trunk is None else Path(trunk).name, train, held)
    with own_randomness(options.seed, place):
        net = _network(options, trunk, len(domain.class_names)) if network is None else network
        net = net.to(place)
        if place.type == "cuda":
            net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in PyTorch's types
        training = frames(train, place, options.pad, workers)
        held_frames = None if held is None else frames(held, place, 0, workers)
        _check_size(train, len(training), options)
        check_network(net, name, training, domain)
        loop = Loop(net, training, held_frames, options)
        best, history = Best(), list[Epoch]()
        if resume and checkpoint.exists():
            best, history = checkpoints.restore(checkpoint, run, loop)
        _train(loop, best, history, progress, watch, checkpoints.CheckpointWriter(checkpoint, run, loop, best, history))
    net.load_state_dict(best.weights, strict=True)
    header = SourceHeader(
        *(name, domain.class_names, domain.preprocess, domain.name, len(training)),
        *(best.accuracy, best.epoch, options.seed, options.as_dict()),
    )
    write_source(path, best.weights, header)
    drawn = draw_curve(curve, history, f"{name} on {domain.name}, seed {options.seed}")
    checkpoints.remove(checkpoint)
    seconds = time.perf_counter() - start
    return TrainedSource(path, net.eval(), best.accuracy, best.epoch, tuple(history), seconds, drawn)


def _train(
    loop: Loop,
    best: Best,
    history: list[Epoch],
    progress: bool,
    watch: Callable[[Epoch], None] | None,
    save: Callable[[], None],
) -> None:
    """Train the epochs that are left, adding to `best` and `history`, with a checkpoint from time to time."""
    epochs, numbers = loop.options.epochs, _numbers(history, best)
    saved = time.perf_counter()
    shown = None if progress else False
    with Bar("train", epochs * loop.steps, shown, done=len(history) * loop.steps) as bar:
        for epoch in range(len(history), epochs):
            bar.say(f"epoch {epoch + 1}/{epochs}")
            row = loop.run(epoch, partial(bar.advance, **numbers))
            history.append(row)
            best.offer(row, loop)
            if time.perf_counter() - saved >= loop.options.checkpoint_seconds:
                save()
                saved = time.perf_counter()
            numbers = _numbers(history, best)
            bar.advance(0, **numbers)
            if watch is not None:
                watch(row)


def _numbers(history: list[Epoch], best: Best) -> dict[str, Any]:
    """Return what stands beside the progress bar."""
    if not history:
        return {}
    measured = [row.accuracy for row in history if row.accuracy is not None]
    numbers = {"loss": f"{history[-1].loss:.3f}", "train": f"{history[-1].train_accuracy:.1%}"}
    if best.accuracy is not None:
        numbers |= {"validation": f"{measured[-1]:.2%}", "best": f"{best.accuracy:.2%}"}
    return numbers


def _places(out: str | PathLike[str], resume: bool, overwrite: bool) -> tuple[Path, Path, Path]:
    """Return where the model, its checkpoint and its curve go; raises before any work is done."""
    path = Path(out)
    if path.suffix != ".safetensors":
        raise OptionError(
            f"the source model is to be written to {path.name}; needed: a name that ends in .safetensors, the format "
            f"it is written in. Use {path.stem}.safetensors."
        )
    atomic.check(path)
    checkpoint, curve = path.with_suffix(".checkpoint.pt"), path.with_suffix(".png")
    atomic.check(curve)
    # With a checkpoint beside them, both are older than the run or were written just before a kill.
    taken = next((place for place in (path, curve) if place.exists()), None)
    if taken is not None and not overwrite and not (resume and checkpoint.exists()):
        raise DataError(
            f"{taken} is there already; needed: a new name, so that no trained model and no picture is lost. Choose "
            "another name, or replace it with overwrite=True."
        )
    return path, checkpoint, curve


def _parts(domain: Domain, validation: Domain | None, options: TrainOptions) -> tuple[Domain, Domain | None]:
    """Return the images to train on and those to choose the best epoch by, split before anything is decoded.

    A split of what could be decoded would differ from the split of the files that an evaluation makes later, and let
    training images into it.
    """
    if validation is not None:
        return domain, check_domain(validation, domain)
    if options.held_out == 0:
        return domain, None
    if isinstance(domain, FileDomain):
        return split(domain, options.held_out, options.seed)
    return split(domain, options.held_out, options.seed)


def _network(options: TrainOptions, trunk: str | PathLike[str] | None, classes: int) -> nn.Module:
    if trunk is not None:
        return zoo.transfer(options.network, trunk, classes)
    network = zoo.build(options.network, classes)
    if hasattr(network, "backbone"):
        raise OptionError(
            f"{options.network} was asked for without weights of its backbone; needed: a checkpoint of ImageNet's "
            "ResNet-50, as SHOT starts from. Name it: trunk='resnet50.safetensors'."
        )
    return network


def _check_size(train: Domain, images: int, options: TrainOptions) -> None:
    if images < options.batch_size:
        raise DataError(
            f"{train.name} has {images} images to train on, fewer than one batch of {options.batch_size}; needed: at "
            f"least one full batch. Lower batch_size to {max(images // 2, 1)} or less."
        )

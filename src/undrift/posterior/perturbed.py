"""A network with noise on its weights: the class that `undrift.perturb` returns."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from undrift._errors import UndriftError
from undrift.options import Options
from undrift.posterior import norm, table
from undrift.posterior.attached import Attached, Hook, Hooks, Trained, root_of
from undrift.posterior.input_errors import refuse_unfitting
from undrift.posterior.low_rank import LowRank, LowRankMeans
from undrift.posterior.noise import Noise, PriorRow
from undrift.posterior.seeds import Key
from undrift.posterior.select import Choice
from undrift.system.interrupts import uninterrupted
from undrift.system.validate import generator_or_seed

if TYPE_CHECKING:
    from undrift.images.preprocess import Preprocess


from torch import Tensor

from undrift.posterior.norm import capturing
from undrift.system.private import write_count
from undrift.system.warning import warn


class Inputs:
    """Copies of the images for networks that write into them (`x.sub_(mean)`): every draw sees the same input.

    The first pass runs on copies to find out whether the network writes into its input. Later passes are checked too,
    because some networks write only sometimes. Images are the first tensor argument; other tensors may be meant as
    outputs, and are passed on unchanged.

    Attributes:
        copied: whether each pass gets copies: the network writes into them.
        known: whether a pass has been checked.
    """

    def __init__(self) -> None:
        self.copied, self.known = False, False

    def call(self, net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the network makes of its inputs, which stay what they are."""
        if self.copied:
            args, kwargs = copies(args, kwargs)
            return net(*args, **kwargs)
        # The step that a CUDA graph records has been made before, and if not, a copy would be made in every replay.
        images = _images(args, kwargs)
        if images is None:
            return net(*args, **kwargs)
        first = not self.known and not capturing(images)
        if first:
            args, kwargs = copies(args, kwargs)
            images = _images(args, kwargs)
        before = write_count(images)
        output = net(*args, **kwargs)
        self.copied = before != write_count(images)
        self.known = self.known or first
        if self.copied and not first:
            warn(
                f"a pass of {type(net).__name__} wrote into its input, which the passes before it did not; needed: the "
                "same images for each draw. From now on it gets copies, but this batch was changed: give it again "
                "from where it came, or let the network write elsewhere (x = x - mean for x.sub_(mean))."
            )
        return output


def copies(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a pass with a copy of the images, through which gradients go on to the caller's.

    What was one tensor stays one: attention computes otherwise where key and value are the same.
    """
    images = _images(args, kwargs)
    if images is None:
        return args, kwargs
    copy = _copy(images)
    return tuple(copy if x is images else x for x in args), {n: copy if x is images else x for n, x in kwargs.items()}


def _copy(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or not x.is_inference():
        return x.clone()
    with torch.inference_mode(False):  # tensors that are made in inference mode do not count what is written to them
        return x.clone()


def _images(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)


class Perturbed(nn.Module):
    """A network with noise on its weights; made by `perturb`.

    Attributes:
        net: the user's network, hooked.
        options: every choice that was made.
        noise: one `Noise` per perturbed weight, by the layer's name with "/" for ".".
        norms: the policy of each norm layer.
        prior: all noises' priors as one row, for the KL.
        trained: the modules whose own weights are trained; the paper trains none.
        low_rank: the changes of those weights that move in a low rank, by name as `noise` is.
        preprocess: the preprocessing of images, if known.
        classes: the names of the classes, in the order of the outputs, if known.
        facts: what its pack records of itself, as JSON values by name: `images`, `estimate`, … (see `undrift.save`).
        router: the router's tensors of the domain, which are stored in the pack.
    """

    preprocess: "Preprocess | None" = None
    classes: tuple[str, ...] | None = None
    prior: PriorRow | None

    def __init__(
        self, net: nn.Module, options: Options, choices: list[Choice], generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.options = options
        self.net = net
        first = next(p for p in (*net.parameters(), *net.buffers()) if p is not None)
        self.key = Key(first.device, generator)
        self.noise = nn.ModuleDict()
        self.choices = choices
        self.prior = None
        self.norms: list[norm.Norm] = []
        self.trained: list[Trained] = []
        self.weights: list[tuple[Noise, nn.Module, str]] = []  # which weight each noise is on
        self.low_rank = nn.ModuleDict()
        self.changed: list[tuple[nn.Module, str, LowRank]] = []  # which weight each low-rank change is of
        self.low_rank_hooks: list[LowRankMeans] = []
        self.facts: dict[str, Any] = {}
        self.router: dict[str, torch.Tensor] = {}
        self._inputs = Inputs()
        self._before: Hooks = [(root_of(net), self.key.begin)]
        self._after: Hooks = []
        self._attached = Attached(net, self.key, self._before, self._after, (self.norms, self.trained))

    def register_noise(self, noise: Noise, name: str, layer_name: str, module: nn.Module, attribute: str) -> None:
        """Register the noise of one weight under its name; `module` holds the weight as `attribute`."""
        # Not by ModuleDict's own setter, which refuses layers called "keys" or "values".
        self.noise._modules[name] = noise
        self.key.waiting[noise.number] = layer_name
        self.weights.append((noise, module, attribute))

    def add_hook(self, module: nn.Module, after: Hook, before: Hook | None = None) -> None:
        """Add a hook behind a module, and one before it; they go on with `attach` and come off with `remove`."""
        self._after.append((module, after))
        if before is not None:
            self._before.append((module, before))

    def attach(self) -> None:
        """Put everything on the network: hooks, copies and flags; called once, by `perturb`."""
        noises = self.noises()
        if len({noise.log_var.device for noise in noises}) == 1:
            self.prior = PriorRow(noises)
        self._after.append((root_of(self.net), self.key.end))
        try:
            with uninterrupted():
                self._attached.attach()
        except BaseException:  # Ctrl-C: nobody will have this perturbed network
            self._attached.remove()
            raise

    @property
    def _removed(self) -> bool:
        return self._attached.removed

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the network returns, noisy."""
        if self._removed:
            raise UndriftError("this perturbation was removed. Call the network itself, or undrift.perturb it again.")
        if torch.compiler.is_compiling():
            if self._inputs.copied:
                args, kwargs = copies(args, kwargs)
            return self.net(*args, **kwargs)
        try:
            return self._inputs.call(self.net, args, kwargs)
        except BaseException as error:
            # PyTorch calls no hook on Ctrl-C: a norm layer would keep the statistics of half a pass, and a layer with
            # a low-rank mean the weights of one.
            self.settle()
            if isinstance(error, Exception) and args and isinstance(args[0], torch.Tensor):
                refuse_unfitting(self.net, args[0], error)
            raise

    def settle(self) -> None:
        """Put back what layers hold during a pass only, where a pass was stopped half-way."""
        for policy in self.norms:
            policy.settle()
        for hooks in self.low_rank_hooks:
            hooks.settle()

    @contextmanager
    def off(self) -> Iterator[nn.Module]:
        """Give the source network, bit for bit, for the length of a `with` block; do not change its weights there."""
        attached, block = self._attached, object()
        try:
            try:
                attached.leave(block)
                yield self.net
                # Not in `finally`: an error under way says more.
                attached.warn_of_changes()
            finally:
                attached.come_back(block)
        except BaseException:  # Ctrl-C may come on the way back too, before it is held off
            attached.come_back(block)
            raise

    @contextmanager
    def mean(self) -> Iterator["Perturbed"]:
        """Give the adapted network without noise and with fixed moving statistics, for the length of a `with` block."""
        own = vars(self.key)  # in one call, which Ctrl-C cannot halve
        before = {"noisy": self.key.noisy, "training": self.key.training}
        try:
            own.update(noisy=False, training=False)
            yield self
        finally:
            own.update(before)

    @contextmanager
    def rest(self) -> Iterator["Perturbed"]:
        """Do not update moving statistics for the length of a `with` block."""
        own = vars(self.key)
        before = {"training": self.key.training}
        try:
            own.update(training=False)
            yield self
        finally:
            own.update(before)

    def remove(self) -> nn.Module:
        """Take the perturbation off and return the network as it was: outputs, tensors, hooks and flags."""
        self._attached.remove()
        return self.net

    def remove_when_unused(self) -> None:
        """Remove the perturbation when nothing refers to this perturbed network any more."""
        weakref.finalize(self, self._attached.remove).atexit = False

    def reseed(self, generator: torch.Generator | int | None = None) -> None:
        """Restart the noise: the same seed gives the same noise, step by step."""
        self.key.reseed(generator_or_seed(generator))

    def __getstate__(self) -> dict[str, Any]:
        if self._attached.aside:
            raise UndriftError(
                "a perturbed network was copied or pickled inside `with model.off():`; the copy would have no noise. "
                "Copy it outside, or copy model.net alone."
            )
        return self.__dict__

    def changes(self) -> list[LowRank]:
        """Return the low-rank change of each weight that has one."""
        return list(self.low_rank.values())  # type: ignore[arg-type]

    def noises(self) -> list[Noise]:
        """Return the noise of each perturbed weight."""
        return list(self.noise.values())  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return table.render(self)

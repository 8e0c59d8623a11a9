"""Norm layers of a perturbed network: the statistics they use, and whether scale and shift are trained."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from undrift._errors import UndriftError
from undrift.kernels.reference import wide
from undrift.options import Options, Statistics
from undrift.posterior.attached import Swapped
from undrift.posterior.seeds import Key
from undrift.posterior.sync_batch_norm import BatchStatistics, batch_statistics, with_gradient
from undrift.system.private import BatchNorm, InstanceNorm
from undrift.system.ranks import Share

AVERAGES = ("running_mean", "running_var")
COUNT = "num_batches_tracked"
FORWARDS = (BatchNorm.forward, nn.SyncBatchNorm.forward)  # what a subclass does with its averages is unknown


def can_track(layer: Any, x: Tensor) -> bool:
    """Return whether the layer can normalise by batch statistics and move its averages in one call.

    PyTorch then requires averages, scale and shift of one dtype: the input's, or float32 for half precision.
    """
    if torch.compiler.is_compiling() or type(layer).forward not in FORWARDS or "forward" in vars(layer):
        return False
    tensors = (layer.running_mean, layer.running_var, layer.weight, layer.bias)
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    return dtypes in ({x.dtype}, {torch.promote_types(x.dtype, torch.float32)})


class Tracking:
    """A pass in which a batch norm updates its own statistics, as in training; this is what to restore after it.

    The layer computes the batch's statistics anyway. Computing them again would be a second pass over every activation,
    which takes half of a training step in a wide network on a GPU.

    Args:
        again: whether this is a checkpoint's second run, whose updates are dropped.
    """

    def __init__(self, layer: Any, pace: float, again: bool = False) -> None:
        self.layer, self.pace, self.again = layer, pace, again
        self.momentum: float | None = layer.momentum
        self.old: dict[str, Any] = {name: layer._buffers.get(name) for name in (*AVERAGES, COUNT)}

    def begin(self) -> None:
        """Let the layer move copies of its averages at the given pace.

        Copies, as an earlier forward pass may still need the averages for its backward pass, and as a pass can fail.
        Apart from the constructor: whoever is stopped in here knows already what there is to undo.
        """
        self.layer._buffers.update({name: self.old[name].clone() for name in AVERAGES})
        # Batches are not counted. A synchronised layer requires a count; on the host it costs no launch.
        self.layer._buffers[COUNT] = torch.zeros(()) if isinstance(self.layer, nn.SyncBatchNorm) else None
        self.layer.__dict__["momentum"] = self.pace

    def undo(self) -> tuple[Tensor, Tensor]:
        """Restore the layer; return the mean and the variance that it moved."""
        mean, var = (self.layer._buffers[name] for name in AVERAGES)
        self.layer._buffers.update(self.old)
        self.layer.__dict__["momentum"] = self.momentum
        return mean, var

    def keep(self, in_place: bool) -> None:
        """Restore the layer except its averages, which have moved if the batch's statistics were finite."""
        mean, var = self.undo()
        # A later training step could not use tensors made in inference mode.
        with torch.inference_mode(False):
            # A NaN or infinite image must not stay in the average for ever. Either may tell of it alone, by the kernel
            # that computed them; 0 · ∞ is NaN.
            sound = torch.add(var, mean, alpha=0) < torch.inf
            for name, moved in zip(AVERAGES, (mean, var), strict=True):
                value = torch.where(sound, moved, self.old[name])
                if in_place:
                    self.old[name].copy_(value)
                else:
                    self.layer._buffers[name] = value


KINDS: tuple[type[nn.Module], ...] = (BatchNorm, InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


MOVING: tuple[Statistics, ...] = ("moving", "domain", "train")
"""Policies that keep statistics which move while the network adapts."""


_BY_BATCH = {"training": True, "track_running_stats": False}


class Norm(Swapped):
    """The policy of one norm layer, and its source state.

    Hooks set the layer's flags during its forward pass only, so that `train()` and `eval()` keep their meaning.
    """

    def __init__(self, name: str, layer: nn.Module, options: Options, frozen: bool, key: Key) -> None:
        super().__init__(name, layer, options.norm_affine and not frozen)
        self.key = key
        tracked = getattr(layer, "running_mean", None) is not None
        wanted: Statistics = "source" if frozen else options.norm_statistics
        self.statistics: Statistics | None = wanted if tracked else None
        self.by_batch = self.statistics == "batch" and isinstance(layer, BatchNorm)
        self.momentum = options.norm_momentum
        self.flags: dict[str, bool] = {}
        self.tracking: Tracking | None = None  # while the layer moves its statistics itself
        self.noisy = False  # whether kept statistics are known to be those of noisy passes
        self.given: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None  # mean and variance for an input
        self.replaced: dict[str, Any] = {}  # the layer's own statistics, while it uses other ones

    def copy(self, copies: dict[int, Tensor]) -> None:
        """Make copies to adapt; an average over the domain starts counting again."""
        super().copy(copies)
        count = self.away.get("num_batches_tracked")
        if self.statistics == "domain" and count is not None:
            count.zero_()

    def exchange(self) -> None:
        """Exchange the layer's tensors and those kept here."""
        self.settle()
        super().exchange()

    # Hooks ------------------------------------------------------------------------------------------------------

    def before(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Apply the policy: use batch statistics, or move the kept ones and use them."""
        if not self.key.enabled or self.statistics is None:
            return None
        if self.flags or self.tracking is not None or self.replaced:
            self.settle()
        x: Tensor = args[0] if args else kwargs["input"]
        if self.given is not None:
            self._use(layer, self.given(x))
            return None
        share = self.key.share
        if share is not None and not share.alike and isinstance(layer, BatchNorm):
            return self._before_on_many(layer, x, args, kwargs, share)
        if self.by_batch and not torch.compiler.is_compiling():
            if x.shape[0] == 1:
                self._refuse_single(x)
            # Inlined `_switch`: a network has many norm layers, and little time for each.
            own = layer.__dict__
            if not own["training"] or own["track_running_stats"]:
                self.flags = {"training": own["training"], "track_running_stats": own["track_running_stats"]}
                own.update(_BY_BATCH)
            return None
        # A domain's average has its own pace; at a pace of 0 there is nothing to compute.
        moves, pace = self.key.once(self._pace) if self.statistics in MOVING else (False, 0.0)
        if self.statistics == "batch":
            self._refuse_single(x)
        # One value per channel has no variance, so "train" uses the kept statistics.
        batch = self.statistics == "batch" or (self.statistics == "train" and moves and x.numel() > x.shape[1])
        tracks = batch and moves and bool(pace) and can_track(layer, x)
        if tracks:
            self.tracking = Tracking(layer, pace, again=self._runs_again())
            self.tracking.begin()
        elif moves and pace:
            self._move(layer, x)
        # Batch statistics are train mode for a batch norm, and "not tracking" for both; tracking off keeps a batch
        # norm from moving its averages by itself.
        self._switch(layer, batch and isinstance(layer, BatchNorm), tracks or not batch)
        return None

    def _before_on_many(
        self, layer: Any, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], share: Share
    ) -> tuple[Any, dict[str, Any]] | None:
        """Apply the policy to a batch norm that sees a part of a batch, whose statistics are those of all parts."""
        moves, pace = self.key.once(self._pace) if self.statistics in MOVING else (False, 0.0)
        batch = self.statistics == "batch" or (self.statistics == "train" and moves)
        found = batch_statistics(x.detach(), share) if batch or (moves and pace) else None
        if moves and pace:
            self._move(layer, x, found)
        if not batch:
            self._switch(layer, False, True)
            return None
        assert found is not None, "batch statistics were taken"
        self._use(layer, (found.mean, found.var))
        x = with_gradient(x, found, layer.eps, share)
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "input": x})

    def after(self, layer: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        """Restore the layer's flags and keep the statistics that it moved; no output means that its pass raised."""
        if self.replaced:
            self.settle()
            return
        if self.by_batch and not torch.compiler.is_compiling():
            if self.flags:
                layer.__dict__.update(self.flags)
                self.flags = {}
            return
        if self.tracking is not None and output is not None and not self.tracking.again:
            self.tracking.keep(in_place=capturing(layer.running_mean))
            self.tracking, self.noisy = None, self.noisy or self.key.noisy
        if self.flags or self.tracking is not None:
            self.settle()

    def _use(self, layer: Any, statistics: tuple[Tensor, Tensor]) -> None:
        """Let the layer normalise one input by other statistics."""
        self.replaced = {name: layer._buffers[name] for name in AVERAGES}
        for (name, own), other in zip(self.replaced.items(), statistics, strict=True):
            layer._buffers[name] = other.to(own.dtype)
        self._switch(layer, False, True)

    def _switch(self, layer: Any, training: bool, track: bool) -> None:
        if layer.training is not training or layer.track_running_stats is not track:
            self.flags = {"training": layer.training, "track_running_stats": layer.track_running_stats}
            _set(layer, {"training": training, "track_running_stats": track})

    def settle(self) -> None:
        """Restore the layer's flags and statistics after a forward pass that raised."""
        if self.flags:
            _set(self.layer, self.flags)
            self.flags = {}
        if self.tracking is not None:
            self.tracking.undo()
            self.tracking = None
        if self.replaced:
            self.layer._buffers.update(self.replaced)
            self.replaced = {}

    def knows_noise(self) -> bool:
        """Return whether the kept statistics come from noisy passes; if unknown, whether they differ from the source's.

        Noise adds to a layer's variance, and behind a rectifier to its mean, and this accumulates over layers, so such
        statistics do not fit the mean network. A ResNet-50 on sketches, σ a tenth of a kernel's, was right for 45 %
        with three draws and for 18 % without noise (benchmarks/noise_statistics.py).
        """
        if not self.noisy:  # not cached, as nobody sees what a compiled step does to statistics
            source, now = self.away["running_mean"], self.layer._buffers["running_mean"]
            assert now is not None, "kept statistics are there"
            self.noisy = source is None or not torch.equal(now, source.to(now))
        return self.noisy

    def _pace(self) -> tuple[bool, float]:
        """Return whether statistics move, and how fast.

        Evaluated when a part of the network first runs: when a checkpoint runs it again, `rest()` is over.
        """
        return self.key.training, 1.0 if self.statistics == "domain" else self.momentum

    def _runs_again(self) -> bool:
        """Return whether a checkpoint runs this part of the network a second time.

        Autograd must save as many tensors as in the first run, so the layer tracks there too.
        """
        first: list[bool] = []
        self.key.once(lambda: first.append(True))
        return not first

    def _refuse_single(self, x: Tensor) -> None:
        if x.numel() // x.shape[1] == 1:
            raise UndriftError(
                f"{self.name} ({type(self.layer).__name__}) got one value per channel (input {tuple(x.shape)}); batch "
                'statistics need at least two. Use a larger batch, or norm_statistics="moving" or "source".'
            )

    def _move(self, layer: Any, x: Tensor, found: BatchStatistics | None = None) -> None:
        """Move the kept statistics towards the batch's (they start at the source's).

        Args:
            found: the batch's, where they are known.
        """
        mean, var, count = self.key.once(lambda: self._moved(layer, x.detach(), found))
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            # A later training step could not use an inference tensor.
            with torch.inference_mode(False):
                mean, var, count = mean.clone(), var.clone(), None if count is None else count.clone()
        moved = {"running_mean": mean, "running_var": var}
        if count is not None:  # not `|`: the compiler of PyTorch 2.6 cannot join dictionaries
            moved["num_batches_tracked"] = count
        captured = capturing(x)
        if not torch.compiler.is_compiling():
            self.noisy = self.noisy or self.key.noisy
        for name, value in moved.items():
            if captured:
                # A CUDA graph reads and writes the same memory at every replay. (Two passes before one backward pass do
                # not work then; autograd raises.)
                layer._buffers[name].copy_(value)
            else:
                # New tensors, as an earlier forward pass may need the old ones for its backward pass.
                setattr(layer, name, value)

    @torch.no_grad()
    def _moved(
        self, layer: Any, x: Tensor, found: BatchStatistics | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        old_mean: Tensor = layer.running_mean
        old_var: Tensor = layer.running_var
        if found is None and x.numel() // x.shape[1] == 1:
            return old_mean, old_var, None  # one value has no variance
        x = x.to(wide(x.dtype))
        positions = tuple(range(2, x.ndim))
        # One pass over the input and few launches, as a network has many such layers.
        if found is not None:
            mean, var = found.mean, found.var * (found.values / (found.values - 1))
        elif isinstance(layer, InstanceNorm):
            share = self.key.share
            each = (part if share is None else share.join(part) for part in torch.var_mean(x, dim=positions))
            var, mean = (part.mean(0) for part in each)
            var = var + 0 * mean  # a mean of means may overflow alone, and 0 · ∞ is NaN
        else:
            var, mean = torch.var_mean(x, dim=(0, *positions))
        # A NaN or infinite image must not stay in the average for ever. Deviations from a mean that is not finite are
        # not finite, so the variance tells of both.
        sound = var < torch.inf
        # Over a domain all batches count equally: the t-th has weight 1/t, the source's statistics none.
        count = layer.num_batches_tracked + 1 if self.statistics == "domain" else None
        pace = self.momentum if count is None else count.reciprocal().to(mean)

        def moved(old: Tensor, new: Tensor) -> Tensor:
            return torch.where(sound, torch.lerp(old.to(new.dtype), new, pace).to(old.dtype), old)

        return moved(old_mean, mean), moved(old_var, var), count


def capturing(x: Tensor) -> bool:
    """Return whether a CUDA graph is being captured here, other than by the compiler."""
    return not torch.compiler.is_compiling() and x.is_cuda and torch.cuda.is_current_stream_capturing()


def _set(layer: Any, flags: dict[str, bool]) -> None:
    if torch.compiler.is_compiling():
        layer.training, layer.track_running_stats = flags["training"], flags["track_running_stats"]
    else:
        # Module's own setter first looks for parameters, buffers and modules of that name; at four calls per layer that
        # took a tenth of a small network's pass.
        layer.__dict__.update(flags)

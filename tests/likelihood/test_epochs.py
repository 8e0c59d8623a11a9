"""SHOT and NRC over epochs, by name: whose features they take before an epoch, and whose in a step with a draw."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift
from offline_support import network
from support import images
from undrift import Step, methods
from undrift.likelihood import Shot

pytestmark = pytest.mark.filterwarnings("ignore:COLLAPSED:undrift.UndriftWarning")  # nobody trained this network
Looked = tuple[Tensor, Tensor]
Batches = Callable[[], Iterator[tuple[Tensor, Tensor]]]
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
LOUD = {"init_fraction": 0.3}  # of the kernel's variance: a draw is no rounding error


def parts_of(name: str, **changes: object) -> tuple[undrift.Perturbed, Any]:
    """Return a network under a method's scheme, and its likelihood."""
    parts = methods.get(name, "adapt").build({})
    roles = {
        option: tuple(p.removeprefix("@") for p in getattr(parts.options, option)) for option in ("frozen", "fast")
    }
    return undrift.perturb(network(), parts.options.replace(**roles, **changes)), parts.likelihood


class Beside:
    """A likelihood that does what another does; tests look at that one before and after."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, logits: Tensor, step: Step) -> Tensor:
        loss: Tensor = self.inner(logits, step)
        return loss

    def refresh(self, model: undrift.Perturbed, batches: Batches) -> None:
        self.inner.refresh(model, batches)


def mean_answers(net: nn.Module, x: Tensor) -> Looked:
    """Return features and softmax by plain PyTorch, in eval mode."""
    with torch.no_grad():
        features = net.bottleneck(net.backbone(x))  # type: ignore[operator]
        return features, net.classifier(features).softmax(1)  # type: ignore[operator]


def with_own_statistics(net: nn.Module, parts: list[Tensor]) -> nn.Module:
    """Return a copy whose norm layers have the mean over these batches' statistics, seen without noise.

    Each batch is normalised by the mean over those up to it, so that deeper layers see what they will see.
    """
    net = copy.deepcopy(net).eval()
    past: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def average(layer: nn.Module, args: tuple[Tensor]) -> None:
        over = [dim for dim in range(args[0].ndim) if dim != 1]
        past.setdefault(layer, []).append(torch.var_mean(args[0], dim=over))
        layer.running_var, layer.running_mean = (torch.stack(of).mean(0) for of in zip(*past[layer], strict=True))

    hooks = [m.register_forward_pre_hook(average) for m in net.modules() if isinstance(m, NORMS)]
    with torch.no_grad():
        for x in parts:
            net(x)
    for hook in hooks:
        hook.remove()
    return net


@pytest.mark.parametrize("name", ["shot", "shot-bn", "vmp-shot", "bbb-shot"])
def test_labels_are_taken_anew_before_each_epoch_and_hold_for_all_its_steps(name: str) -> None:
    used = []

    class Numbered(Beside):
        """Gives every image the number of the epoch as its label."""

        inner: Shot
        taken = 0

        def refresh(self, model: undrift.Perturbed, batches: Batches) -> None:
            super().refresh(model, batches)
            assert self.inner.labels is not None
            assert self.inner.labels.shape == (24,)
            self.taken += 1
            self.inner.labels = torch.full((24,), self.taken)

        def __call__(self, logits: Tensor, step: Step) -> Tensor:
            used.append(self.inner.labels[step.indices].unique().tolist())  # type: ignore[index]
            return super().__call__(logits, step)

    model, shot = parts_of(name)
    asked = Numbered(shot)
    undrift.adapt(model, images(24), asked, epochs=3, batch_size=12)
    assert asked.taken == 3
    assert used == [[1], [1], [2], [2], [3], [3]]


@pytest.mark.parametrize("name", ["shot", "vmp-shot"])
def test_pseudo_labels_are_the_present_mean_networks(name: str) -> None:
    parts = list(images(24).split(12))
    wanted: list[Looked] = []
    found: list[Looked] = []

    class Looking(Beside):
        def refresh(self, model: undrift.Perturbed, batches: Batches) -> None:
            plain = network()
            now = model.net.state_dict()
            plain.load_state_dict({key: now[key] for key in plain.state_dict()})
            # Steps with a draw leave statistics of noisy activations; the mean network is looked at under its own.
            plain = with_own_statistics(plain, parts) if name == "vmp-shot" and wanted else plain.eval()
            wanted.append(mean_answers(plain, images(24)))
            seen: list[Looked] = []
            hook = model.net.classifier.register_forward_hook(  # type: ignore[union-attr]
                lambda _layer, args, output: seen.append((args[0].clone(), output.softmax(1)))
            )
            super().refresh(model, batches)
            hook.remove()
            features, probs = zip(*seen[-2:], strict=True)  # the last look at both batches
            found.append((torch.cat(features), torch.cat(probs)))

    model, shot = parts_of(name, adapt_lr=0.02, **(LOUD if name == "vmp-shot" else {}))
    undrift.adapt(model, parts, Looking(shot), epochs=3)
    assert len(found) == len(wanted) == 3
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected)
    first, *later = found
    assert all(not torch.allclose(features, first[0], atol=1e-3) for features, _ in later)


@pytest.mark.parametrize("draws", [1, 2])
def test_vmp_nrc_fills_its_banks_without_noise_and_writes_each_draw_into_them(draws: int) -> None:
    x = images(24)
    events: list[tuple[str, Tensor, Tensor]] = []

    class Looking(Beside):
        def watch(self, model: undrift.Perturbed) -> AbstractContextManager[None]:
            watching: AbstractContextManager[None] = self.inner.watch(model)
            return watching

        def note(self, kind: str, places: Tensor) -> None:
            banks = self.inner.banks
            events.append((kind, banks.features[places].clone(), banks.probs[places].clone()))

        def refresh(self, model: undrift.Perturbed, batches: Batches) -> None:
            super().refresh(model, batches)
            self.note("filled", torch.arange(24))

        def __call__(self, logits: Tensor, step: Step) -> Tensor:
            loss = super().__call__(logits, step)
            assert step.indices is not None
            self.note("write", step.indices)
            return loss

        def follow(self, model: undrift.Perturbed) -> None:
            self.inner.follow(model)
            self.note("kept", torch.arange(24))

    model, nrc = parts_of("vmp-nrc", train_samples=draws, **LOUD)
    passes: list[Looked] = []
    plain = network().train()

    def passing(_layer: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        if torch.is_grad_enabled():  # a step
            passes.append((args[0].detach(), output.detach().softmax(1)))

    model.net.classifier.register_forward_hook(passing)  # type: ignore[union-attr]
    undrift.adapt(model, [x], Looking(nrc), epochs=1)
    # Once, in eval mode, under the mean network: the source's.
    (_, filled, answers), *events = events
    features, probs = mean_answers(network(), x)
    torch.testing.assert_close((filled, answers), (nn.functional.normalize(features, dim=1), probs))
    # Then the features and answers of the very draw whose loss is asked for, not those of the mean network.
    assert [kind for kind, *_ in events] == ["write"] * draws + ["kept"]
    mean, _ = mean_answers(plain, x)
    for (features, probs), (_, bank, answers) in zip(passes, events[:draws], strict=True):
        torch.testing.assert_close(bank, nn.functional.normalize(features, dim=1))
        torch.testing.assert_close(answers, probs)
        assert not torch.allclose(features.sort(0).values, mean.sort(0).values, atol=0.1)
    # Of several draws the last one stays.
    *_, (_, bank, answers), (_, kept, kept_answers) = events
    torch.testing.assert_close(kept.sort(0).values, bank.sort(0).values)
    torch.testing.assert_close(kept_answers.sort(0).values, answers.sort(0).values)


@pytest.mark.parametrize(
    "name", ["vmp-shot", "vmp-shot:paper", "vmp-shot:released", "vmp-nrc", "vmp-nrc:released", "bbb-shot"]
)
def test_a_bottleneck_learns_ten_times_as_fast(name: str) -> None:
    """What such rates do to a step is in test_optimise.py."""
    history = undrift.adapt(network(), images(24), method=name, epochs=1)
    assert history.model is not None
    options = history.model.options
    assert (options.adapt_lr, options.fast_lr_scale, options.log_var_lr_scale) == (2e-3, 10, 1)
    assert options.fast[0] == "bottleneck"
    assert options.weights_lr is None


@pytest.mark.parametrize("name", ["bbb", "bbb-shot"])
def test_what_a_prior_holds_to_the_source_has_no_weight_decay(name: str) -> None:
    model, _ = parts_of(name)
    assert model.options.weight_decay == 0
    assert model.options.train
    # Nothing is asked, and nothing pulls: means stay where the source has them, and log-variances go to the prior's.
    model.train()
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    undrift.adapt(model, images(24), lambda logits: 0 * logits.sum(), 2, batch_size=12, progress=False)
    moved = {n for n, p in model.named_parameters() if n in before and not torch.equal(p, before[n])}
    assert moved == {n for n in before if n.startswith("noise.")}
    assert all(torch.all(p >= before[n]) for n, p in model.named_parameters() if n in moved)

"""Adaptation over epochs: what it does, what changes and what does not, and wrong arguments."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import undrift
from adapt_support import Labelled, domain, small, source, trained
from support import convnet, images, same, snapshot
from undrift import Step
from undrift.adapt import adapt
from undrift.keep import Keeper
from undrift.likelihood import Consistency, Information, Shot, entropy

# An untrained network on random images may well end up with one answer for all; that is not the matter here.
pytestmark = pytest.mark.filterwarnings("ignore:COLLAPSED:undrift.UndriftWarning")


def accuracy(model: undrift.Perturbed, x: Tensor, y: Tensor) -> float:
    model.eval()
    with model.mean(), torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


@pytest.mark.parametrize("likelihood", [None, entropy, Consistency(base=Information())])
def test_entropy_falls_and_answers_get_better_on_a_shift(likelihood: Any) -> None:
    x, y = domain(256, 2, shifted=True)
    model = undrift.perturb(source(), adapt_lr=1e-2)
    with model.off() as net:
        before = float((net(x).argmax(1) == y).float().mean())
    history = adapt(model, x, likelihood, epochs=4)
    verdict = history.verdict
    assert verdict is not None
    assert verdict.after.entropy < verdict.before.entropy
    assert not verdict.collapsed
    assert verdict.agreement is not None
    assert verdict.stability is not None
    assert verdict.stability > 0.9
    assert accuracy(model, x, y) > before + 0.1
    assert [row.epoch for row in history.epochs] == [1, 2, 3, 4]
    assert set(history.surveys) == {0, 3, 4}
    assert all(row.loss == pytest.approx(row.likelihood + row.kl) for row in history.steps)


def always_the_first(logits: Tensor) -> Tensor:
    return -logits.log_softmax(1)[:, 0].mean()


@pytest.mark.parametrize("options", [{}, {"train": "*"}, {"train": "*", "mean_rank": 2}])
def test_a_safe_run_that_collapses_answers_as_its_source(options: dict[str, Any], tmp_path: Path) -> None:
    x, net = domain(128, 2, shifted=True)[0], source()
    before = undrift.predict(net, x).probs

    def collapsed() -> undrift.History:
        model = undrift.perturb(copy.deepcopy(net), adapt_lr=1.0, kl_weight=0.0, momentum=0.5, **options)
        with pytest.warns(undrift.UndriftWarning, match=r"COLLAPSED[\s\S]*put back[\s\S]*keep=\"last\"") as caught:
            history = adapt(model, x, always_the_first, epochs=12, keep="safe", checkpoint=tmp_path / "c")
        assert caught[0].filename == __file__
        return history

    for history in (collapsed(), collapsed()):  # the second finds a run that is finished
        assert history.verdict is not None
        assert history.model is not None
        assert history.verdict.hurt
        assert history.verdict.put_back
        assert history.kept_epoch == 0
        assert "source network kept; COLLAPSED" in str(history)
        assert torch.equal(undrift.predict(history.model, x).probs, before)
    undrift.save(history.model, tmp_path / "p.safetensors")
    pack = undrift.load(net, tmp_path / "p.safetensors")
    assert torch.equal(undrift.predict(pack, x).probs, before)
    history.save(tmp_path / "h.json")
    assert undrift.History.load(tmp_path / "h.json").verdict == history.verdict


def test_a_safe_run_that_helps_keeps_its_last_epoch() -> None:
    x = domain(256, 2, shifted=True)[0]
    states = []
    for keep in ("last", "safe"):
        model = undrift.perturb(source(), adapt_lr=1e-2, generator=torch.Generator().manual_seed(0))
        history = adapt(model, x, epochs=4, keep=keep, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
        assert history.kept_epoch == 4
        assert history.verdict is not None
        assert not history.verdict.put_back
        states.append(snapshot(model))
    assert same(*states)


def test_a_collapse_is_said_loudly() -> None:
    model = undrift.perturb(source(), adapt_lr=1.0, kl_weight=0.0, momentum=0.5)
    with pytest.warns(undrift.UndriftWarning, match="COLLAPSED") as caught:
        history = adapt(model, domain(128, 2, shifted=True)[0], always_the_first, epochs=12)
    assert caught[0].filename == __file__
    assert history.verdict is not None
    assert history.verdict.collapsed


def test_only_learnables_and_statistics_change_and_flags_come_back() -> None:
    model = undrift.perturb(source())
    model.train()
    model.net[5].eval()
    flags = [m.training for m in model.modules()]
    state = snapshot(model.net)
    seen = []
    model.net[3].register_forward_hook(lambda m, *_: seen.append(m.training))
    adapt(model, images(20), entropy, epochs=2, batch_size=10)
    changed = {k for k, v in model.net.state_dict().items() if not torch.equal(v, state[k])}
    assert changed == {f"{i}.{k}" for i in (1, 5) for k in ("weight", "bias", "running_mean", "running_var")}
    assert [m.training for m in model.modules()] == flags
    assert not any(seen)  # no dropout
    assert all(p.grad is None for p in model.parameters())
    with model.off() as net:
        assert same(net.state_dict(), trained().state_dict())


def test_the_source_is_surveyed_in_eval_mode_where_it_was_perturbed_in_train_mode() -> None:
    net, x = source().append(nn.Dropout(0.9)), images(20)
    modes: list[bool] = []
    net[-1].register_forward_hook(lambda m, *_: modes.append(m.training))
    expected = adapt(undrift.perturb(copy.deepcopy(net).eval()), x, entropy, epochs=1, batch_size=10).surveys[0]
    found = adapt(undrift.perturb(net.train()), x, entropy, epochs=1, batch_size=10).surveys[0]
    assert found == expected
    assert modes
    assert not any(modes)


def test_flags_come_back_after_an_error_inside_a_norm_layer() -> None:
    model = small()
    model.train()
    calls = []

    def failing(_layer: nn.Module, _args: object) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt

    hook = model.net[1].register_forward_pre_hook(failing)
    with pytest.raises(KeyboardInterrupt):
        adapt(model, images(20), entropy, batch_size=10)
    hook.remove()
    model(images())
    assert all(m.training for m in model.modules())
    assert model.net[1].track_running_stats


def test_without_noise_it_is_plain_norm_affine_training() -> None:
    x = images(40)
    model = small(init_fraction=0.0, norm_statistics="source", adapt_lr=0.05)
    plain = copy.deepcopy(model).remove().eval()
    epochs, batch = 3, 16
    adapt(model, x, entropy, epochs, batch_size=batch, generator=torch.Generator().manual_seed(5))

    affine = [p for m in plain for p in m.parameters() if isinstance(m, nn.BatchNorm2d | nn.GroupNorm)]
    optimiser = torch.optim.SGD(affine, lr=0.05, momentum=0.9, weight_decay=1e-3)
    order, steps = torch.Generator().manual_seed(5), 3
    for number in range(epochs * steps):
        if number % steps == 0:
            places = torch.randperm(40, generator=order).split(batch)
        optimiser.param_groups[0]["lr"] = 0.05 * (1 + 10 * (number + 1) / (epochs * steps)) ** -0.75
        optimiser.zero_grad()
        entropy(plain(x[places[number % steps]])).backward()
        optimiser.step()
    assert same(model.net.state_dict(), plain.state_dict())


def test_learning_rates_by_group_and_schedule() -> None:
    model = small(log_var_lr_scale=3.0, fast=("7",))
    seen: list[dict[str, float]] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seen.append({g["name"]: g["lr"] for g in self.param_groups})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim, "SGD", Watched)
        history = adapt(model, images(8), entropy, epochs=2, batch_size=4)
    assert [row.lr for row in history.steps] == pytest.approx([2e-3 * (1 + 10 * k / 4) ** -0.75 for k in (1, 2, 3, 4)])
    assert seen[1]["affine"] == pytest.approx(history.steps[1].lr)
    assert seen[1]["log_var"] == pytest.approx(3 * history.steps[1].lr)
    assert seen[1]["log_var, fast"] == pytest.approx(30 * history.steps[1].lr)


def test_draws_are_averaged_and_move_statistics_once() -> None:
    calls = []

    def counted(logits: Tensor) -> Tensor:
        calls.append(logits.detach())
        return entropy(logits)

    one, three = small(adapt_lr=0.0), small(adapt_lr=0.0, train_samples=3)
    adapt(one, [images(8)], entropy, epochs=1)
    history = adapt(three, [images(8)], counted, epochs=1)
    assert len(calls) == 3
    assert not torch.equal(calls[0], calls[1])
    torch.testing.assert_close(one.net[1].running_mean, three.net[1].running_mean)
    assert history.steps[0].likelihood == pytest.approx(sum(float(entropy(c)) for c in calls) / 3)


def test_the_best_epoch_is_kept_bit_for_bit() -> None:
    states: list[dict[str, Tensor]] = []

    class Worse(Information):
        """Good for two epochs, then all for one class."""

        epoch = 0

        def refresh(self, model: undrift.Perturbed, batches: Any) -> None:
            self.epoch += 1
            states.append(snapshot(model))

        def __call__(self, logits: Tensor, step: Step | None = None) -> Tensor:
            return super().__call__(logits) if self.epoch <= 2 else -50 * logits.log_softmax(1)[:, 0].mean()

    model = undrift.perturb(source(), adapt_lr=1e-2, norm_statistics="moving")
    history = adapt(model, domain(128, 2, shifted=True)[0], Worse(), epochs=4, batch_size=16, keep="best")
    assert history.kept_epoch == 2
    assert history.verdict is not None
    assert history.verdict.after == history.surveys[2]
    assert not history.verdict.collapsed
    kept = {k: v for k, v in snapshot(model).items() if not k.startswith("key.")}
    assert same(kept, {k: v for k, v in states[2].items() if not k.startswith("key.")})  # as the third epoch began
    assert history.surveys[4].diversity < history.surveys[2].diversity


def test_looking_for_the_best_changes_no_training() -> None:
    x = images(24)
    steps = []
    for keep in ("last", "best"):
        model = small()
        torch.manual_seed(5)
        history = adapt(model, DataLoader(Labelled(x), 6, shuffle=True), entropy, 3, keep=keep)  # type: ignore[arg-type]
        steps.append(history.steps)
    assert steps[0] == steps[1]


def test_wrong_arguments_are_named_before_training() -> None:
    model = small()
    state = snapshot(model)
    with pytest.raises(undrift.UndriftError, match=r"model is a Sequential.*undrift\.perturb"):
        adapt(convnet(), images(), Shot())
    wrapped = nn.Module()
    wrapped.module = model
    with pytest.raises(undrift.UndriftError, match=r"model\.module"):
        adapt(wrapped, images())  # type: ignore[arg-type]
    with pytest.raises(undrift.OptionError, match=r"epochs=0.*keep='first'.*checkpoint_steps=5"):
        adapt(model, images(), entropy, 0, keep="first", checkpoint_steps=5)  # type: ignore[arg-type]
    with pytest.raises(undrift.OptionError, match="features='layer9' names no submodule"):
        adapt(model, images(), Shot(features="layer9"))
    with pytest.raises(undrift.DataError, match="there is no folder"):
        adapt(model, images(), entropy, checkpoint="/nowhere/at/all.ckpt")
    with pytest.raises(undrift.UndriftError, match="is off"), model.off():
        adapt(model, images(), entropy)
    with pytest.raises(undrift.UndriftError, match="inference mode"), torch.inference_mode():
        adapt(model, images(), entropy)
    with pytest.raises(undrift.OptionError, match="no gradient"):
        adapt(model, images(), lambda logits: logits.detach().mean())
    assert {k for k, v in snapshot(model).items() if not torch.equal(v, state[k])} <= {"key.step"}
    model.classes = ("cat", "dog")
    with pytest.raises(undrift.OutputError, match="2 class names, its network 5 outputs"):
        adapt(model, images(), entropy)
    model.remove()
    with pytest.raises(undrift.UndriftError, match="was removed"):
        adapt(model, images(), entropy)


def test_a_misspelt_likelihood_does_not_bind_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(undrift.OptionError, match="layer9"):
        adapt(small(), images(), Shot(features="layer9"), 1, checkpoint=tmp_path / "run")
    adapt(small(), images(), Shot(), 1, checkpoint=tmp_path / "run")


class Sometimes:
    """Asks something of every n-th batch only."""

    def __init__(self, every: int) -> None:
        self.every, self.calls = every, 0

    def __call__(self, logits: Tensor, step: Step) -> Tensor | None:
        self.calls += 1
        return entropy(logits) if self.every and self.calls % self.every == 0 else None


def test_a_batch_of_which_nothing_is_asked_makes_no_step_and_is_counted(tmp_path: Path) -> None:
    class Counting(Keeper):
        calls = 0

        def gradients(self, model: undrift.Perturbed) -> None:
            self.calls += 1

    model, keeper = small(), Counting()
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    with pytest.warns(undrift.UndriftWarning, match="asked nothing of any of 4 batches"):
        history = adapt(model, images(24), Sometimes(0), epochs=2, batch_size=12, keepers=[keeper])
    assert (history.steps, history.idle_steps, history.bad_steps, keeper.calls) == ((), 4, 0, 0)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)
    assert not torch.equal(model.net[1].running_mean, torch.zeros(8))  # the images were sound, and statistics saw them
    history = adapt(small(), images(24), Sometimes(2), epochs=2, batch_size=12, keepers=[keeper])
    assert (len(history.steps), history.idle_steps, keeper.calls) == (2, 2, 2)
    assert "2 steps not made: nothing was asked" in str(history)
    history.save(tmp_path / "history.json")
    assert undrift.History.load(tmp_path / "history.json") == history
    older = history.as_dict()
    del older["idle_steps"], older["epochs"]
    assert undrift.History.from_dict(older).idle_steps == 0

"""CoTTA: steps by hand with teacher, anchor and restoration; the order in which they happen."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift
from online_support import batches, close, network, trained, twin
from support import learnables, sources
from undrift import methods
from undrift.keep import Keeper, Restore
from undrift.likelihood import Augment, Cotta


def by_hand(seen: list[Tensor], threshold: float, symmetric: bool) -> tuple[list[Tensor], nn.Module, nn.Module]:
    """Return answers, student and teacher without restoration, 4 views a batch where the anchor is unsure."""
    student = twin(train=True)
    teacher, anchor = copy.deepcopy(student), copy.deepcopy(student)
    augment, answers = Augment(seed=3), []
    optimiser = torch.optim.Adam(trained(student), lr=1e-3)
    for x in seen:
        logits = student(x)
        with torch.no_grad():
            sure = anchor(x).softmax(1).amax(1).mean()
            views = [augment(x) for _ in range(4)] if sure < threshold else [x]
            target = torch.stack([teacher(view) for view in views]).mean(0)
        answers.append(target.softmax(1))
        loss = -(target.softmax(1) * logits.log_softmax(1)).sum(1).mean()
        if symmetric:
            loss = 0.5 * loss - 0.5 * (logits.softmax(1) * target.log_softmax(1)).sum(1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        with torch.no_grad():
            for t, p in zip(teacher.parameters(), student.parameters(), strict=True):
                t.copy_(0.9 * t + 0.1 * p)
    return answers, student, teacher


@pytest.mark.parametrize(("threshold", "symmetric"), [(1.0, False), (0.0, False), (1.0, True)])
def test_cotta_is_three_steps_by_hand_and_answers_with_the_teacher(threshold: float, symmetric: bool) -> None:
    answers, student, teacher = by_hand(batches(), threshold, symmetric)
    settings = {"threshold": threshold, "symmetric": symmetric, "views": 4, "pace": 0.9, "restore": 0.0, "seed": 3}
    going = undrift.stream(network(), batches(), method="cotta", **settings)
    for got, wanted in zip(going, answers, strict=True):
        torch.testing.assert_close(got.probs, wanted)
    close(going.model, student)
    for got, wanted in zip(going.online.likelihood.teacher.weights.values(), teacher.parameters(), strict=True):  # type: ignore[attr-defined]
        torch.testing.assert_close(got, wanted)


def test_the_anchor_decides_once_a_batch_by_its_mean_confidence() -> None:
    (x,) = batches(1)
    sure = float(twin()(x).detach().softmax(1).amax(1).mean())
    for threshold, drawn in ((sure + 1e-6, True), (sure - 1e-6, False)):
        likelihood = Cotta(threshold, 2, seed=0)
        before = likelihood.augment.state_dict()["views"]
        model = undrift.perturb(network(), layers=(), norm_statistics="batch", train="*")
        list(undrift.stream(model, [x], likelihood))
        assert torch.equal(likelihood.augment.state_dict()["views"], before) != drawn
    # However far the network has gone, it is the source's weights that are asked.
    likelihood = Cotta(sure + 1e-6, 1, seed=0)
    model = undrift.perturb(network(), layers=(), norm_statistics="batch", train="*")
    with torch.no_grad():
        model.net[8].weight *= 100  # type: ignore[index, union-attr, operator]
    before = likelihood.augment.state_dict()["views"]
    list(undrift.stream(model, [x], likelihood))
    assert not torch.equal(likelihood.augment.state_dict()["views"], before)


class Order(Keeper):
    """Looks at the teacher after the step, before and after restoration."""

    def __init__(self, likelihood: Cotta) -> None:
        self.likelihood = likelihood
        self.seen: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

    def after(self, model: undrift.Perturbed, loss: float) -> None:
        teacher = {n: t.clone() for n, t in self.likelihood.teacher.weights.items()}
        self.seen.append((teacher, {n: p.detach().clone() for n, p in learnables(model).items()}))


def test_the_teacher_sees_the_student_before_it_is_restored() -> None:
    likelihood = Cotta(1.0, 2, pace=0.5, seed=0)  # with views: else student and teacher agree, and nothing moves
    first, second = Order(likelihood), Order(likelihood)
    model = undrift.perturb(network(), layers=(), norm_statistics="batch", train="*")
    source = {n: s.clone() for n, s in sources(model).items()}
    list(undrift.stream(model, batches(1), likelihood, lr=0.01, keepers=[first, Restore(0.5, seed=0), second]))
    (teacher, student), (later, restored) = first.seen[0], second.seen[0]
    assert max(float((student[n] - source[n]).abs().max()) for n in teacher) > 1e-4
    back = 0
    for name, t in teacher.items():
        torch.testing.assert_close(t, 0.5 * source[name] + 0.5 * student[name])
        assert torch.equal(t, later[name])
        # Element by element: the source's value or the student's.
        chosen = restored[name] == source[name]
        assert torch.equal(restored[name], torch.where(chosen, source[name], student[name]))
        back += int(chosen.sum())
    total = sum(t.numel() for t in teacher.values())
    assert 0.4 < back / total < 0.6


def test_restoration_is_a_fresh_choice_each_time_with_the_given_chance() -> None:
    model = undrift.perturb(nn.Sequential(nn.Linear(200, 100), nn.LayerNorm(100)), layers=(), train="*")
    keeper = Restore(0.01, seed=0)
    masks = []
    for _ in range(2):
        with torch.no_grad():
            for p in learnables(model).values():
                p += 1
        keeper.after(model, 0.0)
        weight = learnables(model)["net.0.weight"]
        masks.append(weight == sources(model)["net.0.weight"])
    assert [round(float(m.double().mean()), 3) for m in masks] == pytest.approx([0.01, 0.01], abs=0.003)
    assert not torch.equal(*masks)
    assert float((masks[0] & masks[1]).double().mean()) < 0.001
    with pytest.raises(undrift.OptionError, match="restore=1"):
        Restore(1.0)


def test_a_step_that_is_not_made_moves_no_teacher() -> None:
    class Broken(Cotta):
        def __call__(self, logits: Tensor, step: undrift.Step) -> Tensor:
            return super().__call__(logits, step) * float("nan")

    likelihood = Broken(0.0, seed=0)
    model = undrift.perturb(network(), layers=(), norm_statistics="batch", train="*")
    s = undrift.stream(model, batches(2), likelihood)
    list(s)
    assert s.report.steps == 0
    assert all(torch.equal(t, sources(model)[n]) for n, t in likelihood.teacher.weights.items())


def test_the_authors_values() -> None:
    parts = methods.get("cotta").build({})
    assert (parts.likelihood.threshold, parts.likelihood.views, parts.likelihood.pace) == (0.92, 32, 0.999)
    assert parts.keepers[0].restore == 0.01  # type: ignore[attr-defined]
    assert methods.get("cotta:cifar100").build({}).likelihood.threshold == 0.72
    parts = methods.get("cotta:imagenet").build({})
    assert (parts.likelihood.threshold, parts.likelihood.symmetric) == (0.1, True)
    assert parts.keepers[0].restore == 0.001  # type: ignore[attr-defined]
    assert (parts.options.stream_optimiser, parts.options.stream_lr, parts.options.nesterov) == ("sgd", 0.01, True)
    with pytest.raises(undrift.OptionError, match="views=0"):
        Cotta(views=0)


def test_after_the_stream_the_model_is_the_student_and_the_teacher_can_be_deployed(tmp_path: Path) -> None:
    (x,) = batches(1)
    going = undrift.stream(network(), batches() * 2, method="cotta", threshold=0.0, pace=0.5, seed=0, stream_lr=0.01)
    list(going)
    model, likelihood = going.model, going.online.likelihood
    assert isinstance(likelihood, Cotta)
    student = {n: p.detach().clone() for n, p in learnables(model).items()}
    left = undrift.predict(model, x).probs
    with likelihood.deployed(model) as answering:
        assert answering is model
        assert all(torch.equal(p, likelihood.teacher.weights[n]) for n, p in learnables(model).items())
        theirs = undrift.predict(model, x).probs
        undrift.save(model, tmp_path / "teacher.safetensors")
    assert not torch.equal(left, theirs)
    assert all(torch.equal(p, student[n]) for n, p in learnables(model).items())
    assert torch.equal(undrift.predict(model, x).probs, left)
    with pytest.raises(ZeroDivisionError), likelihood.deployed(model):
        raise ZeroDivisionError
    assert torch.equal(undrift.predict(model, x).probs, left)
    # The next answer of the stream would be that of the network that was saved.
    state = going.state_dict()
    again = undrift.load(going.remove(), tmp_path / "teacher.safetensors")
    assert torch.equal(undrift.predict(again, x).probs, theirs)
    assert torch.equal(undrift.predict(again, x).probs, _next_answer(state, x))


def _next_answer(state: dict[str, Any], x: Tensor) -> Tensor:
    going = undrift.stream(network(), [x], method="cotta", threshold=0.0, pace=0.5, seed=0, stream_lr=0.01)
    going.load_state_dict(state)
    return next(going).probs


def test_before_the_first_step_the_network_itself_is_deployed() -> None:
    going = undrift.stream(network(), batches(), method="cotta")
    before = {n: p.detach().clone() for n, p in learnables(going.model).items()}
    with going.online.likelihood.deployed(going.model):  # type: ignore[attr-defined]
        assert all(torch.equal(p, before[n]) for n, p in learnables(going.model).items())

"""Three settings, one report; labels are scored against and never shown."""

import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MultilabelAveragePrecision,
)

import undrift
from support import convnet, images, same, snapshot
from undrift import Prediction, evaluate, join, predict, stream
from undrift.evaluate import evaluate_continual, evaluate_generalized
from undrift.images import TensorDomain

Batches = list[tuple[Tensor, Tensor]]


def labelled(seed: int, batches: int = 3, size: int = 6) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    return [(images(size, seed + i), torch.randint(5, (size,), generator=generator)) for i in range(batches)]


def both(data: Batches) -> tuple[Tensor, Tensor]:
    return torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])


def test_offline_is_the_metrics_of_predict() -> None:
    model = undrift.perturb(convnet())
    data = labelled(0)
    x, y = both(data)
    found = evaluate(model, data, samples=0, temperature=2.0).results[0]
    probs = predict(model, x, samples=0, temperature=2.0).probs
    assert found.domain == "target"
    right, (confidence, _) = probs.argmax(1) == y, probs.max(1)
    assert found.scores.accuracy == pytest.approx(float(right.float().mean()))
    assert found.scores.nll == pytest.approx(float(F.nll_loss(probs.log(), y)), rel=1e-5)
    assert found.scores.brier == pytest.approx(float((probs - F.one_hot(y, 5)).square().sum(1).mean()), rel=1e-5)
    bins = [(confidence > i / 15) & (confidence <= (i + 1) / 15) for i in range(15)]
    gaps = [float((right[b].float() - confidence[b]).sum().abs()) for b in bins]
    assert found.scores.ece == pytest.approx(sum(gaps) / len(y), rel=1e-4)
    wrong = (~right[confidence.argsort(descending=True)]).double().cumsum(0)
    risks = wrong / torch.arange(1, len(y) + 1)
    assert found.scores.aurc == pytest.approx(float(risks.mean()))
    assert found.scores.augrc == pytest.approx(float(wrong.mean()) / len(y))
    assert len(found.risks) == 50  # at every fiftieth of the images, which are 18 here
    assert found.risks[-1] == pytest.approx(float(risks[-1]))
    assert set(found.risks) <= set(risks.tolist())


def test_metrics_of_torchmetrics_are_columns(tmp_path: Path) -> None:
    net, data = convnet(), {"north": labelled(0), "south": labelled(5)}
    f1, accuracy = MulticlassF1Score(5), MulticlassAccuracy(5, average=None)
    report = evaluate(net, data, metrics={"F1": f1, "by class": accuracy})
    for name, result in zip(data, report.results, strict=True):
        x, y = both(data[name])
        answers = predict(net, x).label
        assert result.metrics["F1"] == pytest.approx(float(MulticlassF1Score(5)(answers, y)))
        assert len(result.metrics["by class"]) == 5  # type: ignore[arg-type]
    header, *_, mean = str(report).splitlines()
    assert header.endswith("AURC × 100     F1")
    assert mean.endswith(f"{report.summary['F1']:.3f}")
    report.save(tmp_path / "report.json")
    assert undrift.Report.load(tmp_path / "report.json") == report
    both_of_them = evaluate(net, data["north"], metrics=MetricCollection([f1, MulticlassAccuracy(5)]))
    assert both_of_them.results[0].metrics.keys() == {"MulticlassF1Score", "MulticlassAccuracy"}


def test_metrics_see_the_probability_of_each_label() -> None:
    net, x, y = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), torch.rand(8, 3, 2, 2), torch.randint(2, (8, 3))
    model = undrift.perturb(net, outputs="sigmoid")
    (found,) = evaluate(model, [(x, y)], metrics=[MultilabelAveragePrecision(3)], samples=0).results
    with model.off():
        known = MultilabelAveragePrecision(3)(net(x).sigmoid(), y)
    assert found.metrics["MultilabelAveragePrecision"] == pytest.approx(float(known))


@pytest.mark.parametrize(
    ("metrics", "fact"),
    [
        ([MulticlassF1Score], "is a class or has no update"),
        ([F.nll_loss], "metric 'function' .*needed: update"),
        ([MulticlassF1Score(5), MulticlassF1Score(5, average="micro")], "two metrics are called 'MulticlassF1Score'"),
        ([MulticlassConfusionMatrix(5)], r"a tensor of shape \(5, 5\)"),
    ],
)
def test_what_is_no_metric_is_named(metrics: Any, fact: str) -> None:
    with pytest.raises(undrift.OptionError, match=fact):
        evaluate(convnet(), labelled(0), metrics=metrics)


def test_draws_are_reproducible_and_differ_from_batch_to_batch() -> None:
    model = undrift.perturb(convnet(), init_fraction=0.2)
    data = [labelled(0)[0]] * 2
    a, b = (evaluate(model, data, samples=2, generator=3) for _ in range(2))
    assert a == b
    once = evaluate(model, data[:1], samples=2, generator=3)
    assert a.results[0].scores.nll != once.results[0].scores.nll


def test_the_network_is_left_as_it_was() -> None:
    model = undrift.perturb(convnet())
    model.train()
    before = snapshot(model.net)
    evaluate(model, labelled(0))
    assert same(model.net.state_dict(), before)
    assert all(m.training for m in model.modules())


def test_plain_networks_and_several_domains() -> None:
    net = convnet().eval()
    report = evaluate(net, {"clinic A": labelled(0), "clinic B": labelled(9, 2)})
    assert [r.domain for r in report.results] == ["clinic A", "clinic B"]
    assert [r.scores.count for r in report.results] == [18, 12]
    mean = sum(r.scores.error for r in report.results) / 2
    assert report.summary["error"] == pytest.approx(mean)
    model = undrift.perturb(net)
    with model.off():
        assert evaluate(net, labelled(0)).results[0].scores == report.results[0].scores


def test_generalized_has_both_harmonic_means() -> None:
    reports = []
    for i, task in enumerate(("A → B", "A → C")):
        model = undrift.perturb(convnet())
        reports.append(evaluate_generalized(model, labelled(i), labelled(i + 5), task=task, samples=0))
    report = join(reports)
    source = [r.scores.accuracy for r in report.of("source")]
    target = [r.scores.accuracy for r in report.of("target")]
    each = [statistics.harmonic_mean(pair) for pair in zip(source, target, strict=True)]
    assert [report.harmonic(t) for t in report.tasks] == pytest.approx(each)
    assert report.summary["mean_of_harmonics"] == pytest.approx(sum(each) / 2)
    assert report.summary["harmonic_of_means"] == pytest.approx(
        statistics.harmonic_mean([sum(source) / 2, sum(target) / 2])
    )
    assert report.summary["source_accuracy"] == pytest.approx(sum(source) / 2)


def test_continual_scores_the_stream_and_what_it_forgot() -> None:
    model = undrift.perturb(convnet(), layers=(), test_samples=0)
    domains = {"noise": labelled(0), "fog": labelled(5, size=4)}
    clean = labelled(20)
    seen: list[Any] = []

    def answer(batches: Iterator[Tensor]) -> Iterable[Prediction]:
        def watched() -> Iterator[Tensor]:
            for batch in batches:
                seen.append(batch)
                yield batch

        return stream(model, watched(), lr=0.05)

    with model.off() as net:
        expected = evaluate(net, clean).results[0].scores
    report = evaluate_continual(model, domains, answer, source=clean)
    assert all(isinstance(batch, Tensor) for batch in seen)
    assert [(r.domain, r.role) for r in report.results] == [
        ("source", "source before"),
        ("noise", "target"),
        ("fog", "target"),
        ("source", "source"),
    ]
    assert report.of("source before")[0].scores == expected
    assert [r.scores.count for r in report.of("target")] == [18, 12]
    after = evaluate(model, clean).results[0].scores
    assert report.of("source")[0].scores == after
    assert report.summary["forgetting"] == pytest.approx(after.error - expected.error)


def test_continual_on_a_plain_network() -> None:
    net = convnet()
    report = evaluate_continual(net, {"a": labelled(0)}, lambda xs: (predict(net, x) for x in xs), source=labelled(4))
    assert report.summary["forgetting"] == 0
    expected = evaluate(net, labelled(0)).results[0].scores
    assert report.of("target")[0].scores == expected
    bare = evaluate_continual(net, {"a": labelled(0)}, lambda xs: (predict(net, x) for x in xs))
    assert "forgetting" not in bare.summary


def test_an_answerer_that_does_not_keep_step_is_named() -> None:
    net = convnet()
    whole = predict(net, images(4))

    def run(answers: Any) -> None:
        evaluate_continual(net, {"fog": labelled(0, 2)}, answers)

    with pytest.raises(undrift.DataError, match=r"answer 1 \(fog\) is for 4 images, the batch has 6"):
        run(lambda xs: (whole for _ in xs))
    with pytest.raises(undrift.DataError, match="2 batches of fog got no answer"):
        run(lambda xs: [None for _ in xs] and [])
    with pytest.raises(undrift.DataError, match="answer 1 came without a batch"):
        run(lambda _: [whole])


def test_images_that_are_nan_count_as_wrong() -> None:
    data = labelled(0, 1)
    data[0][0][2] = float("nan")
    scores = evaluate(undrift.perturb(convnet()), data).results[0].scores
    assert (scores.count, scores.unanswered) == (6, 1)


@pytest.mark.parametrize("key", ["label", "labels", "target", "y"])
def test_labels_in_dicts(key: str) -> None:
    x, y = labelled(0)[0]
    assert evaluate(convnet(), [{"image": x, key: y}]).results[0].scores.count == 6


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ([images()], r"yields a Tensor.*\(images, labels\)"),
        ([(images(),)], "yields a tuple"),
        ([(images(), ["a.png"] * 6)], "no tensor of labels"),
        ([{"image": images(), "name": 3}], r"dicts with 'image', 'name'"),
        ([(images(), torch.full((6,), 7))], r"7 to 7.*5 classes"),
        ([(images(), torch.eye(6))], "one-hot"),
        ([], "no images were scored"),
        ((images(), torch.arange(6) % 5), r"a single batch in a list: \[\(images, labels\)\]"),
        (images(), r"are a Tensor; needed: a loader of \(images, labels\).*in a list"),
        (None, "are a NoneType; needed: a loader"),
        ({}, "no domains"),
    ],
)
def test_loaders_without_proper_labels_get_three_facts(data: Any, match: str) -> None:
    with pytest.raises(undrift.DataError, match=match):
        evaluate(convnet(), data)


def test_class_names_that_do_not_match_the_outputs() -> None:
    model = undrift.perturb(convnet(), classes=["cat", "dog"])
    with pytest.raises(undrift.OutputError, match=r"2 class names, its network 5 outputs"):
        evaluate(model, labelled(0))


def test_a_loader_that_raises_leaves_the_network_alone() -> None:
    def broken() -> Iterator[tuple[Tensor, Tensor]]:
        yield labelled(0)[0]
        raise OSError("disk gone")

    model = undrift.perturb(convnet())
    before = snapshot(model.net)
    with pytest.raises(OSError, match="disk gone"):
        evaluate(model, broken())
    assert same(model.net.state_dict(), before)


def test_outputs_of_other_shapes_are_refused() -> None:
    with pytest.raises(undrift.DataError, match="one per position"):
        evaluate(nn.Conv2d(3, 4, 3), labelled(0))


def test_every_setting_takes_domains() -> None:
    model = undrift.perturb(convnet())
    pixels, labels = torch.randint(256, (12, 3, 8, 8), dtype=torch.uint8), torch.randint(5, (12,))
    domain = TensorDomain("some", pixels, labels, tuple("abcde"))
    loader = list(domain.batches(100))
    given = {"samples": 0}
    assert evaluate(model, domain, **given) == evaluate(model, loader, **given)
    assert evaluate_generalized(model, domain, domain, **given) == evaluate_generalized(model, loader, loader, **given)

    def ask(stream_of_images: Iterator[Tensor]) -> Iterator[Prediction]:
        return (predict(model, x, samples=0) for x in stream_of_images)

    found = [evaluate_continual(model, {"a": d}, ask, source=d, **given) for d in (domain, loader)]
    assert found[0] == found[1]


def test_a_warning_of_the_mean_network_names_the_callers_line() -> None:
    data = labelled(0)
    for call in (
        lambda model: evaluate(model, data, samples=0),
        lambda model: evaluate_generalized(model, data, data, samples=0),
        lambda model: evaluate_continual(model, {"a": data}, lambda x: stream(model, x), source=data, samples=0),
    ):
        model = undrift.perturb(convnet(), init_fraction=0.2)
        model(images())
        with pytest.warns(undrift.UndriftWarning, match="kept from passes with noise") as found:
            call(model)
        assert [w.filename for w in found] == [__file__]

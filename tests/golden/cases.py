"""Every method and every verb on tiny networks, as cases by name; each gives a few numbers.

In tests/, `python -m golden.cases` compares with numbers.json, and `python -m golden.cases --write` writes it anew:
only where numbers are meant to change, and the commit says why. `--rel 1e-4` shows what is not stable, with other
numbers of threads (OMP_NUM_THREADS) and other instructions (ATEN_CPU_CAPABILITY=default).
"""

import argparse
import json
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import undrift
from golden import parts
from golden.parts import Numbers, seed

FILE = Path(__file__).with_name("numbers.json")
REL, ABS = 1e-3, 1e-6
Case = Callable[[], Numbers]
ADAPT = {"epochs": 2, "batch_size": 16}
NETWORKS: dict[str, Callable[[], nn.Module]] = {"conv": parts.convolutional, "tokens": parts.tokens}
# What no method needs but these: a seed of their own, or a part of source training.
SETTINGS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "eata": lambda _net: {"source": parts.domain(False)[0], "fisher_batch": 16},
    "cotta": lambda _net: {"seed": 3, "views": 2},
    "roid": lambda _net: {"seed": 3},
    "vmp-roid": lambda _net: {"seed": 3},
    "bacs": lambda net: {"posterior": parts.posterior(net), "posterior_weight": 0.01},
    "ttt": lambda _net: {"head": parts.RotationHead(), "views": 4, "seed": 3},
}
# Beside each method and variant as it is: settings that show more of it.
MORE: dict[str, dict[str, Any]] = {
    "adapt/norm-stats/moving": {"norm_statistics": "moving", "norm_momentum": 0.5},
    "adapt/tent/adapt_lr": {"adapt_lr": 0.03},
    "adapt/shot/features": {"features": "layer4", "beta": 1.0, "class_prior": (0.1, 0.2, 0.3, 0.2, 0.2)},
    "adapt/shot/keep=best": {"keep": "best"},
    "adapt/vmp/drawn": {"estimator": "drawn", "adapt_lr": 0.02},
    "adapt/vmp-shot/adapt_lr": {"adapt_lr": 0.02},
    "adapt/nrc/one epoch": {"epochs": 1, "neighbours": 4, "second_neighbours": 3, "one_sided": 0.5},
    "adapt/bacs/untrained": {"posterior": None, "posterior_weight": 0.01},
    "adapt/hcl/stay": {"epochs": 3, "stay": 0.5, "instance_weight": 0.5},
    "stream/tent/stream_lr": {"stream_lr": 0.03},
    "stream/bbb/stream_lr": {"stream_lr": 0.003},
    "stream/eta/margin": {"margin": 0.9, "redundancy": 0.9, "stream_lr": 0.01},
    "stream/eata/beta": {"margin": 0.9, "redundancy": 0.9, "stream_lr": 0.01, "beta": 100.0},
    "stream/sar/margin": {"margin": 0.9, "stream_lr": 0.1},
    "stream/sar/recover_below": {"margin": 0.9, "recover_below": 2.0},
    "stream/cotta/restore": {"threshold": 1.0, "restore": 0.3, "symmetric": True, "stream_lr": 0.01},
    "stream/cotta/views": {"threshold": 1.0, "pace": 0.5, "stream_lr": 0.01},
    "stream/roid/stream_lr": {"stream_lr": 0.01, "ensemble": 0.5},
    "stream/vmp-roid/stream_lr": {"stream_lr": 0.01, "ensemble": 0.5},
    "stream/ttt/stream_lr": {"stream_lr": 0.05},
    "stream/ttt/untrained": {"head": None},
    "stream/bacs/posterior_weight": {"posterior_weight": 1.0, "stream_lr": 0.003},
    "stream/vmp/gather": {"gather": 24},
    "stream/tent/gather": {"gather": 24, "stream_lr": 0.01},
    "stream/tent/gather balanced": {"gather": 24, "balanced": True, "stream_lr": 0.01},
    "stream/tent/guard": {"guard": True, "stream_lr": 0.05},
    "stream/undrift/gather": {"gather": 8},
    "stream/undrift/batch statistics": {"prior_images": 0, "guard": False},
    "stream/undrift-light/batch statistics": {"prior_images": 0, "guard": False},
    "stream/cotta/gather": {"gather": 24, "stream_lr": 0.01},
}
ON_TOKENS = (
    "tent",
    "shot",
    "vmp",
    "vmp:released",
    "bbb",
    "nrc",
    "aad",
    "hcl",
    "eta",
    "sar",
    "cotta",
    "roid",
    "vmp-roid",
)


def by_method(loop: str, name: str, network: str = "conv", masks: bool = True, **changes: Any) -> Numbers:
    """Return the numbers of one method, as its authors have it or with settings changed."""
    plain = name.partition(":")[0]
    net = NETWORKS[network]()
    if plain == "gsfda" and masks:
        net = parts.with_masks(net)
    start = {key: value.clone() for key, value in net.state_dict().items()}
    given = SETTINGS.get(plain, lambda _net: {})(net) | changes
    if loop == "adapt" and plain.startswith("undrift"):
        given["least_agreement"] = 0.0  # a network that has learned nothing would learn nothing from itself
    if loop == "stream":
        going = undrift.stream(net, parts.batches(), method=name, generator=seed(), **given)
        out = parts.of_stream(going, start)
        model = going.model
    else:
        history = undrift.adapt(net, parts.target(), method=name, generator=seed(), **(ADAPT | given))
        assert history.model is not None
        model = history.model
        out = parts.of_history(history) | parts.of_model(model, start)
    return out | parts.after(model)


def methods() -> Iterator[tuple[str, Case]]:
    """Yield every method and variant in every loop it runs in."""
    for loop in ("adapt", "stream"):
        names = undrift.methods.names(loop)  # type: ignore[arg-type]
        for name in names:
            for full in (name, *(f"{name}:{variant}" for variant in parts.variants(name))):
                yield f"{loop}/{full}", partial(by_method, loop, full)
        for name in ON_TOKENS:
            if name.partition(":")[0] in names:
                # At their own rates these collapse here, and a collapse is no number to keep.
                slow = (
                    {"adapt_lr": {"aad": 1e-5, "bbb": 1e-4}[name]} if loop == "adapt" and name in ("aad", "bbb") else {}
                )
                yield f"{loop}/{name}/on tokens", partial(by_method, loop, name, "tokens", **slow)
    for case, changes in MORE.items():
        loop, name, _ = case.split("/")
        yield case, partial(by_method, loop, name, **changes)
    yield "adapt/gsfda/random masks", partial(by_method, "adapt", "gsfda", masks=False)


def noisy(network: str, sharings: bool, **options: Any) -> Numbers:
    """Return two noisy passes, the mean network's, the KL, and the gradients of a step's loss."""
    out: Numbers = {}
    choices = ("kernel", "weight") if sharings else (None,)
    for conv, linear in product(choices, choices):
        shared = {} if conv is None else {"conv_sharing": conv, "linear_sharing": linear}
        label = "" if conv is None else f"{conv},{linear}."
        model = undrift.perturb(NETWORKS[network](), generator=seed(1), **shared, **options)
        images = parts.target()[:16]
        with torch.no_grad():
            one, two = model(images), model(images)
            with model.mean():
                mean = model(images)
        out |= parts.of_tensor(one.softmax(1), f"{label}one.") | {f"{label}two": parts.checksum(two)}
        out |= {f"{label}noise": float((one - mean).double().norm()), f"{label}draws": float((one - two).norm())}
        if not sharings or conv == linear:
            out |= of_loss(model, label)
    return out


def of_loss(model: undrift.Perturbed, label: str = "") -> Numbers:
    """Return the KL in all its forms, a step's loss, and the size of its gradients."""
    images = parts.target()[16:32]
    divergence = {how: undrift.kl(model, how) for how in ("mean", "sum")}  # type: ignore[arg-type]
    out: Numbers = {f"{label}kl.{how}": value.item() for how, value in divergence.items()}
    out[f"{label}kl_term"] = undrift.kl_term(model, 1000).item()
    undrift.kl_term(model, 1000).backward()
    found = parts.log_vars(model)
    for number, values in enumerate(found):
        assert values.grad is not None
        out[f"{label}kl gradient.{number}"] = float(values.grad.double().norm())
        values.grad = None
    loss = undrift.step_loss(model, images, 1000)
    loss.backward()
    out[f"{label}step_loss"] = loss.item()
    for number, values in enumerate(found):
        assert values.grad is not None
        out[f"{label}gradient.{number}"] = float(values.grad.double().norm())
    rest = [p.grad.double().norm() for p in model.parameters() if p.grad is not None and all(p is not v for v in found)]
    out[f"{label}gradient.others"] = float(torch.stack(rest).norm())
    model.zero_grad()
    return out


def perturbing() -> Iterator[tuple[str, Case]]:
    """Yield presets × estimators × energies, and each other option that changes a noisy pass."""
    for preset, energy in product(("paper", "released"), ("square", "offset", "centred")):
        same = {"options": preset, "energy": energy, "first_energy": energy}
        yield f"perturb/{preset}/local/{energy}", partial(noisy, "conv", True, **same)
    for preset in ("paper", "released"):
        yield f"perturb/{preset}/drawn", partial(noisy, "conv", True, options=preset, estimator="drawn")
        yield f"perturb/{preset}/tokens", partial(noisy, "tokens", True, options=preset)
        yield f"perturb/{preset}/tokens drawn", partial(noisy, "tokens", True, options=preset, estimator="drawn")
    for changes in (
        *({"norm_statistics": how} for how in ("source", "batch", "moving", "domain", "train")),
        {"norm_affine": False, "norm_momentum": 0.3},
        {"prior": "isotropic", "prior_scale": 0.02},
        {"init": "prior", "prior_scale": 0.05},
        {"init_fraction": 0.1, "init_offset": 0.001},
        {"exclude": ("fc",), "frozen": ("layer4",)},
        {"types": ("conv",)},
        {"first": 2},
        {"last": 2},
        {"skip_first": 1, "skip_last": 1},
        {"train": ("bottleneck", "fc")},
        {"kl_reduction": "mean", "kl_weight": 0.3},
    ):
        name = ",".join(f"{key}={value}" for key, value in changes.items())
        if changes.get("norm_affine") is False:
            changes = changes | {"train": ("fc",)}
        yield f"perturb/{name}", partial(noisy, "conv", False, **changes)


def asked(likelihood: Callable[[], Any], network: str = "conv", **options: Any) -> Numbers:
    """Return the numbers of an adaptation of a perturbed network that is asked something."""
    net = NETWORKS[network]()
    start = {key: value.clone() for key, value in net.state_dict().items()}
    model = undrift.perturb(net, generator=seed(1), **({"adapt_lr": 0.02} | options))
    history = undrift.adapt(model, parts.target(), likelihood=likelihood(), generator=seed(), **ADAPT)
    return parts.of_history(history) | parts.of_model(model, start) | parts.after(model) | of_loss(model)


def confidence(logits: Tensor) -> Tensor:
    """Ask for a larger maximum: a likelihood of one's own."""
    return -logits.log_softmax(1).amax(1).mean()


LIKELIHOODS: dict[str, Callable[[], Any]] = {
    "shot": undrift.Shot,
    "information": undrift.Information,
    "information with a prior": lambda: undrift.Information((0.1, 0.2, 0.3, 0.2, 0.2)),
    "consistency": undrift.Consistency,
    "consistency and shot": lambda: undrift.Consistency(0.5, undrift.Shot()),
    "entropy": lambda: undrift.entropy,
    "one's own": lambda: confidence,
}


def following(likelihood: Callable[[], Any] = lambda: undrift.entropy, **settings: Any) -> Numbers:
    """Return the numbers of a stream of a perturbed network; settings of `stream` and options of `perturb` alike."""
    loop = {key: settings.pop(key) for key in list(settings) if key in ("gather", "balanced", "guard", "episodic")}
    answer, network, rate = settings.pop("how", None), settings.pop("network", "conv"), settings.pop("rate", 0.01)
    net = NETWORKS[network]()
    start = {key: value.clone() for key, value in net.state_dict().items()}
    model = undrift.perturb(net, generator=seed(1), **settings)
    going = undrift.stream(model, parts.batches(), likelihood(), lr=rate, answer=answer, **loop)
    out = parts.of_stream(going, start)
    return out | parts.after(model)


def zero(logits: Tensor) -> Tensor:
    """Ask for the class 0, whatever is seen: a collapse, for the guard."""
    return -logits.log_softmax(1)[:, 0].mean()


STREAMS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "gather": {"gather": 24},
    "gather, answer=before": {"gather": 24, "how": "before"},
    "gather balanced": {"gather": 24, "balanced": True},
    "guard": {"guard": True, "stream_optimiser": "sgd", "momentum": 0.0},
    "guard, collapsing": {"guard": True, "likelihood": lambda: zero, "stream_steps": 6, "rate": 0.05},
    "episodic": {"episodic": True},
    "train_samples=0": {"train_samples": 0},
    "train_samples=1": {"train_samples": 1},
    "train_samples=3": {"train_samples": 3},
    "answer=before": {"how": "before"},
    "answer=after": {"how": "after"},
    "answer=samples": {"how": "samples", "test_samples": 3},
    "answer=before, train_samples=3": {"how": "before", "train_samples": 3},
    "test_samples=0": {"test_samples": 0},
    "climb": {"climb": 0.05},
    "stream_steps=2": {"stream_steps": 2},
    "stream_split=4": {"stream_split": 4},
    "released": {"options": "released"},
    "drawn": {"estimator": "drawn"},
    "sgd": {"stream_optimiser": "sgd", "nesterov": True, "log_var_lr_scale": 5.0},
    "fast": {"fast": ("bottleneck",), "fast_lr_scale": 3.0, "train": ("bottleneck",)},
    **{f"norm_statistics={how}": {"norm_statistics": how} for how in ("source", "batch", "moving", "domain")},
    "stream_norm_momentum": {"stream_norm_momentum": 0.4},
    "information": {"likelihood": undrift.Information},
    "consistency": {"likelihood": lambda: undrift.Consistency(1.0, undrift.entropy)},
    "on tokens": {"network": "tokens"},
}


def adapted(network: str = "conv", **options: Any) -> undrift.Perturbed:
    """Return a perturbed network that a stream has left, so that nothing of it is as it began."""
    model = undrift.perturb(NETWORKS[network](), generator=seed(1), **({"init_fraction": 0.05} | options))
    for _ in undrift.stream(model, parts.batches(), lr=0.02):
        pass
    return model


def predicting(settings: dict[str, Any], network: str = "conv", **options: Any) -> Numbers:
    """Return the numbers of a prediction with a seed."""
    return parts.of_prediction(undrift.predict(adapted(network, **options), parts.target(), generator=5, **settings))


def predictions() -> Iterator[tuple[str, Case]]:
    """Yield predictions in both modes, with several numbers of draws, and at a temperature."""
    for mode, samples in product(("full", "fast"), (0, 1, 3, 10)):
        yield f"predict/{mode}/{samples}", partial(predicting, {"mode": mode, "samples": samples})
        yield (
            f"predict/{mode}/{samples}/T=2.5",
            partial(predicting, {"mode": mode, "samples": samples, "temperature": 2.5}),
        )
    for mode in ("full", "fast"):
        ten = {"mode": mode, "samples": 10}
        yield f"predict/{mode}/10/batches", partial(predicting, ten | {"batch_size": 20})
        yield f"predict/{mode}/10/one pass a draw", partial(predicting, ten | {"fold_limit": 0})
        yield f"predict/{mode}/10/drawn", partial(predicting, ten, estimator="drawn")
        yield f"predict/{mode}/10/batch statistics", partial(predicting, ten, norm_statistics="batch")
        yield f"predict/{mode}/10/tokens", partial(predicting, ten, "tokens")


def plain(network: str) -> Numbers:
    """Return what the source network says of both domains, and its temperature."""
    net = NETWORKS[network]()
    out = parts.of_prediction(undrift.predict(net, parts.target()))
    out |= parts.of_prediction(undrift.predict(net, parts.domain(False)[0]), "source.")
    return out | {"temperature": undrift.temperature(net, parts.target(), lambda images: images + 0.1)}


def calibrated() -> Numbers:
    """Return the temperature of an adapted network, with the usual augmentation and another."""
    model = adapted()
    pale = undrift.temperature(model, parts.target(), lambda images: 0.7 * images + 0.3 * images.roll(1, 3))
    return {"usual": undrift.temperature(model, parts.batches()), "pale": pale}


def of_report(report: undrift.Report) -> Numbers:
    """Return the scores of each domain of a report, and its summary."""
    out: Numbers = {f"summary.{key}": value for key, value in report.summary.items() if not math.isnan(value)}
    for number, result in enumerate(report.results):
        for key in ("count", "accuracy", "nll", "brier", "ece", "aurc", "augrc"):
            out[f"{number}.{result.domain}.{result.role}.{key}"] = getattr(result.scores, key)
    return out


def evaluated(**settings: Any) -> Numbers:
    """Return the scores of an adapted network on two domains."""
    data = {"shifted": parts.labelled(), "source": parts.labelled(False)}
    return of_report(undrift.evaluate(adapted(), data, generator=5, **settings))


def generalized() -> Numbers:
    """Return the scores of an adapted network on target and source."""
    report = undrift.evaluate_generalized(adapted(), parts.labelled(), parts.labelled(False), samples=3, generator=5)
    return of_report(report)


def continual() -> Numbers:
    """Return the scores along a stream of two domains."""
    model = undrift.perturb(parts.convolutional(), generator=seed(1))
    report = undrift.evaluate_continual(
        model,
        {"shifted": parts.labelled(), "bright": [(x + 0.2, y) for x, y in parts.labelled()]},
        lambda images: undrift.stream(model, images, lr=0.01),
        source=parts.labelled(False),
        samples=3,
        generator=5,
    )
    return of_report(report)


def filed(network: str, **options: Any) -> Numbers:
    """Return what a domain file holds; what is loaded from it has to say what was saved, bit for bit."""
    model = adapted(network, **options)
    wanted = undrift.predict(model, parts.target(), samples=3, generator=5)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "domain.safetensors"
        undrift.save(model, path, source="golden")
        found = undrift.inspect(path)
        net = NETWORKS[network]()
        again = undrift.load(net, path)
        same = undrift.predict(again, parts.target(), samples=3, generator=5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", undrift.UndriftWarning)
            undrift.export(model, Path(folder) / "net.safetensors", images=parts.target())
        from safetensors.torch import load_file

        exported = load_file(Path(folder) / "net.safetensors")
    assert torch.equal(same.probs, wanted.probs)
    assert found.source == "golden"
    assert found.options == model.options
    own = NETWORKS[network]()
    assert found.fingerprint == undrift.fingerprint(own)
    assert undrift.fingerprint(again.remove()) == undrift.fingerprint(own)
    out: Numbers = {f"sigma.{s.layer}": s.l1 for s in found.sigmas}
    out |= {"tensors": len(found.tensors), "values": sum(tensor.numel() for tensor in found.tensors.values())}
    own.load_state_dict(exported)
    return out | parts.of_prediction(wanted) | parts.of_tensor(own.eval()(parts.target()).softmax(1), "exported.")


def identity() -> Numbers:
    """Return the fingerprint of a network whose bits are known, before, under and after a perturbation."""
    net = parts.exact()
    out: Numbers = {"fingerprint": undrift.fingerprint(net)}
    images = parts.target()
    before = net(images)
    model = undrift.perturb(net, generator=seed(1))
    list(undrift.stream(model, parts.batches(), lr=0.01))
    with model.off() as source:
        assert torch.equal(source(images), before)
    assert undrift.remove(net) is net
    assert torch.equal(net(images), before)
    assert undrift.fingerprint(net) == out["fingerprint"]
    return out | parts.of_tensor(before.softmax(1))


def several() -> Numbers:
    """Return the answers of two streams together."""
    members = [
        undrift.stream(NETWORKS["conv"](), parts.batches(), method="vmp", generator=seed(n), stream_lr=0.01)
        for n in (0, 1)
    ]
    answers = list(undrift.together(members))
    return {k: v for n, answer in enumerate(answers) for k, v in parts.of_prediction(answer, f"{n}.").items()}


def shifts() -> Numbers:
    """Return how far the domains lie apart in each layer, and the noise there."""
    net = parts.convolutional()
    found = undrift.shift.a_distance(net, parts.domain(False)[0], parts.target())
    out: Numbers = {f"a_distance.{layer}": value for layer, value in found.items()}
    for sigma in undrift.shift.sigma(adapted()):
        out |= {f"sigma.{sigma.layer}": sigma.l1, f"start.{sigma.layer}": sigma.start_l1}
        out[f"relative.{sigma.layer}"] = sigma.start_relative
    return out


def resumed() -> Numbers:
    """Return a stream that was interrupted after two batches, and goes on in another."""
    first = undrift.stream(parts.convolutional(), parts.batches()[:2], method="vmp", generator=seed(), stream_lr=0.01)
    list(first)
    net = parts.convolutional()
    start = {key: value.clone() for key, value in net.state_dict().items()}
    second = undrift.stream(net, parts.batches()[2:], method="vmp", generator=seed(7), stream_lr=0.01)
    second.load_state_dict(first.state_dict())
    return parts.of_stream(second, start)


def corrupted(name: str, severity: int) -> Numbers:
    """Return mean and deviation of corrupted images."""
    generator = torch.Generator().manual_seed(6)
    coarse = torch.rand(4, 3, 5, 5, generator=generator)
    images = F.interpolate(coarse, 20, mode="bilinear") + 0.1 * torch.rand(4, 3, 20, 20, generator=generator)
    found = undrift.corrupt((255 * images.clamp(0, 1)).to(torch.uint8), name, severity, seed=1).double() / 255
    return {"mean": float(found.mean()), "std": float(found.std()), "checksum": parts.checksum(found)}


def cases() -> dict[str, Case]:
    """Return every case by its name."""
    out = {**dict(methods()), **dict(perturbing()), **dict(predictions())}
    out |= {f"ask/{name}": partial(asked, likelihood) for name, likelihood in LIKELIHOODS.items()}
    out["ask/entropy/released"] = partial(asked, LIKELIHOODS["entropy"], options="released")
    out["ask/shot/tokens"] = partial(asked, undrift.Shot, "tokens")
    out["ask/shot/train_samples=3"] = partial(asked, undrift.Shot, train_samples=3)
    out |= {f"follow/{name}": partial(following, **settings) for name, settings in STREAMS.items()}
    out |= {"plain/conv": partial(plain, "conv"), "plain/tokens": partial(plain, "tokens")}
    out |= {"temperature": calibrated, "evaluate/full": evaluated, "evaluate/fast": partial(evaluated, mode="fast")}
    out["evaluate/mean at T=2"] = partial(evaluated, samples=0, temperature=2.0)
    out |= {"evaluate/generalized": generalized, "evaluate/continual": continual}
    out |= {"file/conv": partial(filed, "conv"), "file/tokens": partial(filed, "tokens")}
    out["file/trained"] = partial(filed, "conv", train=("bottleneck",))
    out |= {"fingerprint": identity, "together": several, "shift": shifts, "stream/vmp/resumed": resumed}
    for name, severity in product(parts.corruptions(), (1, 5)):
        out[f"corrupt/{name}/{severity}"] = partial(corrupted, name, severity)
    return out


def run(case: Case) -> Numbers:
    """Return the numbers of a case, rounded to six digits; the warnings of undrift are one of them."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = case()
    ours = [warning for warning in caught if issubclass(warning.category, undrift.UndriftWarning)]
    for other in caught:
        if other not in ours:
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
    found["warnings"] = len(ours)
    rounded = {name: v if isinstance(v, str) else float(f"{float(v):.6g}") for name, v in found.items()}
    return {name: v for name, v in rounded.items() if v == v}  # a stream that has made no step yet has no loss


def differences(found: Numbers, wanted: Numbers, rel: float = REL) -> list[str]:
    """Return a line for each number that is another, is new or is gone."""
    lines = []
    for name in dict.fromkeys((*wanted, *found)):
        one, other = found.get(name, "nothing"), wanted.get(name, "nothing")
        if isinstance(one, str) or isinstance(other, str):
            same = one == other
        else:
            least = 0.0 if name.endswith("lr") else ABS  # a rate is a choice: no rounding moves it
            same = math.isclose(one, other, rel_tol=rel, abs_tol=least)
        if not same:
            lines.append(f"{name}: found {one}, expected {other}")
    return lines


def recorded() -> dict[str, Numbers]:
    """Return the numbers of the file."""
    return json.loads(FILE.read_text("utf-8"))


def main() -> int:
    """Compare with the file, or write it; return how many cases differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write numbers.json anew")
    parser.add_argument("--rel", type=float, default=REL, help="relative tolerance")
    parser.add_argument("--slow", type=float, default=0.5, help="name cases that take longer than so many seconds")
    parser.add_argument("only", nargs="*", help="beginnings of the names of cases; all others are left as they are")
    arguments = parser.parse_args()
    warnings.simplefilter("error")
    known, wrong = recorded() if FILE.exists() else {}, 0
    all_of_them, new = cases(), {}
    for name, case in all_of_them.items():
        if arguments.only and not name.startswith(tuple(arguments.only)):
            new |= {name: known[name]} if name in known else {}
            continue
        began = time.perf_counter()
        try:
            new[name] = run(case)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}")
            wrong += 1
            continue
        if (took := time.perf_counter() - began) > arguments.slow:
            print(f"{name}: {took:.2f} s")
        if not arguments.write and (lines := differences(new[name], known.get(name, {}), arguments.rel)):
            print(*(f"{name}: {line}" for line in lines), sep="\n")
            wrong += 1
    for name in known.keys() - all_of_them.keys():
        print(f"{name}: recorded, and no longer a case")
        wrong += 1
    if arguments.write:
        lines = [f"{json.dumps(name)}: {json.dumps(new[name])}" for name in sorted(new)]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    print(f"{len(new)} cases, {sum(map(len, new.values()))} numbers, {wrong} wrong")
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(), 1))

"""What all methods that adapt on a stream have in common: the source stays, a state goes on, an episode starts over."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift
from online_support import NORM_AFFINE, batches, network
from support import images, same, snapshot
from undrift import Stream, methods
from undrift.images import Preprocess
from undrift.likelihood import Cotta, Roid

NAMES = ["eta", "eata", "sar", "roid", "cotta", "vmp-roid", "vmp-roid:paper", "vmp-roid:released"]
IMAGENET = ["eta:imagenet", "eata:imagenet", "sar:imagenet", "roid:imagenet", "cotta:imagenet", "vmp-roid:imagenet"]
QUICK: dict[str, dict[str, Any]] = {
    "eta": {"redundancy": 0.7},
    "eata": {"redundancy": 0.7, "source": images(8, 7).double(), "beta": 100.0},
    "sar": {},
    "roid": {},
    "cotta": {"views": 2, "restore": 0.3},
    "vmp-roid": {},
}


def start(name: str, seen: list[Tensor], net: nn.Module | None = None, **more: Any) -> Stream:
    generator = torch.Generator().manual_seed(0)
    settings = QUICK[name.partition(":")[0]] | more
    with torch.random.fork_rng():  # to make the network sets torch's seed, which is the caller's here
        net = network() if net is None else net
    return undrift.stream(net, seen, method=name, generator=generator, **settings)


@pytest.mark.parametrize("name", [*NAMES, *IMAGENET])
def test_what_changes_what_stays_and_what_is_given_back(name: str) -> None:
    net = network()
    before, flags = snapshot(net), [(m.training, len(m._forward_hooks)) for m in net.modules()]
    going = start(name, batches(), net)
    answers = list(going)
    assert all(torch.isfinite(p.probs).all() and (p.label >= 0).all() for p in answers)
    assert going.report.steps == 3
    changed = {n for n, value in net.state_dict().items() if not torch.equal(value, before[n])}
    everything = {n for n, _ in net.named_parameters()}
    assert changed == (everything if name.startswith("cotta") else NORM_AFFINE)
    with going.model.off():
        assert same(snapshot(net), before)
    assert going.remove() is net
    assert same(snapshot(net), before)
    assert [(m.training, len(m._forward_hooks)) for m in net.modules()] == flags
    assert all(p.grad is None and p.requires_grad for p in net.parameters())


@pytest.mark.parametrize("episodic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_another_stream_goes_on_bit_for_bit(name: str, episodic: bool) -> None:
    torch.manual_seed(5)  # the views' seed, where none is given
    whole = start(name, batches() * 2, episodic=episodic)
    wanted = list(whole)
    torch.manual_seed(5)
    first = start(name, batches(), episodic=episodic)
    got = list(first)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = start(name, batches(), episodic=episodic)  # with another seed of its own
    second.load_state_dict(torch.load(file, weights_only=True))
    got += list(second)
    assert all(torch.equal(a.probs, b.probs) for a, b in zip(got, wanted, strict=True))
    assert same(snapshot(second.model), snapshot(whole.model))
    assert str(second.state_dict()) == str(whole.state_dict())
    assert second.report == whole.report


@pytest.mark.parametrize("name", NAMES)
def test_an_episode_is_a_fresh_start(name: str) -> None:
    going = start(name, batches(), episodic=True, **({"seed": 3} if name[:3] not in ("eta", "eat", "sar") else {}))
    last = list(going)[-1]
    fresh = start(name, batches()[2:], **({"seed": 3} if name[:3] not in ("eta", "eat", "sar") else {}))
    assert torch.equal(next(fresh).probs, last.probs)
    assert same(snapshot(fresh.model), snapshot(going.model))
    continual = list(start(name, batches()))
    assert not torch.equal(continual[-1].probs, last.probs)


@pytest.mark.parametrize("name", ["roid", "cotta", "vmp-roid"])
def test_the_seed_decides_and_without_one_torchs_does(name: str) -> None:
    def last(**more: Any) -> Tensor:
        return list(start(name, batches(), **more))[-1].probs

    assert torch.equal(last(seed=1), last(seed=1))
    assert not torch.equal(last(seed=1), last(seed=2))
    torch.manual_seed(8)
    one = last()
    torch.manual_seed(8)
    assert torch.equal(one, last())
    torch.manual_seed(9)
    assert not torch.equal(one, last())


@pytest.mark.parametrize("name", ["roid", "cotta", "vmp-roid"])
def test_normalised_images_need_their_preprocessing(name: str) -> None:
    how = Preprocess(mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3))
    seen = [how.normalise(x) for x in batches()]
    with pytest.raises(undrift.DataError, match="preprocess="):
        list(start(name, seen))
    assert len(list(start(name, seen, preprocess=how))) == 3


@pytest.mark.parametrize("asked", [Roid, Cotta])
def test_views_know_the_preprocessing_that_the_network_was_perturbed_with(asked: Any) -> None:
    how = Preprocess(mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3))
    model = undrift.perturb(network(), preprocess=how, layers=(), norm_statistics="batch", answer="before")
    assert len(list(undrift.stream(model, [how.normalise(x) for x in batches(2)], likelihood=asked()))) == 2


@pytest.mark.parametrize("name", NAMES[:6])
def test_bad_images_and_small_batches_do_no_harm(name: str) -> None:
    x, huge = batches(2)
    x = x.clone()
    x[3] = float("nan")
    going = start(name, [batches(1)[0], x, huge[:1], huge[:2], batches(1)[0]])
    answers = list(going)
    assert [len(p) for p in answers] == [12, 12, 1, 2, 12]
    assert answers[1].label[3] == -1
    assert all((p.label[[i for i in range(len(p)) if (n, i) != (1, 3)]] >= 0).all() for n, p in enumerate(answers))
    assert all(torch.isfinite(v).all() for v in going.model.state_dict().values() if v.is_floating_point())


@pytest.mark.parametrize("name", NAMES[:6])
def test_several_steps_a_batch_answer_with_the_first(name: str) -> None:
    one, two = start(name, batches(1)), start(name, batches(1), stream_steps=2)
    if "views" in QUICK[name] or "roid" in name:
        one, two = (start(name, batches(1), seed=0, stream_steps=n) for n in (1, 2))
    assert torch.equal(next(one).probs, next(two).probs)
    assert two.report.steps == 2


def test_a_stream_inside_one_autocast_block_uses_the_weights_of_now() -> None:
    """Autocast keeps its casts of weights until its block ends."""
    x = [b.float() for b in batches()] * 2
    with torch.autocast("cpu", torch.bfloat16):
        inside = [p.probs for p in undrift.stream(network().float(), x, method="tent-ft", stream_lr=0.05)]
    going = undrift.stream(network().float(), x, method="tent-ft", stream_lr=0.05)
    apart = []
    for _ in x:
        with torch.autocast("cpu", torch.bfloat16):
            apart.append(next(going).probs)
    assert all(torch.equal(a, b) for a, b in zip(inside, apart, strict=True))


def test_attributes() -> None:
    for name in NAMES[:6]:
        method = methods.get(name)
        assert method.loops == ("stream",)
        assert method.reference
        assert method.source_free == (name != "eata")
    assert methods.get("cotta").changes == "norm statistics + norm affine + weights"
    assert methods.get("roid").settings()[0] == "consistency"

"""Streams with packs: start from the one that fits, come back to a known domain as it was left, keep a new one."""

from pathlib import Path

import pytest
import torch

import undrift
from packs_support import network, of, packs_in
from support import same, snapshot
from undrift.images import IMAGENET, Preprocess

pytestmark = pytest.mark.filterwarnings("ignore:COLLAPSED:undrift.UndriftWarning")


def camera(*names: str, size: int = 40) -> list[torch.Tensor]:
    return [of(name, size, seed) for seed, name in enumerate(names)]


@pytest.mark.parametrize("method", ["tent", "undrift"])
def test_a_stream_comes_back_to_a_domain_as_it_left_it(method: str) -> None:
    net = network()
    before = snapshot(net)
    batches = camera("night", "night", "snow", "snow", "snow", "night")
    stream = undrift.stream(net, iter(batches), method=method, packs=())
    names, states = [], []
    for _ in stream:
        names.append(stream.domain)
        states.append({n: p.detach().clone() for n, p in stream.model.named_parameters() if p.requires_grad})
    assert names == ["new-1"] * 3 + ["new-2"] * 2 + ["new-1"]  # a second batch that fits none begins a new domain
    # The sixth step started where the second one ended: without snow in between, the stream stands at the same place.
    nights = [*batches[:2], batches[5]]
    alone = undrift.stream(stream.remove(), iter(nights), method=method, packs=())
    assert sum(len(p) for p in alone) == 120
    if method == "tent":  # the other draws noise, which goes on
        found = {n: p.detach() for n, p in alone.model.named_parameters() if p.requires_grad}
        assert all(torch.allclose(found[n], states[5][n], atol=1e-6) for n in found)
    assert same(snapshot(alone.remove()), before)


def test_a_stream_starts_from_the_pack_that_fits_and_keeps_a_new_one(tmp_path: Path) -> None:
    net = network()
    packs_in(tmp_path, net, "night", method="undrift")
    packs = undrift.packs(net, tmp_path)
    stream = undrift.stream(net, iter(camera("night", "snow", "snow")), method="undrift", packs=packs)
    assert [stream.domain for _ in stream] == ["night", "night", "new-1"]
    assert stream.keep(tmp_path / "snow.safetensors") == "snow" == stream.domain
    stream.remove()
    assert packs.add(tmp_path / "snow.safetensors") == "snow"
    assert packs.predict(of("snow", 3, 5)).pack == ("snow",) * 3
    stream = undrift.stream(net, iter(camera("snow", "night", "home", "home")), method="undrift", packs=tmp_path)
    assert [stream.domain for _ in stream] == ["snow", "night", "night", "new-1"]


def test_names_of_domains_are_their_own(tmp_path: Path) -> None:
    stream = undrift.stream(network(), iter(camera("night", "snow", "snow", "night", "home", "home")), packs=())
    assert [stream.domain for _ in zip(range(4), stream, strict=False)] == ["new-1", "new-1", "new-2", "new-1"]
    for taken in ("new-2", "source"):
        with pytest.raises(undrift.OptionError, match=f"another domain '{taken}' in this stream; needed:"):
            stream.keep(tmp_path / "a.safetensors", name=taken)
    assert stream.keep(tmp_path / "night.safetensors") == "night"
    assert [stream.domain for _ in stream] == ["night", "new-1"]


def test_single_images_are_compared_together() -> None:
    images = torch.cat(camera("night", "snow", "night", size=80))
    stream = undrift.stream(network(), iter(images.split(4)), method="tent", packs=())
    names = [stream.domain for _ in stream]
    assert names[:7] == ["source"] * 7  # too few to say
    assert (names[19], names[39], names[-1]) == ("new-1", "new-2", "new-1")


def test_a_batch_of_two_domains_begins_no_third() -> None:
    images = torch.cat([of(name, 100, seed) for seed, name in enumerate(["night", "snow"] * 3)])
    stream = undrift.stream(network(), iter(images.split(40)), method="tent", packs=())
    names = [stream.domain for _ in stream]
    # Of the batches of both, and they alone, the network answers as it does for the domain before.
    night, snow = ["new-1"] * 3, ["new-2"] * 2
    assert names == [*night, *snow] * 3


def test_a_stopped_stream_goes_on_with_its_domains() -> None:
    net, batches = network(), camera("night", "snow", "snow", "night", "snow")
    whole = undrift.stream(net, iter(batches), method="tent", packs=())
    expected = [p.probs for p in whole]
    first = undrift.stream(whole.remove(), iter(batches[:2]), method="tent", packs=())
    for _ in first:
        pass
    state = first.state_dict()
    second = undrift.stream(first.remove(), iter(batches[2:]), method="tent", packs=())
    second.load_state_dict(state)
    assert all(torch.equal(p.probs, e) for p, e in zip(second, expected[2:], strict=True))
    other = undrift.stream(second.remove(), iter(batches), method="tent")
    with pytest.raises(undrift.PerturbationMismatch, match="a stream with packs"):
        other.load_state_dict(state)


def test_packs_that_a_stream_cannot_use_are_refused(tmp_path: Path) -> None:
    net = network()
    packs_in(tmp_path, net, "night", method="undrift")
    with pytest.raises(undrift.PerturbationMismatch, match="this stream does not train"):
        undrift.stream(net, [], method="tent", packs=tmp_path)
    with pytest.raises(undrift.OptionError, match="episodic"):
        undrift.stream(net, [], method="tent", packs=tmp_path, episodic=True)
    other = network()
    with torch.no_grad():
        other[0].weight.mul_(2)
    with pytest.raises(undrift.PerturbationMismatch, match="a different source model"):
        undrift.stream(other, [], method="undrift", packs=tmp_path)
    assert not any(module._forward_hooks for module in net.modules())


def test_packs_that_do_not_belong_together_are_left_out_of_a_stream(tmp_path: Path) -> None:
    net = network()
    (night,) = packs_in(tmp_path, net, "night", preprocess=IMAGENET, classes=list("abcde"))
    for name, settings, match in (
        ("raw", {"preprocess": Preprocess()}, "other preprocessing .* needed: the same"),
        ("named", {"classes": list("vwxyz")}, "other classes .* needed: the same"),
        ("again", {}, "is called 'night', as is another pack; needed: a name of its own"),
    ):
        (tmp_path / name).mkdir()
        (other,) = packs_in(tmp_path / name, net, "night" if name == "again" else "snow", **settings)
        with pytest.warns(undrift.UndriftWarning, match=match):
            stream = undrift.stream(net, iter(camera("night")), method="undrift-light", packs=[night, other])
        assert [stream.domain for _ in stream] == ["night"]
        stream.remove()

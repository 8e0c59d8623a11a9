"""What `features=` names: in G-SFDA the bottleneck, which is trained; elsewhere a place to look at."""

import pytest
import torch
from torch import Tensor, nn

import undrift
from support import images, same, snapshot
from undrift_bench.zoo import masked, masks_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:COLLAPSED:undrift.UndriftWarning"),
    pytest.mark.filterwarnings("ignore:.*has no feature masks:undrift.UndriftWarning"),
]


class Necked(nn.Module):
    """A network whose bottleneck has another name."""

    def __init__(self, neck: str = "neck") -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6)
        self.add_module(neck, nn.Sequential(nn.Linear(54, 8), nn.BatchNorm1d(8)))
        self.head = nn.Linear(8, 4)
        self.called = neck

    def forward(self, x: Tensor) -> Tensor:
        features = self.get_submodule(self.called)(torch.relu(self.norm(self.stem(x))).flatten(1))
        logits: Tensor = self.head(features)
        return logits


def network(neck: str = "neck") -> nn.Module:
    torch.manual_seed(4)
    return Necked(neck).eval()


def adapted(net: nn.Module, method: str, **settings: object) -> undrift.Perturbed:
    torch.manual_seed(0)
    model = undrift.adapt(net, images(24), method=method, epochs=2, batch_size=12, **settings).model
    assert model is not None
    return model


@pytest.mark.parametrize("own", [False, True], ids=["masks put on", "masks of its own"])
def test_gsfda_does_with_the_named_module_what_it_does_with_one_called_bottleneck(own: bool) -> None:
    plain, other = network(), network("bottleneck")
    if own:
        torch.manual_seed(1)
        plain = masked(plain, features="neck")
        torch.manual_seed(1)
        other = masked(other)
    before = snapshot(plain)
    model, wanted = adapted(plain, "gsfda", features="neck"), adapted(other, "gsfda")
    assert (model.options.train, model.options.fast) == (("neck", "head"), ("neck", "head"))
    assert not torch.equal(plain.state_dict()["neck.0.weight"], before["neck.0.weight"])
    renamed = {name.replace("bottleneck", "neck"): value for name, value in snapshot(other).items()}
    assert same(snapshot(plain), renamed)
    assert torch.equal(masks_of(model).embedding, masks_of(wanted).embedding)  # type: ignore[union-attr]
    assert same(snapshot(model.remove()), before)


def test_what_the_caller_says_of_train_and_fast_counts_before_features() -> None:
    model = adapted(network(), "gsfda", features="neck", train=("neck.0", "@classifier"), fast="@classifier")
    assert (model.options.train, model.options.fast) == (("neck.0", "head"), ("head",))
    model.remove()


@pytest.mark.parametrize("name", ["shot", "shot-bn", "nrc", "aad", "hcl", "vmp-shot", "vmp-nrc", "bbb-shot"])
def test_elsewhere_features_says_where_to_look_and_changes_no_rate(name: str) -> None:
    # What the last linear layer is given, which is the default, is what the neck gives.
    default, named = adapted(network(), name), adapted(network(), name, features="neck")
    assert "neck" not in named.options.fast
    assert same(snapshot(default), snapshot(named))
    faster = adapted(network(), name, features="neck", fast=("neck", "@classifier"))
    assert not torch.equal(faster.net.neck[1].weight, named.net.neck[1].weight)


def test_a_wrong_name_is_blamed_on_who_gave_it_and_the_right_ones_are_listed() -> None:
    net = network()
    before = snapshot(net)
    there = "Name one of the network's: stem, norm, neck, neck.0, neck.1, head"
    none = f"Necked has no submodule called bottleneck, and features= was not given.*masks behind it. {there}"
    with pytest.raises(undrift.OptionError, match=none):
        adapted(net, "gsfda")
    with pytest.raises(undrift.OptionError, match=rf"'nek' matches no module .*'neck'.*{there}.*from its features="):
        adapted(net, "gsfda", features="nek")
    with pytest.raises(undrift.OptionError, match=rf"features='nek' names no submodule .*'neck'.*needed.*{there}"):
        adapted(net, "shot", features="nek")
    assert same(snapshot(net), before)


def test_masks_that_would_not_be_saved_are_refused_with_where_they_are() -> None:
    net = masked(network(), features="neck")
    with pytest.raises(undrift.OptionError, match=r"behind 'neck'.*Name it: features='neck'"):
        adapted(net, "gsfda")
    with pytest.raises(undrift.OptionError, match=r"behind 'neck'.*Name it: train=\('neck', '@classifier'\)"):
        adapted(net, "gsfda", features="neck", train="head")

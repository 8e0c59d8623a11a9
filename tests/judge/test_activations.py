"""A-distance counts images, not what a network makes of them: windows, repeated calls, tokens."""

import copy

import pytest
import torch
from torch import Tensor, nn

import undrift
from undrift import shift
from undrift.judge.activations import activations, chosen_layers


class Windows(nn.Module):
    """Swin's way: attention looks at windows, which stand in the batch, the windows of one image together."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.window, self.head = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).transpose(1, 2)
        windows = self.window(tokens.reshape(4 * len(x), -1, 16)).relu()
        return self.head(windows.reshape(len(x), -1, 16).mean(1))


class Alike(nn.Module):
    """Four windows of each image, and all of them show the whole of it."""

    def __init__(self) -> None:
        super().__init__()
        self.window = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.window(x.flatten(1).repeat_interleave(4, 0)).unflatten(0, (len(x), 4)).mean(1)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.act, self.head = nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.head(self.act(self.shared(self.act(self.shared(x.flatten(1)))))))


class Attention(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        if self.attend.batch_first:
            return self.head(self.attend(tokens, tokens, tokens)[0].mean(1))
        tokens = tokens.transpose(0, 1)
        return self.head(self.attend(tokens, tokens, tokens)[0].mean(0))


class Part(nn.Module):
    """Its second layer sees only some of the images: one of two, or none where there is but one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.some = nn.Linear(12, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x.flatten(1))
        return torch.cat([self.some(z[::2]), z[1::2]]) if len(x) > 1 else z


class Positions(nn.Module):
    """Swin V2's way: one layer sees a table that is the same for all images; another, a single vector."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table, self.scale = nn.Linear(12, 20), nn.Linear(2, 20), nn.Linear(2, 20)
        self.head = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x.flatten(1)) + self.table(torch.ones(1, 5, 5, 2)).mean((0, 1, 2))
        return self.head(z * self.scale(torch.ones(2)))


class Unrelated(nn.Module):
    """One layer is never called, the other sees nothing of the images."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.table = nn.Linear(2, 3), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(torch.ones(1, 2)).expand(len(x), 3)


def rows(net: nn.Module, images: Tensor, layers: list[str] | None = None) -> dict[str, Tensor]:
    return activations(net.eval(), chosen_layers(net, layers), images.split(4), named=layers is not None)


def coloured(count: int) -> Tensor:
    """Return images of one colour each: windows of one are alike, those of two are not."""
    return torch.randn(count, 3, 1, 1) + 0.3 * torch.randn(count, 3, 16, 16)


def test_the_windows_of_an_image_are_one_row():
    net, images = Windows().eval(), coloured(8)
    found = rows(net, images)
    assert {name: len(matrix) for name, matrix in found.items()} == {"stem": 8, "window": 8, "head": 8}
    with torch.no_grad():
        alone = torch.cat([net.window(net.stem(x[None]).flatten(2).transpose(1, 2)).mean(1) for x in images])
    torch.testing.assert_close(found["window"], alone)


def test_windows_do_not_make_more_images():
    net = Windows()
    with pytest.raises(undrift.DataError, match="has 7 images"):
        shift.a_distance(net, coloured(7), coloured(7), ["window"])


def test_windows_of_one_image_are_not_on_both_sides():
    """Without shift, windows that are all alike would be told apart by heart: one is held out, its like was fitted."""
    one, other = torch.randn(2, 60, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    assert shift.a_distance(Alike(), one, other)["window"] < 0.4


def test_calls_of_one_pass_are_averaged():
    net, images = Twice().eval(), torch.rand(8, 3, 2, 2)
    with torch.no_grad():
        once = net.shared(images.flatten(1))
        again = net.shared(once.relu())
    torch.testing.assert_close(rows(net, images)["shared"], (once + again) / 2)
    with pytest.raises(undrift.OptionError, match=r"'act' was called 3 times.*\[3, 12\] channels; needed.*layers="):
        rows(net, images, ["act"])


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_is_one_layer_however_its_tokens_lie(batch_first):
    net, images = Attention(batch_first).eval(), torch.randn(8, 8, 2, 2)
    found = rows(net, images)
    assert list(found) == ["attend", "head"]  # its projection's weight is used, the projection never called
    tokens = images.flatten(2).transpose(1, 2)
    net.attend.batch_first = True
    with torch.no_grad():
        torch.testing.assert_close(found["attend"], net.attend(tokens, tokens, tokens)[0].mean(1))


def test_a_linear_layer_on_pictures_has_its_channels_last():
    net, images = nn.Sequential(nn.Linear(5, 7), nn.ReLU()), torch.rand(4, 3, 2, 5)
    torch.testing.assert_close(rows(net, images)["0"], net[0](images).mean((1, 2)).detach())


@pytest.mark.parametrize("images", [8, 1])
def test_rows_that_belong_to_no_image_are_refused_by_name_and_else_left_out(images):
    net, pictures = Part(), torch.rand(images, 3, 2, 2)
    said = {
        8: r"'some' gave 2 rows for 4 images; needed: as many.*layers=",
        1: r"did not call 'some' in a pass of 1 images; needed.*Name layers",
    }
    with pytest.raises(undrift.OptionError, match=said[images]):
        rows(net, pictures, ["first", "some"])
    found = rows(net, pictures)
    assert list(found) == ["first"]
    assert torch.equal(found["first"], rows(net, pictures, ["first"])["first"])


def test_a_table_of_positions_is_not_of_an_image():
    net, one, other = Positions(), torch.rand(41, 3, 2, 2), 1 + torch.rand(41, 3, 2, 2)
    found = shift.a_distance(net, one, other, batch_size=20)  # the last batch has one image, as the table has one row
    assert list(found) == ["first", "head"]
    assert found == shift.a_distance(net, one, other, ["first", "head"], batch_size=20)
    with pytest.raises(undrift.OptionError, match=r"'table' gave 1 rows for 20 images; needed"):
        shift.a_distance(net, one, other, ["first", "table"], batch_size=20)
    with pytest.raises(undrift.OptionError, match=r"'scale' gave a single vector.* for 20 images; needed.*layers="):
        shift.a_distance(net, one, other, ["scale"], batch_size=20)


def test_what_one_domain_leaves_out_is_left_out_of_both():
    net, one, other = Positions(), torch.rand(40, 3, 2, 2), 1 + torch.rand(40, 3, 2, 2)
    alone = list(other.split(1))
    for pair in ((one, alone), (alone, one)):
        assert list(shift.a_distance(net, *pair)) == ["first", "head"]


def test_no_layer_that_is_of_an_image_is_said():
    net, images = Unrelated(), torch.rand(40, 3, 2, 2)
    with pytest.raises(undrift.OptionError, match=r"none of the 2 layers .* in Unrelated .*; needed: .*layers="):
        shift.a_distance(net, images, images)


class Encoder(nn.Module):
    """PyTorch's encoder layers on 16 patches, tokens first (the default there) or images first."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 5)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
        self.encode = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).permute(0, 2, 1)
        if self.batch_first:
            return self.head(self.encode(tokens).mean(1))
        return self.head(self.encode(tokens.transpose(0, 1)).mean(0))


@pytest.mark.parametrize("size", [16, 8, 5])  # as many images as tokens, a part of them, neither
@pytest.mark.parametrize("perturbed", [False, True])
def test_tokens_first_is_the_same_as_images_first(size, perturbed):
    tokens_first, images_first = Encoder(False), Encoder(True)
    images_first.load_state_dict(tokens_first.state_dict())
    one, other = torch.randn(40, 3, 16, 16), torch.randn(40, 3, 16, 16) + 0.15
    for layers in (None, ["encode.layers.0.linear1", "encode.layers.1.linear2"]):
        found, wanted = (
            shift.a_distance(undrift.perturb(net) if perturbed else net, one, other, layers, batch_size=size)
            for net in (copy.deepcopy(tokens_first), copy.deepcopy(images_first))
        )
        assert found == wanted
        assert len(found) == (8 if layers is None else 2)
    found, wanted = (rows(net, one) for net in (tokens_first, images_first))
    torch.testing.assert_close(found, wanted)


def test_without_shift_the_distance_falls_with_the_images():
    """What the docstring says of chance: about 0.14 with 40 images of each, 0.04 with 200."""
    found = []
    for count in (40, 200):
        sets = [torch.randn(2 * count, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(20)]
        errors = [shift.domain_error(both[:count], both[count:]) for both in sets]
        found.append(sum(2 * (1 - 2 * min(error, 0.5)) for error in errors) / len(errors))
    assert 0.05 < found[0] < 0.3
    assert found[1] < 0.1

"""ε and its keys: known answers, moments, independence."""

import math

import pytest
import torch
from torch import Tensor

from undrift.kernels.epsilon import GOLDEN, columns, joined, mix, normal, normal_planes, pair, rows

WORD = 2**32 - 1


def test_mix_is_splitmix64() -> None:
    """The generator's published outputs for the seed 1234567."""
    state = torch.tensor([1234567]) + torch.arange(1, 4) * GOLDEN
    assert [int(v) % 2**64 for v in mix(state)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def of_row(row: int, key: int) -> int:
    """Return a row's word for a 64-bit key, in Python's own integers."""
    z = ((row + key) * 0x7FEB352D) & WORD
    z = ((z ^ z >> 15) * 0x846CA68B + (key >> 32)) & WORD
    return z ^ z >> 16


def of_column(column: int, key: int) -> int:
    """Return a column's word."""
    z = (column + (key >> 32)) & WORD
    z = ((z ^ z >> 17) * 0xED5AD4BB + key) & WORD
    z = ((z ^ z >> 11) * 0xAC4C1B51) & WORD
    z = ((z ^ z >> 15) * 0x31848BAB) & WORD
    return z ^ z >> 14


def both(row: int, column: int, key: int) -> int:
    """Return the 32 bits of a row and a column."""
    z = ((of_row(row, key) ^ of_column(column, key)) * 0xED5AD4BB) & WORD
    return ((z ^ z >> 15) * 0xAC4C1B51) & WORD


def bits(key: int | Tensor, height: int, width: int, first: int = 0) -> Tensor:
    """Return the bits of some rows and columns."""
    key = torch.as_tensor(key)
    return joined(rows(key, height, first)[:, None], columns(key, width))


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63), 1234567890123456789])
@pytest.mark.parametrize(("numbers", "first_row"), [(5, 0), (2**16, 7), (3, 2**31), (3, 2**32 - 2)])
def test_bits_are_those_of_the_definition(key: int, numbers: int, first_row: int) -> None:
    got = bits(key, 3, numbers, first_row)
    assert got.dtype is torch.int32
    for row, column in ((0, 0), (1, 2), (2, numbers - 1)):
        assert int(got[row, column]) % 2**32 == both(first_row + row, column, key % 2**64)


def test_the_largest_and_smallest_radius_are_finite() -> None:
    """Lower bits 0 and 1: the extremes of u; the upper ones are three eighths of a turn, a half, and nearly a whole."""
    words = torch.tensor([0x60000000, 0x60000000 + 2**23 - 1, 2**31 - 2**32, -1], dtype=torch.int32)
    most = math.sqrt(-2 * math.log(2**-24))
    sines, cosines = pair(words)
    torch.testing.assert_close(sines[0], torch.tensor(-most * math.sqrt(0.5)), rtol=1e-5, atol=0)
    torch.testing.assert_close(cosines[0], torch.tensor(most * math.sqrt(0.5)), rtol=1e-5, atol=0)
    torch.testing.assert_close(cosines[2], torch.tensor(most), rtol=1e-5, atol=0)
    assert cosines[[1, 3]].abs().max() < 4e-4
    assert (cosines[[1, 3]] != 0).all()
    assert torch.isfinite(sines).all()


def test_a_radius_goes_with_angles_all_around() -> None:
    """Radius and angle share bits: over the upper nine, which they do not share, all low moments are a circle's."""
    for lower in (0, 5, 2**20 + 17, 2**23 - 1):
        words = (torch.arange(512) * 2**23 + lower).to(torch.int32)
        sines, cosines = (e.double() for e in pair(words))
        radius = -2 * math.log((lower + 0.5) * 2**-23)
        for e in (sines, cosines):
            assert abs(e.mean()) < 1e-4
            assert abs((e**3).mean()) < 1e-3
            assert abs((e**2).mean() - radius / 2) < 1e-4
            assert abs((e**4).mean() - radius**2 * 3 / 8) < 1e-2
        assert abs((sines * cosines).mean()) < 1e-4


def test_bits_fall_evenly() -> None:
    """χ² of the 256 values of each byte, and of neighbours' four bits; bounds at five standard deviations."""
    word = bits(77, 2**10, 2**9).flatten()
    for shift in (0, 4, 8, 12, 16, 24):
        count = torch.bincount((word.long() >> shift) & 255, minlength=256).double()
        expected = word.numel() / 256
        assert abs(((count - expected) ** 2 / expected).sum() - 255) < 5 * math.sqrt(2 * 255)
        nibble = (word.long() >> shift) & 15
        count = torch.bincount(nibble[:-1] * 16 + nibble[1:], minlength=256).double()
        expected = (word.numel() - 1) / 256
        assert abs(((count - expected) ** 2 / expected).sum() - 255) < 5 * math.sqrt(2 * 255)


def test_a_bit_of_the_row_the_column_or_the_key_changes_half_of_the_bits() -> None:
    """Over 20,000 numbers each of the 32 output bits flips half of the time, within six standard deviations."""
    base = bits(5, 200, 100)
    others = [bits(5 ^ (1 << b), 200, 100) for b in (*range(0, 32, 5), *range(32, 60, 5))]
    others += [bits(5, 200, 100, first=lag) for lag in (1, 2, 64, 1024, 12_345)]
    others += [bits(5, 200, 2000)[:, lag : lag + 100] for lag in (1, 2, 64, 1024)]
    for other in others:
        flips = torch.stack([((base ^ other) >> b & 1).double().mean() for b in range(32)])
        assert (flips - 0.5).abs().max() < 6 * 0.5 / math.sqrt(20_000)


def test_rows_and_columns_that_cross_are_independent() -> None:
    """The words of two rows and two columns have an exclusive or of 0; the products of four numbers a mean of 0."""
    x = normal_planes(torch.tensor(3), (4, 64, 64, 64)).double().permute(1, 0, 2, 3).reshape(64, -1)
    products = (x[:-1] * x[1:])[:, :-1] * (x[:-1] * x[1:])[:, 1:]
    assert abs(products.mean()) < 5 / math.sqrt(products.numel())
    far = x[:32, :8192] * x[32:, :8192] * x[:32, 8192:] * x[32:, 8192:]
    assert abs(far.mean()) < 5 / math.sqrt(far.numel())


@pytest.mark.parametrize("shape", [(3, 6, 5, 7), (2, 5, 9), (2, 1, 4, 2, 3)])
def test_a_position_has_the_numbers_of_a_vector(shape: tuple[int, ...]) -> None:
    key, positions = torch.tensor(3), math.prod(shape[2:])
    got = normal_planes(key, shape, first_row=4)
    vectors = normal(key, (shape[0] * positions, shape[1]), first_row=4 * positions)
    assert torch.equal(got.movedim(1, -1).reshape(-1, shape[1]), vectors)


def test_normal_has_the_moments_of_a_normal() -> None:
    """400,000 numbers; each bound is five standard errors."""
    x = normal(torch.tensor(3), (40, 10_000)).double()
    n = x.numel()
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((x**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / n)
    tail = (x.abs() > 3).double().mean()
    assert abs(tail - 0.0026998) < 5 * math.sqrt(0.0027 / n)


def test_normal_is_independent_across_rows_columns_channels_and_keys() -> None:
    """Neither the numbers nor their squares are correlated, at five standard errors."""
    shape, key = (100, 8, 10, 50), torch.tensor(3)
    x = normal_planes(key, shape)
    others = [x.roll(1, d) for d in range(4)] + [x.roll(25, 3), x.roll(4, 1)]  # four channels apart: the pairs
    others += [normal_planes(key + d, shape) for d in (1, 2, 2**16, 2**32, 2**40, GOLDEN)]
    for other in others:
        assert abs(float((x * other).mean())) < 5 / math.sqrt(x.numel())
        assert abs(float(((x**2 - 1) * (other**2 - 1)).mean())) < 5 * 2 / math.sqrt(x.numel())


def test_rows_depend_on_their_index_alone() -> None:
    key = torch.tensor(9)
    whole = normal(key, (6, 5, 3))
    assert torch.equal(whole[2:4], normal(key, (2, 5, 3), first_row=2))

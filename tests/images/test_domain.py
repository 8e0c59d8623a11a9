"""Domains are cut, shuffled and gone through without losing or mixing up an image."""

import pytest
import torch

import undrift.images
from undrift import DataError, OptionError
from undrift.images import TensorDomain, shuffle, split


@pytest.fixture
def domain():
    images = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1).expand(10, 3, 2, 2)
    return TensorDomain("ten", images, torch.arange(10), tuple("abcdefghij"))


def seen(batches):
    return torch.cat([labels for _, labels in batches]).tolist()


def test_batches_are_in_order_and_images_stay_with_their_labels(domain):
    batches = domain.batches(4)
    assert len(batches) == 3
    assert seen(batches) == list(range(10))
    for images, labels in batches:
        assert torch.equal((images[:, 0, 0, 0] * 255).round().long(), labels)
    assert len(domain.batches(4, drop_last=True)) == len(list(domain.batches(4, drop_last=True))) == 2


def test_a_generator_draws_a_new_order_each_pass_and_the_same_one_again(domain):
    batches = domain.batches(3, generator=torch.Generator().manual_seed(1))
    first, second = seen(batches), seen(batches)
    again = domain.batches(3, generator=torch.Generator().manual_seed(1))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert [seen(again), seen(again)] == [first, second]


def test_names_say_where_an_image_was_before_it_was_moved(domain):
    _, names = next(iter(domain.select([7, 2]).named_batches(2)))
    assert names == ["ten[7]", "ten[2]"]


@pytest.mark.parametrize(("held_out", "count"), [(0.1, 1), (0.2, 2)])
def test_split_is_fixed_and_complete(domain, held_out, count):
    train, held = split(domain, held_out)
    assert len(held) == count
    assert sorted(train.labels.tolist() + held.labels.tolist()) == list(range(10))
    assert torch.equal(split(domain, held_out)[1].labels, held.labels)
    assert not torch.equal(split(domain, held_out, seed=5)[0].labels, train.labels)


@pytest.mark.parametrize("held_out", [0.0, 1.0, 0.01])
def test_split_with_an_empty_side_is_refused(domain, held_out):
    with pytest.raises(OptionError, match=r"held_out=.* leaves .* needed: at least one of each"):
        split(domain, held_out)


def test_shuffle_is_a_fixed_permutation(domain):
    assert torch.equal(shuffle(domain, 3).labels, shuffle(domain, 3).labels)
    assert shuffle(domain, 3).labels.tolist() != list(range(10))


def test_without_labels_there_are_no_labelled_batches(domain):
    bare = TensorDomain("bare", domain.images)
    with pytest.raises(DataError, match="bare has no labels; needed: one per image"):
        bare.batches(2)
    assert len(list(bare.named_batches(5))) == 2


def test_batches_of_nothing_are_refused_and_an_empty_choice_is_empty(domain):
    with pytest.raises(OptionError, match="batch_size is 0; needed: 1 or more"):
        domain.batches(0)
    assert len(domain.select([])) == 0


def test_surface_is_there():
    assert len(undrift.images.__all__) == len(set(undrift.images.__all__))
    assert all(hasattr(undrift.images, name) for name in undrift.images.__all__)


def test_preprocessing_is_a_value_and_no_transform(domain):
    said = "is a builtin_function_or_method; needed: .*IMAGENET.*transform of your own in a Dataset"
    with pytest.raises(OptionError, match=said):
        domain.prepared(len)

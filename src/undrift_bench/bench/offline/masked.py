"""Train G-SFDA's source network under two feature masks, as its authors do.

Smoothed cross-entropy under each mask + 0.15 · the mean of the masks; constant rates; the scale of the masks rises from
0.01 to 100 over each epoch. The epoch is kept that is best on the held-out source under the source's mask.
"""

import torch
from torch import Tensor, nn

from undrift.images import Preprocess, TensorDomain
from undrift.likelihood.masks import SHARP, masks_of
from undrift_bench.train import TrainOptions
from undrift_bench.train.epoch import own_randomness
from undrift_bench.train.frames import Normalise, cut, draw, frames
from undrift_bench.train.schedule import make_optimiser, set_rate
from undrift_bench.zoo.gsfda import compensate, mask_scale, masked_loss

CHANGES: dict[str, object] = {"schedule": "constant", "weight_decay": 5e-4}
"""What G-SFDA's source training has otherwise than SHOT's."""


def train_masked(
    net: nn.Module, train: TensorDomain, held_out: TensorDomain, options: TrainOptions, device: torch.device
) -> dict[str, Tensor]:
    """Return the weights, masks among them, of the best epoch.

    Args:
        net: from `undrift_bench.zoo.masked`; trained in place.
        options: SHOT's recipe; `CHANGES` are made here.
    """
    options = options.replace(**CHANGES)
    masks = masks_of(net)
    assert masks is not None, "the caller puts them on"
    with own_randomness(options.seed, device):
        net.to(device)
        images, others = frames(train, device, options.pad), frames(held_out, device)
        normalise = Normalise(train.preprocess, device)
        centre = train.preprocess.without_resize()
        optimiser = make_optimiser(net, options, fused=device.type == "cuda")
        steps = len(images) // options.batch_size
        best, weights = -1, dict[str, Tensor]()
        for epoch in range(options.epochs):
            net.train()
            views = draw(images, options.flip, torch.Generator().manual_seed(1_000_003 * options.seed + epoch))
            for step, batch in enumerate(views.batches(options.batch_size)):
                set_rate(optimiser, options, epoch * steps + step, options.epochs * steps)
                masks.scale = mask_scale(step, steps)
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    loss = masked_loss(net, normalise(cut(images, batch)), images.labels[batch.order])
                optimiser.zero_grad()
                loss.backward()
                compensate(masks)
                optimiser.step()
            masks.scale = SHARP
            right = _right(net.eval(), centre, others.images, others.labels)
            if right >= best:
                best, weights = right, {name: value.detach().clone() for name, value in net.state_dict().items()}
    return weights


@torch.no_grad()
def _right(net: nn.Module, centre: Preprocess, images: Tensor, labels: Tensor) -> int:
    """Return how many images are classified rightly; a plain network is under the source's mask."""
    parts = zip(images.split(256), labels.split(256), strict=True)
    return sum(int((net(centre(some.permute(0, 3, 1, 2))).argmax(1) == truth).sum()) for some, truth in parts)

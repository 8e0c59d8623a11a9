"""SHOT as its authors run it, on all weights but the classifier's: the row that the norm-affine control stands beside.

`undrift.adapt` learns what a perturbed network learns and nothing else, so the loop is here; likelihood, pseudo-labels,
schedule and norm policy are the library's.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from undrift._types import Step
from undrift.demo.setting import Setting, World
from undrift.likelihood import Shot
from undrift.options import PAPER
from undrift.perturb import Perturbed, perturb
from undrift.predict import forward


def shot_all_weights(world: World, setting: Setting, seed: int) -> Perturbed:
    """Return a copy of the source network, all of it but the classifier trained on the target by SHOT's loss."""
    net = copy.deepcopy(world.net)
    model = perturb(
        net, PAPER.replace(init_fraction=0.0, test_samples=0), generator=torch.Generator().manual_seed(seed)
    )
    classifier = [m for m in net.modules() if isinstance(m, nn.Linear)][-1]
    kept = {id(p) for p in classifier.parameters()}
    learned = [p.requires_grad_() for p in net.parameters() if id(p) not in kept]
    options = model.options
    optimiser = torch.optim.SGD(
        learned, lr=setting.lr, momentum=options.momentum, weight_decay=options.weight_decay, nesterov=True
    )
    images, likelihood = next(iter(world.target.batches(len(world.target))))[0], Shot()

    def batches(order: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for places in order.split(setting.batch_size):
            yield places, images[places]

    order, count = torch.Generator().manual_seed(seed), len(images)
    total, done = setting.epochs * -(-count // setting.batch_size), 0
    for _ in range(setting.epochs):
        likelihood.refresh(model, lambda: batches(torch.arange(count)))
        for places, x in batches(torch.randperm(count, generator=order)):
            for group in optimiser.param_groups:
                group["lr"] = setting.lr * (1 + 10 * done / total) ** -0.75
            step = Step(model, x, lambda batch: forward(model, batch), places)
            optimiser.zero_grad()
            likelihood(forward(model, x), step).backward()
            optimiser.step()
            done += 1
    return model

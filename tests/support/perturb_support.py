"""A few steps of learning that the tests of perturbations share."""

import torch

import undrift
from support import images, learnables


def adapt_a_little(model: undrift.Perturbed, steps: int = 3) -> None:
    optimiser = torch.optim.SGD(learnables(model).values(), lr=0.1)
    for step in range(steps):
        loss = model(images(seed=step)).square().mean() + undrift.kl(model)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

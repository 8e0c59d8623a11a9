"""Initialise fresh networks: He's rule for convolutions, ones and zeros for norm layers."""

from torch import nn


def he(network: nn.Module) -> None:
    """Set every convolution to He's normal initialisation (fan out) and every BatchNorm to the identity."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

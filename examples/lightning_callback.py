"""Adapt a LightningModule's network while `Trainer.test` or `Trainer.predict` runs. pip install undrift lightning

Trainer(callbacks=[AdaptAtTest("net", method="roid")]).test(module, loader)
"""

from collections import deque

import lightning.pytorch as pl
import torch

import undrift


class Following(torch.nn.Module):
    """Adapt to each batch on its way through; return log-probabilities, which every loss takes for logits."""

    def __init__(self, net: torch.nn.Module, **settings):
        super().__init__()
        self.net, self.waiting = net, deque()
        self.stream = undrift.stream(net, iter(self.waiting.popleft, None), **settings)

    def forward(self, images):
        self.waiting.append(images)
        return next(self.stream).probs.log()


class AdaptAtTest(pl.Callback):
    """Let `module.<name>` follow the images; afterwards it is the source network again, bit for bit."""

    def __init__(self, name: str = "net", **settings):
        self.name, self.settings = name, settings

    def on_test_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        setattr(module, self.name, Following(getattr(module, self.name), **self.settings).eval())

    def on_test_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_) -> None:
        if isinstance(net := getattr(module, self.name), Following):
            setattr(module, self.name, net.stream.remove())

    on_predict_start, on_predict_end, on_exception = on_test_start, on_test_end, on_test_end

"""A network with layers of every kind that a compiled step treats in a way of its own."""

import torch
from torch import Tensor, nn


class Every(nn.Module):
    """Groups, odd numbers, strides, one layer twice, one weight in two layers, wide rows; attention's drawn weights."""

    def __init__(self, width: int = 256, hidden: int = 1536) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 3, 2, 1), nn.BatchNorm2d(64)
        self.twice, self.tied = nn.Conv2d(64, 64, 1), nn.Conv2d(128, 64, 1, groups=2)
        self.tied.weight = self.twice.weight
        self.grouped, self.odd = nn.Conv2d(64, 96, 3, 1, 1, groups=2), nn.Conv2d(96, 33, 1)
        self.wide, self.tokens = nn.Conv2d(33, width, 3, 1, 1), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.last, self.head = nn.Linear(width, hidden), nn.Linear(hidden, 31)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = self.twice(torch.relu(self.twice(x)))
        x = self.tied(torch.cat([x, x.flip(1)], dim=1))
        x = self.grouped(torch.relu(x)).relu()
        x = self.wide(self.odd(x)).flatten(2).transpose(1, 2)
        x = x + self.down(nn.functional.gelu(self.up(self.tokens(x))))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.last(x.mean(1)).relu())

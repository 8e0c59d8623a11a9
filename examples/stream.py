# %% [markdown]
# # Follow a stream
#
# A camera reads digits all day. The light changes, nobody says when, and no image has a label. `undrift.stream` answers
# each batch at once and adapts as it goes.
#
# `pip install undrift scikit-learn matplotlib`

# %% [markdown]
# ## A network that worked
#
# Yours comes from a file; this one learns 1,000 of scikit-learn's digits.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import undrift

torch.manual_seed(0)
digits = load_digits()
images = F.interpolate(torch.from_numpy(digits.images).float()[:, None] / 16, 16, mode="bilinear")
labels = torch.from_numpy(digits.target)


def block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))


net = nn.Sequential(block(1, 16), block(16, 32), block(32, 32), nn.Flatten(), nn.Linear(128, 10))
optimiser = torch.optim.Adam(net.parameters(), 3e-3)
for _ in range(6):
    for index in torch.randperm(1000).split(50):
        optimiser.zero_grad()
        x = images[index] + 0.1 * torch.randn_like(images[index])
        F.cross_entropy(net(x), labels[index]).backward()
        optimiser.step()
net.eval()

# %% [markdown]
# ## The day
#
# Five hours of 160 images each: clear, faint, night, noisy, and clear again. `truth` is for the plot.

# %%
generator = torch.Generator().manual_seed(0)


def noisy(x, deviation):
    return (x + deviation * torch.randn(x.shape, generator=generator)).clamp(0, 1)


LIGHT = {
    "clear": lambda x: x,
    "faint": lambda x: noisy(0.5 + 0.25 * x, 0.05),
    "night": lambda x: noisy(0.3 * x, 0.1),
    "noisy": lambda x: noisy(x, 0.5),
    "clear again": lambda x: x,
}
day = {}
for light in LIGHT:
    index = 1000 + torch.randperm(len(images) - 1000, generator=generator)[:160]
    day[light] = LIGHT[light](images[index]), labels[index]
camera = [batch for hour, _ in day.values() for batch in hour.split(32)]
truth = torch.cat([answers for _, answers in day.values()])

# %% [markdown]
# ## Follow it
#
# One answer for each batch. `remove()` ends the stream and gives the source network back.

# %%
with torch.no_grad():
    source = torch.cat([net(batch).argmax(1) for batch in camera])

stream = undrift.stream(net, camera)
answers = [p.label for p in stream]
print(stream.report)
net = stream.remove()

# %%
for name, given in (("source network", source), ("undrift", torch.cat(answers))):
    wrong = [(a != b).float().mean().item() for a, b in zip(given.split(32), truth.split(32), strict=True)]
    plt.plot(wrong, marker="o", label=name)
for hour, name in enumerate(day):
    plt.axvline(5 * hour - 0.5, color="lightgrey", zorder=0)
    plt.text(5 * hour - 0.3, 1, name)
plt.xlabel("batch")
plt.ylabel("share of wrong answers")
plt.legend()
plt.show()

# %% [markdown]
# ## A report
#
# Where some hours have labels, `evaluate_continual` scores each batch by the answer that it got at once.

# %%
hours = {name: list(zip(x.split(32), y.split(32), strict=True)) for name, (x, y) in day.items()}
report = undrift.evaluate_continual(net, hours, lambda batches: undrift.stream(net, batches))
print(report)
report.save("day.json")

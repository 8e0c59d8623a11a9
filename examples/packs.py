# %% [markdown]
# # Packs: many domains, one network
#
# One network reads digits from three places: the scanner it was trained for, one that prints faintly, and a camera at
# night. Each place that differs gets a pack, a small file. `packs.predict` answers each image with the pack that knows
# it; nobody says where an image comes from.
#
# `pip install undrift scikit-learn`

# %% [markdown]
# ## A network that worked
#
# Yours comes from a file; this one learns 1,000 of scikit-learn's digits.

# %%
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
# ## Three places
#
# The first 400 images that the network has not seen are there to adapt to; the rest arrive later, in any order.

# %%
generator = torch.Generator().manual_seed(0)


def noisy(x, deviation):
    return (x + deviation * torch.randn(x.shape, generator=generator)).clamp(0, 1)


PLACES = {
    "source": lambda x: x,
    "faint": lambda x: noisy(0.5 + 0.25 * x, 0.05),
    "night": lambda x: noisy(0.3 * x, 0.1),
}
known, later = slice(1000, 1400), slice(1400, None)

# %% [markdown]
# ## A pack for each place that differs

# %%
for name in ("faint", "night"):
    model = undrift.adapt(net, PLACES[name](images[known]), epochs=3).model
    size = undrift.save(model, f"{name}.safetensors")
    print(f"{name}: {size:,} bytes")
    net = model.remove()

# %% [markdown]
# ## Images from everywhere
#
# `p.pack` names who answered each image.

# %%
packs = undrift.packs(net, "faint.safetensors", "night.safetensors")
mixed = torch.cat([change(images[later]) for change in PLACES.values()])
truth = labels[later].repeat(len(PLACES))
place = [name for name in PLACES for _ in range(len(images[later]))]

p = packs.predict(mixed)
with torch.no_grad():
    alone = net(mixed).argmax(1)
print(packs)

# %%
for name in PLACES:
    rows = torch.tensor([place_of == name for place_of in place])
    routed = sum(pack == name for pack, row in zip(p.pack, rows, strict=True) if row) / int(rows.sum())
    before, after = (float((label == truth)[rows].float().mean()) for label in (alone, p.label))
    print(f"{name:6}  network alone {before:4.0%}   with packs {after:4.0%}   answered by its own pack {routed:4.0%}")

# %% [markdown]
# ## Why this pack?
#
# `p.why` names the pack, and how far the image is from that pack's own images, in standard deviations. Images that no
# pack knows go to the source network.

# %%
for row in (0, len(images[later]), 2 * len(images[later])):
    print(p.why(row))

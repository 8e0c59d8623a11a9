# %% [markdown]
# # Adapt your own network
#
# A scanner was replaced: the digits come out faint, on grey paper, and the network that reads them fails. You have the
# network and the new scans, but no labels and none of the data that it was trained on.
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
# ## The new images
#
# `truth` is here to see what adapting brings. undrift never looks at it.

# %%
scans, truth = images[1000:], labels[1000:]
faint = (0.5 + 0.25 * scans + 0.05 * torch.randn_like(scans)).clamp(0, 1)


def share_right(label):
    return f"{(label == truth).float().mean():.0%}"


with torch.no_grad():
    print("as trained:", share_right(net(scans).argmax(1)), "  new scanner:", share_right(net(faint).argmax(1)))

# %% [markdown]
# ## Adapt
#
# The network is changed in place, and `model.remove()` undoes it bit for bit. The verdict needs no labels.

# %%
history = undrift.adapt(net, faint, epochs=4)
model = history.model
print(history.verdict)

# %%
p = undrift.predict(model, faint)
print("adapted:", share_right(p.label))

# %% [markdown]
# ## How sure is it?
#
# Answers that are right should be the sure ones. Where they are, leaving out the unsure ones makes fewer mistakes.

# %%
confidence, order = p.probs.amax(1).sort(descending=True)
right = (p.label == truth)[order].float()
answered = torch.arange(1, len(right) + 1)
plt.plot(answered / len(right), 1 - right.cumsum(0) / answered)
plt.xlabel("share of images answered, surest first")
plt.ylabel("share of wrong answers")
plt.show()

# %% [markdown]
# ## Keep the domain
#
# One small file holds what this scanner changed. The network itself is not in it.

# %%
size = undrift.save(model, "scanner.safetensors")
print(f"{size:,} bytes; the network has {sum(p.nbytes for p in net.parameters()):,}")
net = model.remove()
model = undrift.load(net, "scanner.safetensors")
print("loaded:", share_right(undrift.predict(model, faint).label))
net = model.remove()

"""The examples that stand in other people's loops."""

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate_loop import accuracy
from hugging_face_pipeline import AdaptedPipeline
from lightning.pytorch import LightningModule, Trainer
from lightning_callback import AdaptAtTest
from monai.metrics import DiceMetric
from monai_segmentation import dice
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import undrift
from support import same, snapshot

from .conftest import CLASSES, by_timm, unet, vit

COLORS = ("red", "green", "blue", "white", "black", "yellow", "orange", "pink")


class Module(LightningModule):
    """A module as its owner wrote it, without a thought of undrift."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.accuracy = net, MulticlassAccuracy(CLASSES)

    def test_step(self, batch: tuple[Tensor, Tensor]) -> None:
        if getattr(self, "broken", False):
            raise RuntimeError("a camera was unplugged")
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("accuracy", self.accuracy)

    def predict_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.net(batch[0]).softmax(1)


def loader() -> DataLoader[tuple[Tensor, ...]]:
    images = torch.rand(12, 3, 64, 64, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(images, torch.arange(12) % CLASSES), batch_size=4)


def streamed(net: nn.Module, method: str) -> list[undrift.Prediction]:
    stream = undrift.stream(net, loader(), method=method)
    answers = list(stream)
    stream.remove()
    return answers


def quiet(**arguments: object) -> Trainer:
    silent = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return Trainer(accelerator="cpu", **silent, **arguments)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*(does not have many workers|srun|Restoring training mode):UserWarning")
def test_a_lightning_module_adapts_while_it_is_tested() -> None:
    net = by_timm("resnet18")().eval()
    before, expected = snapshot(net), streamed(net, "tent")
    module = Module(net)
    trainer = quiet(callbacks=[AdaptAtTest("net", method="tent")])
    (found,) = trainer.test(module, loader(), verbose=False)
    labels = torch.arange(12) % CLASSES
    known = MulticlassAccuracy(CLASSES)(torch.cat([p.label for p in expected]), labels)
    assert found["accuracy"] == pytest.approx(float(known))
    probs = trainer.predict(module, loader())
    assert probs is not None
    torch.testing.assert_close(torch.cat(probs), torch.cat([p.probs for p in expected]))
    module.broken = True
    with pytest.raises(RuntimeError, match="unplugged"):
        trainer.test(module, loader(), verbose=False)
    assert module.net is net
    assert same(snapshot(net), before)


def test_a_loop_of_accelerate_adapts() -> None:
    net = by_timm("resnet18")().eval()
    before, expected = snapshot(net), streamed(net, "tent")
    right = torch.cat([p.label for p in expected]) == torch.arange(12) % CLASSES
    assert accuracy(Accelerator(cpu=True), net, loader(), method="tent") == pytest.approx(float(right.float().mean()))
    assert same(snapshot(net), before)


@pytest.mark.filterwarnings("ignore:COLLAPSED:undrift.UndriftWarning")
def test_a_pipeline_answers_as_that_of_hugging_face(tmp_path: str) -> None:
    net, processor = vit(), transformers.ViTImageProcessor(size={"height": 64, "width": 64})
    pictures = [Image.new("RGB", (80, 70), color) for color in COLORS]
    pictures[0].save(f"{tmp_path}/red.png")
    pipe = AdaptedPipeline(net, processor)
    theirs = transformers.pipeline("image-classification", model=net, image_processor=processor)(pictures[0], top_k=3)
    ours = pipe(f"{tmp_path}/red.png", top_k=3)
    assert [a["label"] for a in ours] == [a["label"] for a in theirs]
    assert [a["score"] for a in ours] == pytest.approx([a["score"] for a in theirs], rel=1e-4)
    adapted = pipe.adapt(pictures, epochs=1, progress=False)(pictures)
    assert [len(row) for row in adapted] == [CLASSES] * 8
    assert all(row[0]["mutual_info"] >= 0 for row in adapted)
    undrift.save(pipe.model, f"{tmp_path}/domain.safetensors")


def test_a_network_of_monai_follows_a_scanner() -> None:
    net = unet(3)().eval()
    before = snapshot(net)
    scans = [(torch.rand(2, 3, 16, 16, 16), torch.randint(CLASSES, (2, 16, 16, 16))) for _ in range(2)]
    score = DiceMetric(num_classes=CLASSES)
    for (_, truth), p in zip(scans, undrift.stream(net, scans, method="tent"), strict=True):
        score(p.label[:, None], truth[:, None])
    found, look = dice(net, scans, CLASSES, method="tent")
    assert found == pytest.approx(float(score.aggregate()))
    assert 0 <= look <= 1
    assert same(snapshot(net), before)

"""An adapted network that is called like Hugging Face's image-classification pipeline, and says how sure it is.

pip install undrift transformers pillow
pipe = AdaptedPipeline(net, processor).adapt(["ward-1.png", "ward-2.png", ...])
pipe("ward-3.png")  # [{"label": "healthy", "score": 0.93, "entropy": 0.31, "mutual_info": 0.02}, ...]
"""

from transformers import BaseImageProcessor, PreTrainedModel
from transformers.image_utils import load_image

import undrift


class AdaptedPipeline:
    """Take an image (Pillow's, a path or an address) or a list of them; give the most probable classes of each."""

    def __init__(self, net: PreTrainedModel, processor: BaseImageProcessor):
        self.net, self.processor, self.model = net.eval(), processor, net

    def pixels(self, images: list):
        opened = [load_image(image) for image in images]
        return self.processor(opened, return_tensors="pt")["pixel_values"].to(self.net.device)

    def adapt(self, images: list, **settings) -> "AdaptedPipeline":
        """Learn a domain from unlabelled images; `undrift.save(pipe.model, path)` keeps it."""
        self.model = undrift.adapt(self.net, self.pixels(images), **settings).model
        return self

    def __call__(self, images, top_k: int = 5) -> list:
        many = images if isinstance(images, list) else [images]
        p = undrift.predict(self.model, self.pixels(many)).cpu()
        scores, classes = p.probs.topk(min(top_k, p.probs.shape[1]))
        names = [[self.net.config.id2label[c] for c in row] for row in classes.tolist()]
        numbers = zip(names, scores.tolist(), p.entropy.tolist(), p.mutual_info.tolist(), strict=True)
        told = [
            [{"label": n, "score": s, "entropy": h, "mutual_info": i} for n, s in zip(labels, row, strict=True)]
            for labels, row, h, i in numbers
        ]
        return told if isinstance(images, list) else told[0]

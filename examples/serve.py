"""Serve a network that adapts: answers in batches, with their uncertainty, while a thread of its own learns.

pip install "undrift[serve,images]"
UNDRIFT_STATE=state uvicorn --factory serve:demo --app-dir examples --port 8000
curl --data-binary @photo.jpg http://127.0.0.1:8000/predict
"""

import asyncio
import copy
import io
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, HTTPException, Request
from PIL import Image, UnidentifiedImageError

import undrift
from undrift.images import Preprocess

BATCH = 32
SHARE = 0.25  # of the time that learning may take


class Service:
    """Answers with what was learned last, while a stream learns from the same images."""

    def __init__(self, net: torch.nn.Module, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.net, self.pack, self.state = net, folder / "now.safetensors", folder / "stream.pt"
        self.answering: tuple[torch.nn.Module, str] = copy.deepcopy(net), "source"
        self.seen: deque[torch.Tensor] = deque(maxlen=4 * BATCH)  # the latest; older ones are answered, not learned
        self.waiting: asyncio.Queue[tuple[torch.Tensor, asyncio.Future[dict[str, Any]]]] = asyncio.Queue(16 * BATCH)
        self.learning = threading.Thread()
        self.stream = undrift.stream(copy.deepcopy(net), self.batches(), guard=True, packs=())
        if self.state.exists():
            self.stream.load_state_dict(torch.load(self.state, weights_only=True))
            self.swap()

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield what the stream learns from: the latest images."""
        while True:
            yield torch.stack([self.seen.popleft() for _ in range(BATCH)])

    def swap(self) -> None:
        """Keep what was learned across a restart, and answer with it from now on."""
        part = self.state.with_suffix(".part")
        torch.save(self.stream.state_dict(), part)
        part.replace(self.state)
        undrift.save(self.stream.model, self.pack)
        self.answering = undrift.load(copy.deepcopy(self.net), self.pack), self.stream.domain or "source"

    def learn(self, stop: threading.Event) -> None:
        """Take a step whenever a batch is there, for a share of the time."""
        while not stop.wait(0.01):
            if len(self.seen) >= BATCH:
                begun = time.monotonic()
                next(self.stream)
                self.swap()
                stop.wait((time.monotonic() - begun) * (1 / SHARE - 1))

    async def answer(self) -> None:
        """Answer what waits, in batches."""
        while True:
            asked = [await self.waiting.get()]
            while len(asked) < BATCH and not self.waiting.empty():
                asked.append(self.waiting.get_nowait())
            images, (model, pack) = torch.stack([image for image, _ in asked]), self.answering
            try:
                found = await asyncio.to_thread(undrift.predict, model, images)
                rows = list(
                    zip(found.label.tolist(), found.probs.amax(1).tolist(), found.mutual_info.tolist(), strict=True)
                )
            except Exception as error:  # one batch's trouble is its own; the service goes on
                for _, reply in asked:
                    reply.cancelled() or reply.set_exception(error)
                continue
            self.seen.extend(images)
            for (label, probability, mutual_info), (_, reply) in zip(rows, asked, strict=True):
                named = {"label": label, "probability": probability, "mutual_info": mutual_info, "pack": pack}
                reply.cancelled() or reply.set_result(named)  # cancelled: the client has left


def service(net: torch.nn.Module, preprocess: Preprocess, folder: Path) -> FastAPI:
    """Return the application: POST /predict takes one image, GET /health says how the stream is."""
    serving = Service(net, folder)

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        stop, answering = threading.Event(), asyncio.create_task(serving.answer())
        serving.learning = threading.Thread(target=serving.learn, args=(stop,))
        serving.learning.start()
        yield  # until SIGTERM, and until every request that was taken has its answer
        stop.set()
        await asyncio.to_thread(serving.learning.join)
        answering.cancel()

    app = FastAPI(lifespan=running)

    @app.post("/predict")
    async def predict(request: Request) -> dict[str, Any]:
        try:
            image = Image.open(io.BytesIO(await request.body())).convert("RGB")
        except (UnidentifiedImageError, OSError) as error:
            raise HTTPException(415, f"no image that Pillow can read: {error}") from error
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        await serving.waiting.put((preprocess.normalise(preprocess.frame_image(image)[None])[0], reply))
        return await reply

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {
            "report": str(serving.stream.report),
            "pack": serving.answering[1],
            "learns": serving.learning.is_alive(),
        }

    return app


def demo() -> FastAPI:
    """Serve a small network of random weights: put your own here."""
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1)
    net = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(16, 10)).eval()
    return service(net, Preprocess(resize=36, crop=32), Path(os.environ.get("UNDRIFT_STATE", "state")))

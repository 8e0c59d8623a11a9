"""What an online cell's numbers are of: the method by hand, its seed, the weights that answered, EATA's images."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import undrift
from tree_support import Silent
from undrift.images import Preprocess
from undrift_bench.bench import Cell, Request, Store, find
from undrift_bench.bench.harness.networks import tiny_data
from undrift_bench.bench.harness.run import run
from undrift_bench.bench.online.benchmark import OnlineBenchmark
from undrift_bench.bench.online.report import resets
from undrift_bench.bench.online.settings import CONTINUAL, plan
from undrift_bench.bench.online.streaming import SOURCE_IMAGES, Streaming


def online() -> OnlineBenchmark:
    found = find("online-c10")
    assert isinstance(found, OnlineBenchmark)
    return found


def cell_of(request: Request, **changes: Any) -> Cell:
    (cell,) = online().cells(request)
    return replace(cell, **changes)


def numbers(cell: Cell, request: Request) -> dict[str, Any]:
    torch.manual_seed(99)  # whatever ran before: a cell starts from its own seed
    bar: Any = Silent()
    return dict(Streaming(online().scaled(request), request)(cell, bar))


def by_hand(cell: Cell) -> tuple[float, undrift.Stream]:
    """Return the mean NLL over corruptions of a method on the tiny stream, and the stream at its end."""
    request = Request(tiny=True)
    here, domain = online().scaled(request), tiny_data(request)
    assert domain.labels is not None
    net, labels, batch = here.networks[0].load(request), domain.labels, here.batch
    order = plan(CONTINUAL, here.corruptions, labels, len(domain), batch, cell.seed).image.split(len(domain))
    images = [
        Preprocess().normalise(undrift.corrupt(domain.images, name, 5)[o])
        for name, o in zip(here.corruptions, order, strict=True)
    ]
    settings = dict(cell.row.settings)
    if "preprocess" in undrift.methods.get(cell.row.method).settings():
        settings["preprocess"] = Preprocess()
    torch.manual_seed(cell.seed)
    stream = undrift.stream(net, torch.cat(images).split(batch), method=cell.row.method, **settings)
    losses = [
        torch.nn.functional.nll_loss(next(stream).probs.double().log(), truth)
        for truth in labels[torch.cat(order)].split(batch)
    ]
    return float(torch.stack(losses).mean()), stream


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("row", ["tent", "vmp:paper", pytest.param("cotta", marks=pytest.mark.slow)])
def test_numbers_are_those_of_the_method_called_by_hand(row: str, seed: int) -> None:
    request = Request(tiny=True, only=(row,), seeds=1, device="cpu")
    cell = cell_of(request, seed=seed)
    assert numbers(cell, request)["nll"] == pytest.approx(by_hand(cell)[0], abs=1e-6)


@pytest.mark.slow
def test_clean_images_are_asked_of_the_weights_that_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(tiny=True, only=("cotta",), seeds=1, device="cpu")
    cell = cell_of(request)
    cell = replace(cell, row=replace(cell.row, settings={"stream_lr": 0.5}))  # the student runs away from its teacher
    (_, stream), original, asked = by_hand(cell), undrift.predict, list[torch.Tensor]()
    domain = tiny_data(request)

    def clean() -> torch.Tensor:
        return torch.cat(
            [original(stream.model, part, 0).probs for part in Preprocess().normalise(domain.images).split(6)]
        )

    def spy(*given: Any, views: Any) -> Any:
        assert views == ()
        answer = original(*given)
        asked.append(answer.probs)
        return answer

    monkeypatch.setattr(undrift, "predict", spy)
    forgotten = numbers(cell, request)["source_error_after"]
    with stream.answering():
        teacher = clean()
    assert not torch.allclose(teacher, clean(), atol=0.01)
    torch.testing.assert_close(torch.cat(asked), teacher)
    assert forgotten == pytest.approx(float((teacher.argmax(1) != domain.labels).float().mean()))


def test_eata_looks_at_as_many_source_images_as_its_authors() -> None:
    request = Request(tiny=True, only=("eata",), seeds=1, device="cpu")
    given = Streaming(online().scaled(request), request).given(cell_of(request), CONTINUAL)
    assert SOURCE_IMAGES == 2000
    assert torch.equal(
        torch.cat(given["source"]), Preprocess().normalise(tiny_data(request).images)
    )  # all, as there are fewer
    assert {len(batch) for batch in given["source"]} == {6}


@pytest.mark.parametrize("row", ["roid", "vmp-roid", "tent"])
def test_roid_divides_by_the_configured_batch_in_a_short_last_one_too(row: str) -> None:
    request = Request(tiny=True, only=(row,), seeds=1, device="cpu")
    given = partial(Streaming(online().scaled(request), request).given, cell_of(request))
    expected = [] if row == "tent" else [online().scaled(request).batch, 3]
    smaller = replace(CONTINUAL, name="batch-3", batch=3)
    assert [how["batch"] for setting in (CONTINUAL, smaller) if "batch" in (how := given(setting))] == expected


def test_what_a_stream_did_with_its_batches_is_in_its_record(tmp_path: Path) -> None:
    request = Request(results=tmp_path, tiny=True, only=("sar",), seeds=1, device="cpu")
    cell = cell_of(request)
    # Every image counts as reliable, and any loss as a collapse: SAR is put back after every step.
    cell = replace(cell, row=replace(cell.row, settings={"margin": 1.0, "recover_below": 10.0}))
    found = numbers(cell, request)
    assert (found["steps"], found["missed"], found["resets"]) == (4, 0, 4)
    old, tent = {"error": 0.2}, {"steps": 4, "missed": 0, "resets": 0}
    assert resets({"sar": [found, found, old], "tent": [tent], "eata": [old]}) == [
        "- sar was put back to the source after 8 of 8 steps."
    ]


@pytest.mark.slow
def test_resets_stand_under_the_table_where_they_are_known(tmp_path: Path) -> None:
    request = Request(results=tmp_path, tiny=True, only=("sar", "tent"), seeds=1, device="cpu")
    run(online(), request, lambda _: None, quiet=True)
    store = Store(tmp_path / "online-c10")
    sar = next(cell for cell in online().cells(request) if cell.row.name == "sar")
    record = store.finished(sar)
    assert record is not None
    store.put(sar, record | {"steps": 4, "resets": 3})
    line = "- sar was put back to the source after 3 of 4 steps."
    assert line in online().markdown(store, request)
    store.put(sar, {name: value for name, value in record.items() if name not in ("steps", "missed", "resets")})
    assert line not in online().markdown(store, request)  # a record of old

"""`--method` runs what the Python API runs, goes on where it stopped, and says what does not fit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import undrift
from support import same
from undrift import methods
from undrift.images import FileDomain
from undrift.keep import Keeper

from .conftest import MODEL, Run, StopWhen

STREAM = ("stream", "target", *MODEL, "--batch-size", "10", "--quiet")


def network(weights: dict[str, Tensor]) -> nn.Module:
    import tiny_of_tests

    net: nn.Module = tiny_of_tests.make()
    net.load_state_dict(weights)
    return net.eval()


def target() -> Tensor:
    domain = undrift.images.domain("target")
    return torch.cat([images for images, _ in domain.named_batches(30)])


def test_adapt_with_a_method_is_the_api_with_a_method(run: Run, weights: dict[str, Tensor]) -> None:
    found = run(
        *("adapt", "target", *MODEL, "--out", "b.safetensors", "--method", "shot", "--features", "norm"),
        *("--set", "rounds=3", "--lr", "1e-2", "--json"),
    )
    assert found.code == 0, found.err
    assert found.json["method"] == "shot"
    assert len(found.json["epochs"]) == 15  # the method's, not the command's
    file = undrift.inspect("b.safetensors")
    wanted = methods.get("shot").options
    assert file.options == wanted.replace(adapt_lr=1e-2, frozen=("head",), fast=())
    assert file.classes == ("red", "green", "blue")
    assert {"conv.weight", "norm.bias"} <= file.tensors.keys()
    assert "head.weight" not in file.tensors

    torch.manual_seed(0)
    history = undrift.adapt(
        network(weights),
        target(),
        method="shot",
        features="norm",
        rounds=3,
        adapt_lr=1e-2,
        generator=torch.Generator().manual_seed(0),
    )
    # Up to the order within a batch, which each of the two draws by itself.
    torch.testing.assert_close(history.model.net.conv.weight.detach(), file.tensors["conv.weight"])
    assert not torch.equal(weights["conv.weight"], file.tensors["conv.weight"])
    assert run("predict", "target", *MODEL, "--domain", "b.safetensors").code == 0


def test_stream_with_a_method_is_the_api_with_a_method(run: Run, weights: dict[str, Tensor]) -> None:
    found = run(*STREAM, "--answers", "s.csv", "--out", "b.safetensors", "--method", "tent", "--lr", "5e-3")
    assert found.code == 0, found.err
    going = undrift.stream(network(weights), target().split(10), method="tent", stream_lr=5e-3)
    answers = [str(float(p)) for prediction in going for p in prediction.probs.amax(1)]
    written = [line.split(",")[2] for line in Path("s.csv").read_text().splitlines()[1:]]
    assert [float(a) for a in written] == pytest.approx([float(a) for a in answers], abs=1e-5)
    file = undrift.inspect("b.safetensors")
    assert torch.equal(going.model.net.norm.weight, file.tensors["norm.weight"])
    assert file.options == methods.get("tent").options.replace(stream_lr=5e-3)


def test_a_captured_stream_is_the_same_and_may_go_on_without(run: Run) -> None:
    words = (*STREAM, "--method", "tent")
    assert run(*words, "--answers", "s.csv", "--out", "a.safetensors").code == 0
    found = run(*words, "--answers", "c.csv", "--out", "b.safetensors", "--captured", "--state", "c.state")
    assert found.code == 0, found.err
    assert Path("c.csv").read_bytes() == Path("s.csv").read_bytes()
    assert same(*(undrift.inspect(f"{name}.safetensors").tensors for name in "ab"))
    assert run(*words, "--answers", "c.csv", "--state", "c.state").code == 0  # all images are done with
    found = run(*STREAM, "--answers", "r.csv", "--method", "roid", "--captured")
    assert (found.code, "captured=True, but Roid" in found.err) == (2, True), found.err
    assert not Path("r.csv").exists()


def test_images_one_by_one_are_gathered_as_in_the_api(
    run: Run, weights: dict[str, Tensor], stop_when: StopWhen
) -> None:
    words = ("stream", "target", *MODEL, "--batch-size", "1", "--quiet", "--method", "tent", "--gather", "7")
    found = run(*words, "--answers", "s.csv", "--out", "b.safetensors", "--json")
    assert found.code == 0, found.err
    going = undrift.stream(network(weights), target().split(1), method="tent", gather=7)
    answers = [float(p.probs.amax()) for p in going]
    assert found.json["report"]["steps"] == going.report.steps == len(answers) // 7
    written = [float(line.split(",")[2]) for line in Path("s.csv").read_text().splitlines()[1:]]
    assert written == pytest.approx(answers, abs=1e-5)
    file = undrift.inspect("b.safetensors")
    assert torch.equal(going.model.net.norm.weight, file.tensors["norm.weight"])
    assert file.options.norm_statistics == "train"
    # Stopped with images that wait, it goes on with them; with another number it is another stream.
    going_on = (*words, "--answers", "t.csv", "--state", "t.state", "--state-every", "3")
    stop_when("t.csv", 10, *going_on)
    found = run(*going_on, "--gather", "8")
    assert (found.code, "another stream" in found.err) == (1, True), found.err
    assert run(*going_on).code == 0
    assert Path("t.csv").read_bytes() == Path("s.csv").read_bytes()


def test_a_balanced_memory_is_that_of_the_api(run: Run, weights: dict[str, Tensor]) -> None:
    words = ("stream", "target", *MODEL, "--batch-size", "3", "--quiet", "--method", "tent", "--balanced")
    found = run(*words, "--answers", "s.csv", "--gather", "7", "--json")
    assert found.code == 0, found.err
    going = undrift.stream(network(weights), target().split(3), method="tent", gather=7, balanced=True)
    answers = [p for prediction in going for p in prediction.probs.amax(1).tolist()]
    assert found.json["report"]["steps"] == going.report.steps > 0
    written = [float(line.split(",")[2]) for line in Path("s.csv").read_text().splitlines()[1:]]
    assert written == pytest.approx(answers, abs=1e-5)
    found = run(*words, "--answers", "t.csv")
    assert (found.code, "--balanced was given without --gather; needed:" in found.err) == (2, True), found.err
    assert "Give --gather 128 as well." in found.err
    assert not Path("t.csv").exists()


def test_a_variant_is_a_preset_of_the_method(run: Run) -> None:
    found = run(*STREAM, "--answers", "s.csv", "--out", "b.safetensors", "--method", "vmp:released")
    assert found.code == 0, found.err
    assert undrift.inspect("b.safetensors").options == undrift.preset("released")


def test_a_stream_goes_on_with_the_same_method_only(run: Run, stop_when: StopWhen) -> None:
    words = (*STREAM, "--method", "tent", "--set", "momentum=0.5")
    assert run(*words, "--answers", "whole.csv").code == 0
    going = (*words, "--answers", "s.csv", "--state", "s.state", "--state-every", "1")
    stop_when("s.csv", 21, *going)
    for other in (
        (*STREAM, "--method", "tent", "--set", "momentum=0.6"),
        (*STREAM, "--method", "norm-stats"),
        STREAM,
    ):
        found = run(*other, "--answers", "s.csv", "--state", "s.state")
        assert (found.code, "another stream" in found.err) == (1, True), found.err
    found = run(*going)
    assert found.code == 0, found.err
    assert Path("s.csv").read_bytes() == Path("whole.csv").read_bytes()


def test_an_adaptation_with_a_method_goes_on(run: Run, stop_when: StopWhen) -> None:
    words = ("adapt", "target", *MODEL, "--method", "shot", "--epochs", "3", "--batch-size", "10")
    assert run(*words, "--out", "whole.safetensors").code == 0
    going = (*words, "--out", "b.safetensors", "--checkpoint", "b.run")
    stop_when("b.run", "any", *going)
    other = run(*going, "--set", "beta=0.2")
    assert (other.code, "likelihood" in other.err) == (1, True), other.err
    assert run(*going).code == 0
    one, two = (undrift.inspect(f"{name}.safetensors").tensors for name in ("whole", "b"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_setting_that_is_images_is_opened(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    class Holding(Keeper):
        def __init__(self, source: object = None) -> None:
            given.append(source)

    row = methods.Method("hold", "", "", ("stream",), methods.get("tent").options, lambda: undrift.entropy, (Holding,))
    monkeypatch.setitem(methods.METHODS, "hold", row)
    found = run(*STREAM, "--answers", "s.csv", "--method", "hold", "--set", "source=source")
    assert found.code == 0, found.err
    (source,) = given  # made once, with its images
    assert isinstance(source, FileDomain)
    assert len(source) == 12
    found = run(*STREAM, "--answers", "t.csv", "--method", "hold", "--set", "source=nowhere")
    assert (found.code, "nowhere" in found.err) == (1, True)


@pytest.mark.parametrize(
    "words",
    [
        ("eata", "--set", "source=source", "--set", "fisher_batch=6"),
        ("cotta", "--seed", "3"),
        ("bacs", "--set", "posterior=posterior.safetensors", "--set", "alpha=0.5"),
    ],
)
def test_methods_with_parts_of_their_own_run_from_the_shell(
    run: Run, weights: dict[str, Tensor], words: tuple[str, ...]
) -> None:
    moments = undrift.keep.Moments(net := network(weights))
    for shift in (0.0, 0.1):
        with torch.no_grad():
            net.head.bias += shift
        moments.add(net)
    moments.save("posterior.safetensors")
    found = run(*STREAM, "--answers", "s.csv", "--out", "b.safetensors", "--json", "--method", *words)
    assert found.code == 0, found.err
    assert found.json["warnings"] == []
    assert len(Path("s.csv").read_text().splitlines()) == 31
    assert run("inspect", "b.safetensors").code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--method", "tend"), "did you mean 'tent'?"),
        (("--method", "tent:moon"), "tent has no variant 'moon'"),
        (("--method", "shot"), "shot does not run in `undrift stream`"),
        (("--method", "shot"), "`undrift adapt … --method shot`"),
        (("--method", "tent", "--likelihood", "entropy"), "--likelihood entropy was given beside --method tent"),
        (("--method", "vmp", "--preset", "released"), "--method vmp:released"),
        (("--method", "tent", "--beta", "0.3"), "--beta does not belong to tent"),
        (("--method", "tent", "--set", "momentun=0.3"), "did you mean 'momentum'?"),
        (("--method", "tent", "--set", "momentum"), "needed: NAME=VALUE"),
        (("--method", "tent", "--set", "momentum=3"), "momentum=3 is above 1"),
        (("--method", "tent", "--lr", "1", "--set", "stream_lr=1"), "stream_lr was given twice"),
        (("--preset", "paper", "--set", "momentum=0.3"), "without --method"),
        (("--beta", "0.3"), "--beta does not belong to undrift"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_opened(run: Run, words: tuple[str, ...], said: str) -> None:
    found = run("stream", "nowhere", "--weights", "nothing", "--answers", "s.csv", *words)
    assert (found.code, said in found.err) == (2, True), found.err


def test_a_method_and_a_domain_file_are_one_too_many(run: Run, adapted: Path) -> None:
    found = run(*STREAM, "--answers", "s.csv", "--method", "tent", "--domain", adapted)
    assert (found.code, "beside --domain" in found.err) == (2, True)
    assert not Path("s.csv").exists()


def test_methods_are_listed(run: Run) -> None:
    found = run("methods")
    assert found.code == 0
    assert all(name in found.out for name in methods.names())
    assert "…" not in found.out  # no word is cut
    listed = {row["name"]: row for row in run("methods", "--json").json["methods"]}
    assert listed.keys() == set(methods.names())
    assert "features" in listed["shot"]["settings"]
    assert listed["tent"]["loops"] == ["stream", "adapt"]


def test_the_default_is_the_recipe_and_a_preset_or_a_likelihood_is_vmps(run: Run) -> None:
    words = ("adapt", "target", *MODEL, "--epochs", "1", "--json", "--out")
    assert run(*words, "a.safetensors", "--set", "neighbours=2").json["method"] == "undrift"
    assert run(*words, "b.safetensors", "--method", "undrift", "--set", "neighbours=2").code == 0
    one, other = undrift.inspect("a.safetensors"), undrift.inspect("b.safetensors")
    assert one.options == other.options
    assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in other.tensors)
    for number, chosen in enumerate((("--preset", "paper"), ("--likelihood", "shot", "--features", "norm"))):
        found = run(*words, f"{number}.safetensors", *chosen)
        assert found.json["method"] is None
        assert undrift.inspect(f"{number}.safetensors").options == undrift.Options()
    assert run(*STREAM, "--answers", "s.csv", "--json").json["method"] == "undrift"
    assert run(*STREAM, "--answers", "d.csv", "--domain", "1.safetensors", "--json").json["method"] is None


def test_adapt_takes_the_values_that_python_takes_for_a_network(run: Run, work: Path) -> None:
    words = ("adapt", "target", "--epochs", "1", "--json")
    small = run(*words, *MODEL, "--out", "b.safetensors")
    assert small.json["options"]["adapt_lr"] == 0.01  # of networks with few weights
    assert run(*words, *MODEL, "--out", "c.safetensors", "--lr", "0.003").json["options"]["adapt_lr"] == 0.003
    (work / "maps_of_tests.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1))\n"
    )
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1))
    save_file(net.state_dict(), "maps.safetensors")
    maps = run(*words, "--model", "maps_of_tests:make", "--weights", "maps.safetensors", "--out", "m.safetensors")
    assert maps.code in (0, 3), maps.err  # random weights may well be made worse
    history = undrift.History.load("m.history.json")
    assert "pixel" in history.note

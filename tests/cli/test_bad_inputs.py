"""What people give by mistake: each gets three facts, an exit code, and loses nothing."""

import ast
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import undrift
from faults import full_disk

from .conftest import MODEL, Run, leftovers

PREDICT = ("predict", "target", *MODEL)


def swap(words: tuple[str, ...], **changes: str) -> tuple[str, ...]:
    out = list(words)
    for name, value in changes.items():
        out[out.index(f"--{name}") + 1] = value
    return tuple(out)


def test_wrong_paths(run: Run) -> None:
    for words, facts in (
        (("predict", "nowhere", *MODEL), ("there is no nowhere", "needed: a folder", "Check the path")),
        (swap(PREDICT, weights="none.safetensors"), ("there is no file none.safetensors", "needed: a checkpoint")),
        (swap(PREDICT, classes="none.txt"), ("none.txt cannot be read", "one class name per line")),
        ((*PREDICT, "--domain", "none.safetensors"), ("there is no file none.safetensors", "domain file")),
        ((*PREDICT, "--out", "no/such/a.csv"), ("there is no folder", "mkdir -p")),
        (("inspect", "none.safetensors"), ("there is no file none.safetensors",)),
        (("evaluate", "--target", "nowhere", *MODEL), ("there is no nowhere", "one folder per class")),
        (("train", "nowhere", "--out", "s.safetensors"), ("there is no nowhere", "digits:mnist")),
    ):
        found = run(*words)
        assert found.code == 1, words
        assert all(fact in found.err for fact in facts), found.err
        assert "Traceback" not in found.err
        assert found.out == ""


def test_empty_folder_and_folder_without_images(run: Run) -> None:
    Path("empty").mkdir()
    assert "empty is empty, no image among it; needed" in run("predict", "empty", *MODEL).err
    assert "no folder with images" in run("evaluate", "--target", "empty", *MODEL).err
    Path("text").mkdir()
    Path("text/a.md").write_text("no image")
    found = run("adapt", "text", *MODEL, "--out", "b.safetensors")
    assert (found.code, "a.md, no image among it" in found.err) == (1, True)


def test_wrong_model_files_and_a_pickle(run: Run, adapted: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, ("owned",)

    for name in ("evil.pt", "evil.safetensors"):
        Path(name).write_bytes(pickle.dumps(Evil()))
        found = run(*swap(PREDICT, weights=name))
        assert (found.code, "needed" in found.err) == (1, True), found.err
        assert "needed" in run(*PREDICT, "--domain", name).err
    assert "never runs code" in run(*swap(PREDICT, weights="evil.pt")).err
    assert not Path("owned").exists()
    torch.save({"x": torch.zeros(2)}, "other.pt")
    assert "does not fit" in run(*swap(PREDICT, weights="other.pt")).err
    assert "is a domain file, which holds no source weights" in run(*swap(PREDICT, weights=str(adapted))).err
    assert "no domain file" in run(*PREDICT, "--domain", "source.safetensors").err
    state = torch.load("other.pt", weights_only=True)
    assert set(state) == {"x"}


def test_a_domain_file_of_another_network(run: Run, adapted: Path) -> None:
    words = ("predict", "target", "--model", "tiny_of_tests:make", "--classes", "names.txt")  # fresh weights
    found = run(*words, "--domain", adapted, "--out", "a.csv")
    assert (found.code, "different source model" in found.err, Path("a.csv").exists()) == (1, True, False)
    assert "tiny_of_tests:make source.safetensors" in found.err  # which one it was


def test_array_of_nan(run: Run) -> None:
    np.save("nan.npy", np.full((4, 8, 8, 3), np.nan, dtype=np.float32))
    found = run("predict", "nan.npy", *MODEL)
    assert (found.code, "holds float32" in found.err, "Convert the array" in found.err) == (1, True, True)


def test_class_counts_that_do_not_match(run: Run) -> None:
    Path("four.txt").write_text("red\ngreen\nblue\nyellow\n")
    for words in (
        PREDICT,
        ("adapt", "target", *MODEL, "--out", "b.safetensors"),
        ("stream", "target", *MODEL, "--answers", "s.csv"),
    ):
        found = run(*swap(words, classes="four.txt"))
        assert (found.code, "4 class names and 3 outputs" in found.err) == (1, True), found.err
    assert not Path("b.safetensors").exists()
    assert not Path("s.csv").exists()
    Path("target/yellow").mkdir()
    next(Path("target/red").iterdir()).rename("target/yellow/a.png")
    found = run("evaluate", "--target", "target", *MODEL)
    assert "classes that the network does not (yellow; 4 against 3" in found.err
    unnamed = tuple(w for w in MODEL if w not in ("--classes", "names.txt"))
    assert "4 classes; the network has 3 outputs" in run("evaluate", "--target", "target", *unnamed).err
    np.save("short.npy", np.zeros(3, dtype=np.int64))
    found = run("evaluate", "--target", "target.npy", "--labels", "short.npy", *MODEL)
    assert "3 labels, target.npy 30 images" in found.err


def test_a_domain_file_has_the_ending_that_folders_of_packs_look_for(run: Run) -> None:
    for words in (("adapt", "target", *MODEL), ("stream", "target", *MODEL, "--answers", "a.csv")):
        for name in ("b.pt", "b", ""):
            found = run(*words, "--out", name)
            assert found.code == 2
            assert "does not end in .safetensors; needed: " in found.err
    assert not Path("a.csv").exists()


def test_misspelt_commands_options_and_values(run: Run) -> None:
    for words, hint in (
        (("adpt",), "Did you mean 'adapt'?"),
        (("adapt", "--epoch", "3"), "Did you mean --epochs?"),
        (("adapt", "target", "--init_fraction", "1", "--out", "b"), "Did you mean --init-fraction?"),
        (("adapt", "target", *MODEL, "--out", "b.safetensors", "--preset", "papre"), "did you mean 'paper'?"),
        (("adapt", "target", *MODEL, "--out", "b.safetensors", "--likelihood", "shoot"), "Did you mean 'shot'?"),
        (("adapt", "target", *MODEL, "--out", "b.safetensors", "--features", "hed"), "did you mean 'head'?"),
        (("predict", "target", "--model", "wrn40-2"), "Did you mean 'wrn40_2'?"),
        (("predict", "target", "--model", "tiny_of_tests:mak"), "Did you mean tiny_of_tests:make?"),
        (("corrupt", "one.png", "--out", "c.png", "--name", "fogg"), "there is no one.png"),
        (("adapt", "target", *MODEL), "--out"),
    ):
        found = run(*words)
        assert (found.code, hint in found.err) in ((2, True), (1, True)), found.err
    found = run(
        *("adapt", "target", *MODEL, "--out", "b.safetensors"),
        *("--init-fraction", "-1", "--estimator", "exact", "--train-samples", "many"),
    )
    assert found.code == 2
    for problem in (
        "init_fraction=-1.0 is below 0",
        "estimator='exact' is not one of",
        "train_samples='many' is not a whole",
    ):
        assert problem in found.err
    assert run("adapt", "target", "--epoch", "3", "--json").json["error"] == "Usage"


def test_flags_that_do_not_belong_together(run: Run, adapted: Path) -> None:
    out = ("--out", "c.safetensors")
    for words, fact in (
        (
            ("adapt", "target", *MODEL, *out, "--likelihood", "entropy", "--beta", "0.3"),
            "--beta does not belong to entropy",
        ),
        (
            ("stream", "target", *MODEL, "--answers", "s.csv", "--likelihood", "shot"),
            "shot needs a pass over a whole domain",
        ),
        (
            ("stream", "target", *MODEL, "--answers", "s.csv", "--domain", adapted, "--prior", "isotropic"),
            "beside --domain",
        ),
        (("evaluate", "--target", "target", *MODEL, "--kl-weight", "2"), "only a continual evaluation adapts"),
        ((*PREDICT, "--out", "a.txt"), "ends in neither .csv nor .parquet"),
        ((*PREDICT, "--abstain-below", "7"), "no probability"),
        ((*PREDICT, "--temperature", "hot"), "neither a number nor auto"),
        ((*PREDICT, "--mean", "a,b,c"), "no number"),
        ((*PREDICT, "--crop", "4x4"), "no size"),
        (("corrupt", "cifar10"), "neither --out nor --sheet"),
    ):
        found = run(*words)
        assert (found.code, fact in found.err) == (2, True), found.err


def test_nothing_is_overwritten_without_force(run: Run, adapted: Path) -> None:
    before = adapted.read_bytes()
    words = ("adapt", "target", *MODEL, "--out", adapted, "--epochs", "1")
    found = run(*words)
    assert (found.code, "is there already" in found.err, "--force" in found.err) == (1, True, True)
    assert adapted.read_bytes() == before
    assert run(*words, "--force").code == 0
    assert adapted.read_bytes() != before
    source = Path("source.safetensors").read_bytes()
    found = run("export", *MODEL, "--domain", adapted, "--out", "source.safetensors", "--force")
    assert (found.code, "is one of the inputs" in found.err) == (2, True)
    assert Path("source.safetensors").read_bytes() == source


def test_a_checkpoint_has_a_file_of_its_own(run: Run) -> None:
    words = ("adapt", "target", *MODEL, "--out", "c.safetensors", "--plot", "--force", "--checkpoint")
    for name, what in (
        ("c.safetensors", "named for two outputs"),
        ("c.history.json", "named for two outputs"),
        ("c.history.png", "named for two outputs"),
        ("source.safetensors", "one of the inputs"),
    ):
        source = Path("source.safetensors").read_bytes()
        found = run(*words, name)
        assert (found.code, f"{name} is {what}" in found.err) == (2, True), found.err
        assert not Path("c.safetensors").exists()
        assert Path("source.safetensors").read_bytes() == source


def test_advice_is_for_the_shell(run: Run, adapted: Path) -> None:
    domain = ("--domain", adapted)
    for words, advice in (
        (
            ("export", *MODEL, *domain, "--out", "n.safetensors"),
            "Give images of the domain: `undrift export … --images",
        ),
        ((*PREDICT, *domain, "--samples", "0"), "Ask for --samples 1 or more, or `undrift export … --images FOLDER`"),
        (("adapt", "target", *MODEL, "--out", "c.safetensors", "--keep", "foo"), "--keep 'foo' is not one of last, b"),
        (("adapt", "target", *MODEL, "--out", "c.safetensors", "--init-fraction", "-1"), "`--help-all` lists every"),
        (("train", "source", "--out", "s.safetensors", "--epochs", "-1"), "`--help-all` lists every option"),
    ):
        found = run(*words)
        assert advice in found.err, found.err
        assert not any(python in found.err for python in ("help(undrift", "images=…")), found.err
    assert run("adapt", "nowhere", "--out", "c.safetensors", "--keep", "foo").code == 2  # before anything is opened
    found = run(*PREDICT, *domain, "--samples", "0", "--batch-size", "7", "--json")
    assert len(found.json["warnings"]) == 1  # once, in the same words


def test_the_library_still_says_what_is_reworded() -> None:
    root = Path(undrift.__file__).parents[1]
    page = ast.parse((root / "undrift" / "cli" / "session.py").read_text())
    named = {ast.unparse(node.targets[0]): node.value for node in page.body if isinstance(node, ast.Assign)}
    words_of = ast.literal_eval(named["ON_THE_SHELL"])
    assert len(words_of) > 20
    text = "".join(path.read_text() for path in root.rglob("*.py") if path.name != "session.py")
    assert [words for words in words_of if words not in text] == []


def test_a_full_disk_loses_nothing(run: Run, work: Path, adapted: Path) -> None:
    before = adapted.read_bytes()
    for words in (
        (*PREDICT, "--out", "a.csv"),
        ("adapt", "target", *MODEL, "--out", adapted, "--epochs", "1", "--force"),
        ("adapt", "target", *MODEL, "--out", "c.safetensors", "--epochs", "1", "--checkpoint", "c.run"),
        ("evaluate", "--target", "target", *MODEL, "--out", "r.json"),
        ("export", *MODEL, "--domain", adapted, "--out", "n.safetensors"),
    ):
        with full_disk():
            found = run(*words)
        assert (found.code, "the disk is full" in found.err, "Free some space" in found.err) == (1, True, True), (
            found.err
        )
    assert adapted.read_bytes() == before
    assert not any(Path(name).exists() for name in ("a.csv", "c.safetensors", "r.json", "n.safetensors", "c.run"))
    assert leftovers(work) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_stream_onto_a_full_disk(run: Run) -> None:
    Path("s.csv").symlink_to("/dev/full")
    found = run("stream", "target", *MODEL, "--answers", "s.csv", "--force")
    assert (found.code, "could not take more answers" in found.err) == (1, True), found.err


def test_the_users_own_code_may_fail(run: Run) -> None:
    for function, fact in (("broken", "raised ValueError: no such depth"), ("not_a_network", "returned an int")):
        found = run("predict", "target", "--model", f"tiny_of_tests:{function}")
        assert (found.code, fact in found.err, "Traceback" in found.err) == (2, True, False), found.err
    found = run(*PREDICT, "--mean", "0.5", "--std", "0.5")  # grey images into a network for colour
    assert (found.code, "the images are 1 × 8 × 8" in found.err) == (1, True), found.err


def test_a_network_without_its_weights_is_warned_of(run: Run) -> None:
    said = "warning: tiny_of_tests:make makes other weights each time it is called, and --weights was not given"
    assert said in run("predict", "target", "--model", "tiny_of_tests:make", "--preprocess", "none").err
    assert "makes other weights" not in run(*PREDICT).err


def test_a_bug_is_not_hidden(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("undrift.cli.predict.rows_of", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(*PREDICT)

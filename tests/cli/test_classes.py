"""Class names that contradict each other: one list is used, and the other is not passed over in silence."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from .conftest import MODEL, NAMES, Run

UNNAMED = (*MODEL[:4], *MODEL[6:])


def test_names_in_another_order_than_the_domain_files_are_said_loudly(run: Run, adapted: Path) -> None:
    Path("turned.txt").write_text("\n".join(reversed(NAMES)))
    for words in (
        ("evaluate", "--target", "target"),
        ("predict", "target"),
        ("export", "--images", "target", "--out", "e.safetensors"),
    ):
        command = (*words, *UNNAMED, "--domain", adapted, "--json")
        assert run(*command).json["warnings"] == []
        assert run(*command, "--classes", "names.txt", "--force").json["warnings"] == []
        loud = run(*command, "--classes", "turned.txt", "--force")
        assert loud.code == 0, loud.err
        (warning,) = loud.json["warnings"]
        assert "--classes turned.txt and the domain file b.safetensors do not name the same classes" in warning
        assert "output 0 'blue' against 'red'" in warning
        assert "the same names in another order" in warning


def test_other_names_than_the_weights_are_said_loudly(run: Run) -> None:
    header = {"undrift": "0", "class_names": json.dumps(["rot", "green", "blue"])}
    save_file(load_file("source.safetensors"), "told.safetensors", header)
    told = (*MODEL[:2], "--weights", "told.safetensors", *MODEL[6:])
    assert run("predict", "target", *told, "--json").json["warnings"] == []
    (warning,) = run("predict", "target", *told, "--classes", "names.txt", "--json").json["warnings"]
    assert "--classes names.txt and the network or its weights do not name" in warning
    assert "output 0 'red' against 'rot'" in warning
    assert "another order" not in warning


def test_a_domain_file_that_contradicts_the_weights_is_said_loudly(run: Run, adapted: Path) -> None:
    header = {"undrift": "0", "class_names": json.dumps(["red", "blue", "green"])}
    save_file(load_file("source.safetensors"), "told.safetensors", header)
    found = run(
        "predict", "target", *MODEL[:2], "--weights", "told.safetensors", *MODEL[6:], "--domain", adapted, "--json"
    )
    (warning,) = found.json["warnings"]
    assert "the domain file b.safetensors and the network or its weights" in warning
    assert "output 1 'green' against 'blue'" in warning

"""Links are the images that they lead to, on disk and in a tar; those that lead nowhere are counted as broken."""

import os
import tarfile

import pytest
import torch

from undrift import data
from undrift._errors import UndriftWarning


def names(domain, root):
    return [source.name.removeprefix(f"{root}/") for source in domain.sources]


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_a_link_in_a_tar_is_the_image_that_it_leads_to(tmp_path, picture, kind):
    (tmp_path / "1.png").write_bytes(picture(0))
    (tmp_path / "2.png").write_bytes(picture(1))

    def link(name, hard, soft):
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, hard if kind == tarfile.LNKTYPE else soft
        return member

    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        tar.addfile(link("dog/early.png", "blobs/7f", "../blobs/7f"))  # it may come before the file, and name no image
        tar.add(tmp_path / "1.png", "./blobs/7f")
        tar.add(tmp_path / "2.png", "cat/2.png")
        tar.addfile(link("dog/chain.png", "./dog/early.png", "early.png"))
        tar.addfile(link("dog/lost.png", "gone.png", "gone.png"))
        tar.addfile(link("dog/round.png", "dog/round.png", "round.png"))
    domain = data.images(path)
    members = ["dog/early.png", "cat/2.png", "dog/chain.png", "dog/lost.png", "dog/round.png"]
    assert names(domain, path) == members
    with pytest.warns(UndriftWarning, match=r"2 of 5 images"):
        held = domain.hold()
    assert torch.equal(held.images[0], held.images[2])
    assert not torch.equal(held.images[0], held.images[1])
    assert held.skipped.reasons[f"{path}/dog/lost.png"] == "a link to gone.png, which is not in the tar"
    assert f"{path}/dog/round.png" in held.skipped.reasons


def test_a_tar_of_hard_linked_files_is_the_same_as_its_folder(tmp_path, plant):
    root = plant(tmp_path / "tree", ["a", "b"], 2)
    os.link(root / "a" / "0.png", root / "b" / "same.png")
    (root / "b" / "soft.png").symlink_to("../a/1.png")
    with tarfile.open(tmp_path / "tree.tar", "w") as tar:
        tar.add(root, ".")
    folder, archive = (data.images(place).hold() for place in (root, tmp_path / "tree.tar"))
    assert len(folder) == len(archive) == 6
    order = sorted(range(6), key=lambda place: archive.names[place])
    assert torch.equal(archive.images[order], folder.images)


def test_links_to_folders_are_followed_once_and_hidden_folders_left_out(tmp_path, plant):
    plant(tmp_path / "elsewhere", ["deep"])
    root = plant(tmp_path / "root", ["a", ".cache", "b/.trash"])
    (root / "b" / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "a" / "round").symlink_to(root)
    (root / "b" / "dangling.png").symlink_to("nowhere.png")
    domain = data.images(root)
    assert names(domain, root) == ["a/0.png", "b/dangling.png", "b/linked/deep/0.png"]
    with pytest.warns(UndriftWarning, match=r"1 of 3 images .*dangling\.png .*No such file"):
        domain.hold()
    assert len(data.images(root / ".cache")) == 1  # asked for


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with a name")
def test_a_pipe_is_broken_and_not_waited_for(tmp_path, plant):
    root = plant(tmp_path / "root", ["a"])
    os.mkfifo(root / "a" / "pipe.png")
    with pytest.warns(UndriftWarning, match=r"1 of 2 images .*pipe\.png \(not a regular file\)"):
        assert len(data.images(root).hold(workers=0)) == 1

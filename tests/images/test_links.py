"""Links are the images that they lead to, on disk and in a tar; those that lead nowhere are counted as broken."""

import os
import tarfile

import pytest
import torch

import undrift
from undrift import UndriftWarning


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
    domain = undrift.images.domain(path)
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
    folder, archive = (undrift.images.domain(place).hold() for place in (root, tmp_path / "tree.tar"))
    assert len(folder) == len(archive) == 6
    order = sorted(range(6), key=lambda place: archive.names[place])
    assert torch.equal(archive.images[order], folder.images)


def test_links_to_folders_are_followed_once_and_hidden_folders_left_out(tmp_path, plant):
    plant(tmp_path / "elsewhere", ["deep"])
    root = plant(tmp_path / "root", ["a", ".cache", "b/.trash"])
    (root / "b" / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "a" / "round").symlink_to(root)
    (root / "b" / "dangling.png").symlink_to("nowhere.png")
    domain = undrift.images.domain(root)
    assert names(domain, root) == ["a/0.png", "b/dangling.png", "b/linked/deep/0.png"]
    with pytest.warns(UndriftWarning, match=r"1 of 3 images .*dangling\.png .*No such file"):
        domain.hold()
    assert len(undrift.images.domain(root / ".cache")) == 1  # asked for


def test_a_link_beside_its_target_renames_nothing(tmp_path, plant):
    root = plant(tmp_path / "cam", ["day1", "day2", ".store/day0"])
    (root / "archive").symlink_to(".store/day0")  # met by no other name
    (tmp_path / "same").symlink_to(root)
    for target in ("day1", "day2"):
        (root / "current").unlink(missing_ok=True)
        (root / "current").symlink_to(target)
        expected = ["archive/0.png", "day1/0.png", "day2/0.png"]
        assert names(undrift.images.domain(root), root) == expected
        assert names(undrift.images.domain(tmp_path / "same"), tmp_path / "same") == expected


def test_a_tar_in_one_hidden_folder_is_read(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for member in (".data/a.png", ".data/b/c.png", ".data/.cache/d.png", ".data/._a.png", ".data"):
            tar.addfile(tarfile.TarInfo(member))
    assert names(undrift.images.domain(tmp_path / "a.tar"), tmp_path / "a.tar") == [".data/a.png", ".data/b/c.png"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with a name")
def test_a_pipe_is_broken_and_not_waited_for(tmp_path, plant):
    root = plant(tmp_path / "root", ["a"])
    os.mkfifo(root / "a" / "pipe.png")
    with pytest.warns(UndriftWarning, match=r"1 of 2 images .*pipe\.png \(not a regular file\)"):
        assert len(undrift.images.domain(root).hold(workers=0)) == 1


def test_a_linked_folder_of_a_tar_is_left_out_and_said(tmp_path, plant):
    root = plant(tmp_path / "tree", ["cat", ".store/d1"])
    (root / "dog").symlink_to(".store/d1")
    (root / "bird").symlink_to("../elsewhere")
    (root / "notes.txt").symlink_to("../notes.txt")  # by its name no folder
    path = root.with_suffix(".tar")
    with tarfile.open(path, "w") as tar:
        tar.add(root, ".")
    with pytest.warns(UndriftWarning, match=r"links to folders.*dog to \.store/d1.*needed.*--dereference") as said:
        assert len(undrift.images.domain(path)) == 1
    assert "bird to ../elsewhere" in str(said[0].message)
    assert "notes.txt" not in str(said[0].message)

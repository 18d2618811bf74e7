"""Manifests that are odd or forged, with a checksum that fits, are refused in words."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventful import TopR
from eventful.errors import ArtefactError
from eventful.export import exportable, read_manifest
from eventful.export.manifest import NAME, _canonical

GRAPHS = ("dense.onnx", "step-6.onnx", "step-12.onnx")


def good() -> dict[str, Any]:
    """What a manifest holds."""
    return {
        "to": "onnx",
        "model": "tiny",
        "versions": {"torch": "2"},
        "config": exportable(TopR(4)).to_dict(),
        "identity": {"fingerprint": "f", "rule": {}, "settings": {}},
        "frame": {"shape": [1, 3, 64, 64], "dtype": "float32"},
        "tokens": 65,
        "forced": 2,
        "state": [
            {"name": f"b/{name}", "input": f"state.{name}", "output": f"next.{name}",
             "shape": [65, 48], "dtype": "float32", "optional": False} for name in ("k", "v")
        ],
        "skeleton": {"dict": {"a": {"leaf": 0, "name": "a"}, "b": {"leaf": 1, "name": "b"}}},
        "dense": GRAPHS[0],
        "steps": [{"file": GRAPHS[1], "width": 6}, {"file": GRAPHS[2], "width": 12}],
        "options": {},
        "files": {name: hashlib.sha256(name.encode()).hexdigest() for name in GRAPHS},
    }  # fmt: skip


def seal(folder: Path, about: dict[str, Any]) -> Path:
    """Write a folder whose checksums are right."""
    for name in GRAPHS:
        (folder / name).write_text(name)
    text = hashlib.sha256(_canonical(about).encode()).hexdigest()
    (folder / NAME).write_text(json.dumps({"format": 1, "checksum": text, **about}))
    return folder


def test_a_good_manifest_is_read(tmp_path: Path) -> None:
    made = read_manifest(seal(tmp_path, good()))
    assert made.widths == [6, 12]
    assert made.policy == TopR(4)


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Set an entry: the keys that lead to it, and the value."""
    *way, last, value = path

    def change(about: dict[str, Any]) -> None:
        for key in way:
            about = about[key]
        about[last] = value

    return change


ODD: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a huge state": put("state", 0, "shape", [10**14]),
    "a large state": put("state", 0, "shape", [2**17, 2**17]),
    "sides below one": put("state", 0, "shape", [65, -48]),
    "a shape of text": put("state", 0, "shape", "65"),
    "no shape": put("state", 0, "shape", 7),
    "an unknown dtype": put("state", 0, "dtype", "float31"),
    "no dtype": put("state", 0, "dtype", "Tensor"),
    "complex": put("frame", "dtype", "complex64"),
    "two of a name": put("state", 0, "input", "state.v"),
    "text for tokens": put("tokens", "many"),
    "more forced than tokens": put("forced", 66),
    "true for a number": put("tokens", True),
    "a huge frame": put("frame", "shape", [1, 3, 10**9, 10**9]),
    "a frame of three sides": put("frame", "shape", [3, 64, 64]),
    "no frame": put("frame", None),
    "a leaf out of range": put("skeleton", "dict", "b", "leaf", 2),
    "a leaf twice": put("skeleton", "dict", "b", "leaf", 0),
    "a negative leaf": put("skeleton", {"leaf": -1, "name": "a"}),
    "no leaf": put("skeleton", {"value": 1}),
    "an unknown part": put("skeleton", {"set": []}),
    "steps that fall": lambda about: about["steps"].reverse(),
    "equal steps": put("steps", 1, "width", 6),
    "a width of text": put("steps", 0, "width", "6"),
    "a step without a width": put("steps", 0, {"file": GRAPHS[1]}),
    "no steps": put("steps", []),
    "no list of steps": put("steps", 3),
    "a step that is dense": put("steps", 0, "file", GRAPHS[0]),
    "no digest": put("files", "dense.onnx", None),
    "a digest of text": put("files", "dense.onnx", "abc"),
    "a number for a name": put("dense", 3),
    "no identity": put("identity", {"device": "cpu"}),
    "a strange policy": put("config", "policy", {"kind": "os.system"}),
    "no policy": put("config", {}),
    "another key": put("more", 1),
    "no list of versions": put("versions", 3),
    "a file that is not listed": lambda about: about["files"].pop("step-12.onnx"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_manifest_is_refused(name: str, tmp_path: Path) -> None:
    about = good()
    ODD[name](about)
    with pytest.raises(ArtefactError, match="export"):
        read_manifest(seal(tmp_path, about))


def test_no_change_of_one_value_gives_another_error(tmp_path: Path) -> None:
    draw = random.Random(0)
    values = [None, -1, 10**30, 1.5, "x", [], {}, [[]], True, float("inf"), "\ud800"]
    for _ in range(60):
        about = copy.deepcopy(good())
        held: Any = about
        while True:
            keys = list(held) if isinstance(held, dict) else range(len(held))
            key = draw.choice(list(keys))
            if not isinstance(held[key], dict | list) or not held[key] or draw.random() < 0.3:
                break
            held = held[key]
        held[key] = draw.choice(values)
        try:
            made = read_manifest(seal(tmp_path, about))
        except ArtefactError:
            continue
        assert made.layout()
        assert made.leaves


def test_files_that_the_manifest_does_not_list_are_refused(tmp_path: Path) -> None:
    seal(tmp_path, good())
    (tmp_path / "weights.bin").write_text("whose digest nobody compares")
    with pytest.raises(ArtefactError, match="does not list"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[]", b"3", b"{}", b"[" * 99999, b""])
def test_a_manifest_that_is_no_manifest_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(ArtefactError, match="damaged"):
        read_manifest(tmp_path)


def test_a_skeleton_without_end_is_refused(tmp_path: Path) -> None:
    about = good()
    part: dict[str, Any] = {"leaf": 0, "name": "a"}
    for _ in range(200):
        part = {"list": [part]}
    about["skeleton"] = part
    with pytest.raises(ArtefactError, match="skeleton"):
        read_manifest(seal(tmp_path, about))

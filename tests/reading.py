"""Clips to read, and the threads that read them."""

from __future__ import annotations

import gc
import threading
import time

import pytest

import videos


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """60 frames that move, 25 a second, with a key frame every 10."""
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    return videos.pan(path, 60, step=(1, 2), key=10)


@pytest.fixture(scope="module")
def pan(tmp_path_factory):
    """12 frames that move by 2 pixels down and 4 across, one key frame."""
    return videos.pan(tmp_path_factory.mktemp("pan") / "pan.mp4", 12, step=(2, 4))


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "eventful.read" and t.is_alive()]


def wait_for(what, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "took too long"
        time.sleep(0.005)


def no_threads() -> bool:
    gc.collect()
    return not threads()

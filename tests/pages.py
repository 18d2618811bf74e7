"""The code of the documentation's pages, and how tests run it.

Comments in a page say what the tests need to know; the site leaves them out:

    <!-- test: with street.mp4, vit; replace 518 by 70 -->   once, for the page: what `GIVEN` makes
                                                             first, and smaller numbers
                                                             (`slowly with` only for slow runs)
    <!-- slow -->                                            the next block is run with `-m slow`
    <!-- not run: needs a camera -->                         the next block is not run, and why

Blocks of a page run in order, in one folder and one namespace. A `bash` block that is run has
commands of `eventful` alone.
"""

from __future__ import annotations

import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import videos
from eventful.cli import main
from eventful.surgery.libraries import load

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.glob("**/*.md")])
_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>slow|not run: [^>]*?) -->\n\n?)?^```(?P<language>\w*)\n(?P<code>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
_TEST = re.compile(r"^<!-- test: (.*?) -->$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        not_run: why it is not run; "" if it is.
    """

    page: Path
    line: int
    language: str
    code: str
    slow: bool
    not_run: str

    @property
    def place(self) -> str:
        """The page and the line, as an editor finds it."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> Iterator[list[str]]:
        """The words of each command of a `bash` block."""
        for line in self.code.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


@dataclass(frozen=True)
class Page:
    """A page with what its comment for the tests says."""

    path: Path
    given: tuple[str, ...]
    given_slowly: tuple[str, ...]
    replaced: tuple[tuple[str, str], ...]
    blocks: tuple[Block, ...]

    @classmethod
    def read(cls, path: Path) -> Page:
        """Parse a page."""
        text = path.read_text()
        given: list[str] = []
        slowly: list[str] = []
        replaced = []
        for comment in _TEST.findall(text):
            for part in filter(None, (part.strip() for part in re.split(r";\s", comment))):
                word, _, rest = " ".join(part.split()).partition(" ")
                if word == "with":
                    given += rest.split(", ")
                elif rest.startswith("with ") and word == "slowly":
                    slowly += rest.removeprefix("with ").split(", ")
                elif word == "replace" and " by " in rest:
                    old, _, new = rest.partition(" by ")
                    replaced.append((old, new))
                else:
                    raise ValueError(f"{path.name}: {part!r} is neither `with` nor `replace`")
        return cls(path, tuple(given), tuple(slowly), tuple(replaced), tuple(_blocks(path, text)))

    def has(self, *, slow: bool) -> bool:
        """Whether there is a block to run in the default run, or in the slow one."""
        return any(
            block.slow == slow and not block.not_run and block.language in ("python", "bash")
            for block in self.blocks
        )

    def smaller(self, code: str) -> str:
        """The code with smaller numbers."""
        for old, new in self.replaced:
            code = code.replace(old, new)
        return code


def _blocks(path: Path, text: str) -> Iterator[Block]:
    for found in _FENCE.finditer(text):
        mark = found["mark"] or ""
        yield Block(
            path,
            text[: found.start("code")].count("\n"),
            found["language"],
            found["code"],
            mark == "slow",
            mark.partition("not run: ")[2],
        )


def run(page: Page, folder: Path, *, slow: bool) -> None:
    """Run the blocks of a page in a folder that is the current one.

    Args:
        slow: also those marked as slow.
    """
    names: dict[str, Any] = {"__name__": "page"}
    for thing in (*page.given, *(page.given_slowly if slow else ())):
        GIVEN[thing](folder, names)
    for block in page.blocks:
        if block.not_run or (block.slow and not slow):
            continue
        code = page.smaller(block.code)
        if block.language == "python":
            # Line numbers of a traceback are those of the page.
            code = "\n" * block.line + code
            exec(compile(code, str(page.path), "exec", dont_inherit=True), names)
        elif block.language == "bash":
            for words in Block(page.path, block.line, "bash", code, False, "").commands():
                _command(words, block)


def _command(words: list[str], block: Block) -> None:
    assert words[0] == "eventful", f"{block.place}: {words[0]} is not run; mark the block"
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        patched.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            main()
    assert not end.value.code, f"{block.place}: {shlex.join(words)} ends with {end.value.code}"


def _street(folder: Path, names: dict[str, Any]) -> None:
    videos.pan(folder / "street.mp4", 8, step=(2, 2))


def _cameras(folder: Path, names: dict[str, Any]) -> None:
    for name in ("door", "yard"):
        videos.pan(folder / f"{name}.mp4", 3, step=(2, 2))
    (folder / "cameras.streams").write_text("door = door.mp4\nyard = yard.mp4\n")


def _vit(folder: Path, names: dict[str, Any]) -> None:
    """`vit`, a small one of timm, and what the page calls it with."""
    import torch

    import eventful

    vit = load("timm").create_model("test_vit", num_classes=0, dynamic_img_size=True).eval()
    names |= {"vit": vit, "eventful": eventful, "torch": torch}


def _weights(folder: Path, names: dict[str, Any]) -> None:
    """A file of weights of timm's smallest ViT."""
    from safetensors.torch import save_file

    save_file(load("timm").create_model("test_vit").state_dict(), folder / "VIT_S.safetensors")


def _dinov2(folder: Path, names: dict[str, Any]) -> None:
    """`VIT_S.safetensors`, random, of a model that returns features."""
    from safetensors.torch import save_file

    model = load("timm").create_model("vit_small_patch14_dinov2")
    save_file(model.state_dict(), folder / "VIT_S.safetensors")


def _yolos(folder: Path, names: dict[str, Any]) -> None:
    transformers = load("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    sizes = {"image_size": [64, 96], "patch_size": 16, "num_detection_tokens": 5}
    config = transformers.YolosConfig(**small, **sizes, intermediate_size=48)
    transformers.YolosForObjectDetection(config).save_pretrained(folder / "yolos")


def _model(folder: Path, names: dict[str, Any]) -> None:
    """`model`, not converted."""
    _vit(folder, names)
    names["model"] = names.pop("vit")


def _batch(folder: Path, names: dict[str, Any]) -> None:
    """`batch` of two streams and their `frames`, one of them not finite."""
    _vit(folder, names)
    torch, eventful = names["torch"], names["eventful"]
    names["batch"] = eventful.StreamBatch(eventful.convert(names.pop("vit")))
    for name in ("door", "yard"):
        names["batch"].join(name)
    names["frames"] = torch.rand(2, 3, 64, 64)
    names["frames"][1] = torch.nan


def _video(folder: Path, names: dict[str, Any]) -> None:
    """`video`, frames of the generated world, and `image`, one of them."""
    from eventful.video.world import World

    names["video"] = list(World(seed=7, frames=2))
    names["image"] = names["video"][0]


def _sources(folder: Path, names: dict[str, Any]) -> None:
    """A cluster of one worker with a tiny model, and one video."""
    videos.pan(folder / "hall.mp4", 12, size=(64, 96), step=(0, 1))
    (folder / "sources.toml").write_text(
        '[cluster]\nmodel = "timm:test_vit"\nsize = "64x96"\n\n'
        '[[stream]]\nname = "hall"\nsource = "hall.mp4"\n'
    )


def _views(folder: Path, names: dict[str, Any]) -> None:
    """`views`: one, for the paper's ViViT."""
    import torch

    names["views"] = [torch.rand(3, 32, 320, 320)]


def _exported(format: str, source: str) -> Callable[[Path, dict[str, Any]], None]:
    def make(folder: Path, names: dict[str, Any]) -> None:
        from eventful.paper.data import open_dataset
        from eventful.paper.data.export import export

        videos = open_dataset(source, "val")
        export(videos, folder / "data" / ("mot15" if format == "mot" else format), format)
        names["video"] = videos[0]

    return make


GIVEN: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    "street.mp4": _street,
    "cameras.streams": _cameras,
    "vit": _vit,
    "VIT_S.safetensors": _weights,
    "DINOv2": _dinov2,
    "yolos/": _yolos,
    "model": _model,
    "batch": _batch,
    "video": _video,
    "views": _views,
    "sources.toml": _sources,
    "data/mot15": _exported("mot", "world:street?videos=1&frames=3"),
    "data/kinetics": _exported("kinetics", "world:actions?videos=1"),
}

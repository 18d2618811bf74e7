"""ImageNet VID and DET in the official format: `ILSVRC2015/{Data,Annotations,ImageSets}`.

DET serves training: its images that show one of VID's classes, each as a video of one frame, with
boxes of other classes left out.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from eventful.errors import DataError
from eventful.paper.data.problems import OnProblem, malformed, missing, stop
from eventful.paper.data.records import Box, Video, VideoSet, pieces
from eventful.paper.data.tables import lines
from eventful.video.source import ImageFiles

# WordNet id, name, number among DET's 200 classes; the order is that of VID's numbers 1 to 30.
CLASSES = (
    ("n02691156", "airplane", 2),
    ("n02419796", "antelope", 4),
    ("n02131653", "bear", 20),
    ("n02834778", "bicycle", 24),
    ("n01503061", "bird", 26),
    ("n02924116", "bus", 33),
    ("n02958343", "car", 37),
    ("n02402425", "cattle", 39),
    ("n02084071", "dog", 58),
    ("n02121808", "domestic_cat", 59),
    ("n02503517", "elephant", 64),
    ("n02118333", "fox", 70),
    ("n02510455", "giant_panda", 74),
    ("n02342885", "hamster", 84),
    ("n02374451", "horse", 92),
    ("n02129165", "lion", 103),
    ("n01674464", "lizard", 105),
    ("n02484322", "monkey", 113),
    ("n03790512", "motorcycle", 114),
    ("n02324045", "rabbit", 141),
    ("n02509815", "red_panda", 144),
    ("n02411705", "sheep", 155),
    ("n01726692", "snake", 159),
    ("n02355227", "squirrel", 166),
    ("n02129604", "tiger", 182),
    ("n04468005", "train", 185),
    ("n01662784", "turtle", 188),
    ("n04530566", "watercraft", 197),
    ("n02062744", "whale", 198),
    ("n02391049", "zebra", 200),
)
NAMES = tuple(name for _, name, _ in CLASSES)
LABELS = {wordnet: label for label, (wordnet, _, _) in enumerate(CLASSES)}

VAL, TRAIN, DET = "val", "train", "det_train"


@dataclass(frozen=True)
class XmlBoxes:
    """Boxes from one XML file per frame, read on access.

    Args:
        folder: Where the files lie.
        names: Their paths inside it, in the order of the frames.
        strict: Whether a class outside VID's is an error (VID) or left out (DET), and likewise a
            file that is not there (DET has none for images without objects).
    """

    folder: Path
    names: tuple[str, ...]
    strict: bool = True

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Box, ...]:
        path = self.folder / self.names[index]
        if not path.is_file():
            if self.strict:
                raise missing(path, "the annotations of a frame")
            return ()
        try:
            root = ElementTree.parse(path).getroot()
        except ElementTree.ParseError as error:
            raise malformed(path, error.position[0], "well-formed XML", str(error)) from None
        if root.tag != "annotation":
            raise malformed(path, "top level", "<annotation>", f"<{root.tag}>")
        objects = root.findall("object")
        boxes = (self._box(path, number, node) for number, node in enumerate(objects, start=1))
        return tuple(box for box in boxes if box is not None)

    def _box(self, path: Path, number: int, node: ElementTree.Element) -> Box | None:
        where = f"object {number}"
        wordnet = node.findtext("name")
        if wordnet not in LABELS:
            if self.strict or wordnet is None:
                raise malformed(path, where, "<name> with the WordNet id of a VID class", wordnet)
            return None

        def side(tag: str) -> float:
            text = node.findtext(f"bndbox/{tag}")
            try:
                value = float(text or "")
            except ValueError:
                value = math.nan
            if not math.isfinite(value):
                raise malformed(path, where, f"<bndbox> with a number in <{tag}>", text)
            return value

        x1, y1, x2, y2 = side("xmin"), side("ymin"), side("xmax"), side("ymax")
        if x2 < x1 or y2 < y1:
            raise malformed(path, where, "xmin <= xmax and ymin <= ymax", (x1, y1, x2, y2))
        track = node.findtext("trackid", "")
        return Box(x1, y1, x2, y2, LABELS[wordnet], int(track) if track.isdigit() else None)


def root_of(path: Path) -> Path | None:
    """The folder that holds `Data` and `ImageSets`: this one or its `ILSVRC2015`."""
    for root in (path, path / "ILSVRC2015", path / "ILSVRC"):
        if (root / "ImageSets").is_dir() and ((root / "Data").is_dir() or _lists(root)):
            return root
    return None


def splits(path: Path) -> tuple[str, ...]:
    """Splits whose lists are there."""
    root = root_of(path)
    if root is None:
        return ()
    sets = root / "ImageSets"
    found = [VAL] if (sets / "VID" / "val.txt").is_file() else []
    found += [TRAIN] if any((sets / "VID").glob("train_*.txt")) else []
    found += [DET] if any((sets / "DET").glob("train_*.txt")) else []
    return tuple(found)


def parts(path: Path) -> dict[str, bool]:
    """What the format consists of, and whether it is there."""
    root = root_of(path) or path
    names = ["ImageSets/VID/val.txt", "Data/VID/val", "Annotations/VID/val"]
    names += ["ImageSets/VID/train_1.txt", "Data/VID/train", "Annotations/VID/train"]
    names += ["ImageSets/DET/train_2.txt", "Data/DET/train", "Annotations/DET/train"]
    return {name: (root / name).exists() for name in names}


def open_imagenet(path: Path, split: str = VAL, on_problem: OnProblem = stop) -> VideoSet:
    """A split of VID, or of DET for training.

    A snippet whose frames have gaps becomes one video per piece (see `pieces`).

    Args:
        path: The folder `ILSVRC2015`, or the one it lies in.
        split: `"val"`, `"train"` or `"det_train"`.
    """
    root = root_of(path)
    if root is None:
        raise missing(path / "ImageSets", "the lists of ImageNet VID beside Data and Annotations")
    readers = {VAL: _val, TRAIN: _train, DET: _det}
    if split not in readers:
        raise missing(root / "ImageSets" / "VID" / f"{split}.txt", f"splits are {list(readers)}")
    videos = tuple(readers[split](root, on_problem))
    return VideoSet("imagenet-vid", split, "detection", NAMES, videos)


def _val(root: Path, on_problem: OnProblem) -> Iterator[Video]:
    """Videos of val.txt: lines `<snippet>/<frame> <index>`, the index counting from 1."""
    snippets: dict[str, dict[int, tuple[str, int]]] = {}  # name and line of each frame
    path = root / "ImageSets" / "VID" / "val.txt"
    for number, line in lines(path, "the list of validation frames"):
        fields = line.split()
        snippet, _, frame = fields[0].rpartition("/")
        if len(fields) != 2 or not snippet or not frame.isdigit() or not fields[1].isdigit():
            on_problem(malformed(path, number, "'<snippet>/<frame number> <index>'", line))
            continue
        _, before = snippets.setdefault(snippet, {}).setdefault(int(frame), (frame, number))
        if before != number:
            on_problem(malformed(path, number, f"each frame once (line {before} has it)", line))
    for snippet, frames in sorted(snippets.items()):
        named = {number: name for number, (name, _) in frames.items()}
        yield from _videos(root, f"VID/val/{snippet}", named, snippet)


def _train(root: Path, on_problem: OnProblem) -> Iterator[Video]:
    """Videos of train_1.txt to train_30.txt, each once; every image of their folders."""
    wanted: dict[str, str] = {}
    for number, (_, name, _) in enumerate(CLASSES, start=1):
        path = root / "ImageSets" / "VID" / f"train_{number}.txt"
        for snippet, label, line in _labelled(path, f"training snippets with {name}", on_problem):
            if label == 1:
                wanted.setdefault(snippet, f"{path}, line {line}")
    for snippet, listed in sorted(wanted.items()):
        folder = root / "Data" / "VID" / "train" / snippet
        frames = {int(p.stem): p.stem for p in folder.glob("*.JPEG") if p.stem.isdigit()}
        if not frames:
            on_problem(missing(folder, f"frames NNNNNN.JPEG of a snippet named in {listed}"))
            continue
        yield from _videos(root, f"VID/train/{snippet}", frames, snippet)


def _det(root: Path, on_problem: OnProblem) -> Iterator[Video]:
    """Images that DET's lists call positive for one of VID's classes, all its objects marked."""
    wanted: set[str] = set()
    for _, name, number in CLASSES:
        path = root / "ImageSets" / "DET" / f"train_{number}.txt"
        listed = _labelled(path, f"DET's training images with {name}", on_problem)
        wanted.update(image for image, label, _ in listed if label == 1)
    images, notes = root / "Data" / "DET" / "train", root / "Annotations" / "DET" / "train"
    for image in sorted(wanted):
        files = ImageFiles(images, (f"{image}.JPEG",))
        yield Video(image, files, XmlBoxes(notes, (f"{image}.xml",), strict=False))


def _labelled(path: Path, why: str, on_problem: OnProblem) -> Iterator[tuple[str, int, int]]:
    """Name, label and line number of a list of `<name> <label>` with labels -1, 0 and 1."""
    try:
        for number, line in lines(path, f"the list of {why}"):
            *name, label = line.split()
            if len(name) != 1 or label not in {"-1", "0", "1"}:
                on_problem(malformed(path, number, "'<name> <label>', label -1, 0 or 1", line))
                continue
            yield name[0], int(label), number
    except DataError as error:
        on_problem(error)


def _videos(root: Path, where: str, frames: Mapping[int, str], name: str) -> Iterator[Video]:
    """The pieces of a snippet.

    Args:
        frames: Number and name of each frame.
    """
    numbers = sorted(frames)
    for title, part in pieces(name, numbers):
        names = [frames[number] for number in numbers[part]]
        yield Video(
            title,
            ImageFiles(root / "Data" / where, tuple(f"{frame}.JPEG" for frame in names)),
            XmlBoxes(root / "Annotations" / where, tuple(f"{frame}.xml" for frame in names)),
        )


def _lists(root: Path) -> bool:
    return any((root / "ImageSets" / part).is_dir() for part in ("VID", "DET"))

"""A world with ground truth: streets and yards with figures, filmed by cameras of several kinds.

    from eventful.video.world import World

    for pixels in World(seed=7, camera="hand"):
        ...

Everything follows from the seed and the time, so that frames can be asked for in any order, on a
CPU or a GPU, and nothing is stored.
"""

from eventful.video.world.actions import ACTIONS
from eventful.video.world.camera import CAMERAS, RATE
from eventful.video.world.clips import SIZE, World, as_bytes
from eventful.video.world.figures import CLASSES
from eventful.video.world.rendering import Shot, render
from eventful.video.world.truth import Boxes, Truth, boxes_of, truth_of

__all__ = [
    "ACTIONS",
    "CAMERAS",
    "CLASSES",
    "RATE",
    "SIZE",
    "Boxes",
    "Shot",
    "Truth",
    "World",
    "as_bytes",
    "boxes_of",
    "render",
    "truth_of",
]

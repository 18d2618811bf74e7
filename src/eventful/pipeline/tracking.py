"""Tracks: the same number for the same object in every frame, by the package `trackers`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from eventful.pipeline.annotate import as_supervision
from eventful.pipeline.predictions import Prediction
from eventful.pipeline.settings import TrackerName
from eventful.surgery.libraries import load

LEAST = 0.1  # detections below this score are no help to a tracker
_CLASSES = {"bytetrack": "ByteTrackTracker", "sort": "SORTTracker"}


class Tracks:
    """Follows the detections of one source.

    Args:
        rate: frames a second.
        score: detections from this score on can begin a track.
        first: the number of the first track; a resumed run goes on behind those it has given.

    Attributes:
        count: the number that the next track gets, at least.
    """

    def __init__(self, name: TrackerName, rate: float, score: float, first: int = 0) -> None:
        library = load("trackers")
        options = {"frame_rate": rate, "track_activation_threshold": score}
        if name == "bytetrack":
            options["high_conf_det_threshold"] = score
        self._tracker: Any = getattr(library, _CLASSES[name])(**options)
        self._first = self.count = first

    def follow(self, prediction: Prediction) -> Prediction:
        """The same prediction with the numbers of its tracks.

        It takes detections of low scores, too: a tracker needs them where an object is half hidden.
        """
        found = prediction.detections
        if found is None:
            return prediction
        kept = found[found.scores >= LEAST]
        given = as_supervision(kept)
        given.data["row"] = np.arange(len(kept))
        tracked = self._tracker.update(given)
        tracks: list[int | None] = [None] * len(kept)
        for row, track in zip(tracked.data.get("row", ()), tracked.tracker_id, strict=True):
            if track >= 0:
                tracks[int(row)] = self._first + int(track)
                self.count = max(self.count, self._first + int(track) + 1)
        return replace(prediction, detections=kept, tracks=tuple(tracks))

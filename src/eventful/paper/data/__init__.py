"""Datasets on disk as videos with boxes or a label, whatever their format."""

from __future__ import annotations

from eventful.paper.data.catalog import (
    FORMATS,
    LAYOUTS,
    DatasetFormat,
    Layout,
    open_dataset,
    recognise,
)
from eventful.paper.data.problems import Problems
from eventful.paper.data.records import Box, Frame, Video, VideoSet
from eventful.paper.data.views import EPIC_VIEWS, KINETICS_VIEWS, View, ViewPlan

__all__ = [
    "EPIC_VIEWS",
    "FORMATS",
    "KINETICS_VIEWS",
    "LAYOUTS",
    "Box",
    "DatasetFormat",
    "Frame",
    "Layout",
    "Problems",
    "Video",
    "VideoSet",
    "View",
    "ViewPlan",
    "open_dataset",
    "recognise",
]

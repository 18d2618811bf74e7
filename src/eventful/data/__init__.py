"""Datasets on disk as videos with boxes or a label, whatever their layout."""

from __future__ import annotations

from eventful.data.catalog import LAYOUTS, Layout, open_dataset, recognise
from eventful.data.problems import Problems
from eventful.data.records import Box, Frame, Video, VideoSet
from eventful.data.views import EPIC_VIEWS, KINETICS_VIEWS, View, ViewPlan

__all__ = [
    "EPIC_VIEWS",
    "KINETICS_VIEWS",
    "LAYOUTS",
    "Box",
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

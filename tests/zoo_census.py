"""Classes of the census that laws run on as well: what is not in the zoo of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from census import tensors
from census_transformers import CASES
from zoo import Entry

# Those that the default run takes; the others are slow.
QUICK = ("RfDetrForObjectDetection", "Sam3VisionModel")
NAMES = (
    *QUICK,
    "EomtDinov3ForUniversalSegmentation",
    "LwDetrForObjectDetection",
    "EomtForUniversalSegmentation",
    "SamHQVisionModel",
    "DepthProForDepthEstimation",
    "BeitModel",
    "Data2VecVisionModel",
    "Sapiens2Model",
    "MLCDVisionModel",
    "Step3p7VisionModel",
    "Llama4VisionModel",
    "MgpstrModel",
    "VitPoseForPoseEstimation",
    "DPTForDepthEstimation",
    "OwlViTForObjectDetection",
    "GotOcr2VisionEncoder",
    "UperNetForSemanticSegmentation",
    "ZoeDepthForDepthEstimation",
)


def joined(result: Any) -> Tensor:
    """Every number of a result that belongs to a frame, one row for each."""
    if "pred_boxes" in result:  # detectors return their layers, too, and not by frame
        result = (result.logits, result.pred_boxes)
    found = list(tensors(result))
    rows = [tensor.reshape(len(tensor), -1) for tensor in found if len(tensor) == len(found[0])]
    return torch.cat(rows, dim=1)


def still(name: str) -> str:
    """Which row of `tolerances` a still video is compared by.

    Classes named for a task have a decoder or convolutions behind their transformer, which enlarge
    how it rounds: by how much depends on the processor.
    """
    return "step" if name.endswith(("Model", "Encoder")) else "model"


ZOO: dict[str, Entry] = {
    case.name: Entry(
        case.make,
        (case.shape[-2], case.shape[-1]),
        joined,
        case.call,
        still=still(case.name),
    )
    for case in CASES
    if case.name in NAMES
}

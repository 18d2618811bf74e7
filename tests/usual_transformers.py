"""State of a stream of detectors, segmenters and depth models at the size they are made for.

`python tests/usual_transformers.py` writes the table of docs/models.md again. Models are made on
torch's meta device: sizes without numbers.
"""

from __future__ import annotations

import torch

import eventful
from census import replace_table
from eventful.surgery.libraries import load

transformers = load("transformers")

MODELS = (
    ("RfDetrForObjectDetection", "RfDetrConfig"),
    ("LwDetrForObjectDetection", "LwDetrConfig"),
    ("Owlv2ForObjectDetection", "Owlv2Config"),
    ("YolosForObjectDetection", "YolosConfig"),
    ("EomtForUniversalSegmentation", "EomtConfig"),
    ("SamVisionModel", "SamVisionConfig"),
    ("SamHQVisionModel", "SamHQVisionConfig"),
    ("Sam3VisionModel", "Sam3VisionConfig"),
    ("DepthProForDepthEstimation", "DepthProConfig"),
    ("VitPoseForPoseEstimation", "VitPoseConfig"),
)


def line(kind: str, config: str) -> str:
    """A row of the table."""
    with torch.device("meta"):
        model = getattr(transformers, kind)(getattr(transformers, config)()).eval()
    found = eventful.inspect(model)
    assert found.size is not None
    height, width = found.size
    state = [f"{found.state_bytes[preset] / 1e6:,.0f} MB" for preset in ("fast", "exact", "paper")]
    blocks = f"{found.matched} of {len(found.blocks)}"
    tokens = sum(found.tokens.values())
    return f"| `{kind}` | {height} x {width} | {tokens:,} | {blocks} | {' | '.join(state)} |"


def table() -> str:
    """The table as it stands in the docs."""
    head = [
        "| class, default configuration | frame | tokens | blocks | fast | exact | paper |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    return "\n".join([*head, *(line(*names) for names in MODELS)])


if __name__ == "__main__":
    replace_table("transformers-state", table())

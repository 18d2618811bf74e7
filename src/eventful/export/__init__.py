"""Out of Python: steps as graphs for onnxruntime, OpenVINO and AOTInductor, and what runs them."""

from eventful.export.manifest import Manifest, read_manifest
from eventful.export.runtime import Runtime, RuntimeRecord, RuntimeStream
from eventful.export.subject import exportable
from eventful.export.writing import export

__all__ = [
    "Manifest",
    "Runtime",
    "RuntimeRecord",
    "RuntimeStream",
    "export",
    "exportable",
    "read_manifest",
]

"""Features of every frame of a camera or a video, in a file.

    python examples/features_of_a_camera.py camera:0 --frames 300
    python examples/features_of_a_camera.py street.mp4 --weights VIT_S.safetensors

Needs: pip install "eventful-transformers[timm,video]"
"""

import argparse

import eventful  # before timm: it repairs a torchvision that was built for another torch
import timm
import torch
from safetensors.torch import load_file, save_file

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("source", help="a video, a folder of images, camera:0, or an address")
parser.add_argument("--model", default="vit_small_patch14_dinov2", help="a ViT of timm")
parser.add_argument("--weights", help="its weights, .safetensors; without them they are random")
parser.add_argument("--size", type=int, default=518, help="side of the frames in pixels")
parser.add_argument("--frames", type=int, help="stop after so many")
parser.add_argument("--device", default="cpu")
parser.add_argument("--out", default="features.safetensors")
arguments = parser.parse_args()

vit = timm.create_model(arguments.model, img_size=arguments.size, num_classes=0).eval()
if arguments.weights:
    vit.load_state_dict(load_file(arguments.weights))
model = eventful.convert(vit.to(arguments.device))

features, times = [], []
# A model says which colours it was trained with: `model=vit` normalises the frames accordingly.
with (
    eventful.read(arguments.source, arguments.size, model=vit) as frames,
    eventful.Stream(model) as stream,
):
    for frame in frames:
        features.append(stream(frame.to(arguments.device)).cpu())  # what vit(frame) returns
        times.append(frame.time)
        if stream.last.stale:  # so much has changed that the output is not to be relied on
            print(f"{frame.time:.2f} s: stale, estimated error {stream.last.estimate:.2f}")
        if len(features) == arguments.frames:
            break
    print(stream.summary())

save_file({"features": torch.cat(features), "seconds": torch.tensor(times)}, arguments.out)
print(f"{len(features)} frames: {arguments.out}")

"""Several cameras through one model. One may fail, and the others go on.

    python examples/many_cameras.py camera:0 rtsp://user:password@host/yard street.mp4

Needs: pip install "eventful-transformers[timm,video]"
"""

import argparse

import eventful  # before timm: it repairs a torchvision that was built for another torch
import timm
from eventful.errors import EventfulError, NonFiniteError

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("sources", nargs="+", help="videos, folders of images, cameras, addresses")
parser.add_argument("--model", default="vit_small_patch14_dinov2", help="a ViT of timm")
parser.add_argument("--size", type=int, default=518, help="side of the frames in pixels")
parser.add_argument("--frames", type=int, help="stop after so many steps")
parser.add_argument("--share", type=float, default=0.1, help="of the tokens, for all together")
parser.add_argument("--device", default="cpu")
arguments = parser.parse_args()

vit = timm.create_model(arguments.model, img_size=arguments.size, num_classes=0).eval()
model = eventful.convert(vit.to(arguments.device))
# The cameras share their tokens: still ones leave theirs to busy ones.
batch = eventful.StreamBatch(model, eventful.Shared(arguments.share))

running = {}
for number, source in enumerate(arguments.sources):
    try:
        reader = eventful.read(source, arguments.size, model=vit)  # one size for all of them
    except EventfulError as error:
        print(f"camera {number} is left out: {error}")
        continue
    running[f"camera {number}"] = iter(reader)
    batch.join(f"camera {number}")

steps = 0
while running and steps != arguments.frames:
    frames = {}
    for name in list(running):
        try:
            frames[name] = next(running[name]).to(arguments.device)
        except (StopIteration, EventfulError) as error:
            print(f"{name} {'ended' if isinstance(error, StopIteration) else f'failed: {error}'}")
            del running[name]
            batch.leave(name)  # frees its memory
    if not frames:
        break
    try:
        rows = batch(eventful.stack(frames.values()), streams=list(frames))
        features = dict(zip(frames, rows, strict=True))
    except NonFiniteError as error:  # one bad frame: the other cameras were stepped
        features = dict(zip(error.good, error.result, strict=True)) if error.good else {}
    steps += 1
    counts = next(iter(batch.last.gates.values())).counts.tolist()  # tokens updated, by camera
    updated = dict(zip(features, counts, strict=False))
    print(f"step {steps}: {len(features)} cameras, tokens updated: {updated}")
print(batch.summary())

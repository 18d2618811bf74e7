"""Objects in a video by YOLOS of transformers, within an error or a time for each frame.

    python examples/detections_with_a_budget.py street.mp4 --error 0.1
    python examples/detections_with_a_budget.py camera:0 --ms 40 --device cuda

Needs: pip install "eventful-transformers[hf,video]"
"""

import argparse

import eventful  # before transformers: it repairs a torchvision that was built for another torch
from transformers import AutoConfig, AutoModelForObjectDetection

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("source", help="a video, a folder of images, camera:0, or an address")
parser.add_argument("--model", default="hustvl/yolos-small", help="a name on the hub, or a folder")
parser.add_argument("--random", action="store_true", help="random weights: the config is enough")
parser.add_argument("--size", type=int, nargs=2, default=(512, 864), help="height and width")
parser.add_argument("--error", type=float, default=0.1, help="relative error of the features")
parser.add_argument("--ms", type=float, help="milliseconds a frame may take, in place of an error")
parser.add_argument("--score", type=float, default=0.7, help="boxes below it are not printed")
parser.add_argument("--frames", type=int, help="stop after so many")
parser.add_argument("--device", default="cpu")
arguments = parser.parse_args()

if arguments.random:
    config = AutoConfig.from_pretrained(arguments.model)
    detector = AutoModelForObjectDetection.from_config(config)
else:
    detector = AutoModelForObjectDetection.from_pretrained(arguments.model)
model = eventful.convert(detector.eval().to(arguments.device))

# An error is held in the mean over frames, by comparisons with the dense model now and then.
# A time is held by updating as many tokens as fit into it.
budget = eventful.ErrorBudget(arguments.error)
if arguments.ms is not None:
    budget = eventful.LatencyBudget(arguments.ms)

with eventful.Stream(model, budget=budget) as stream:
    for frame in eventful.read(arguments.source, tuple(arguments.size)):
        found = stream(pixel_values=frame.to(arguments.device))  # what detector(...) returns
        scores, labels = found.logits[0].softmax(-1)[:, :-1].max(-1)  # the last class is "nothing"
        kept = scores > arguments.score
        print(f"{frame.time:.2f} s: {stream.last.fraction:.0%} of the tokens, {kept.sum()} objects")
        for score, label, box in zip(
            scores[kept], labels[kept], found.pred_boxes[0][kept], strict=True
        ):
            middle = ", ".join(f"{value:.2f}" for value in box.tolist())  # x, y, width, height
            print(f"    {detector.config.id2label[int(label)]} {score:.0%} at {middle}")
        if stream.summary().frames == arguments.frames:
            break
    print(stream.budget_report)  # what was asked for, what is held, and what limits it
    print(stream.summary())

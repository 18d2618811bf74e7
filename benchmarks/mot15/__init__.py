"""People in MOT15: a detector on a real ViT-S/14, dense, under every preset, and skipping frames.

    python -m benchmarks.mot15 --data MOT15 --weights VIT_S.safetensors --out DIR --device cuda

The backbone stays frozen. A small head is trained on its features of `train`, then mAP50 on `val`
is measured for every preset at several shares of tokens, beside the dense model on fewer frames
at the same number of operations. Results go to benchmarks/results/mot15, docs/mot15.md
and docs/images/mot15.png, and to DIR. DIR also keeps the head, which is derived from data that is
not ours to share, so it may not lie in a tracked folder. A run that is stopped goes on where it was
when started again with the same DIR.

    python -m benchmarks.mot15 ... --predict-only
    python -m benchmarks.mot15 --score DIR

detects on one machine and scores on another, which needs neither data nor weights. `--train-only`
stops after training, `--head FILE` uses a head that was trained before. `--variant fast-both
--share 0.06` measures variants of `fast` (selection by context, memory moved with the picture).

    python -m benchmarks.mot15 --from DIR/results.json

stores and draws the results of a run made elsewhere.
"""

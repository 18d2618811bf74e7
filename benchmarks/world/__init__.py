"""The paper's claims on generated videos: measured, stored, and put into docs/results.md.

    python -m benchmarks.world --out DIR --device cuda

runs `eventful reproduce all` into DIR, then stores tables in benchmarks/results/world, figures in
docs/images, and the numbers and sentences of docs/results.md. A run that is stopped goes on where
it was when started again with the same DIR. `--only NAME` runs and stores one, `--weights r50=FILE`
gives further weights, `--videos` and `--frames` make it shorter.

    python -m benchmarks.world --from DIR

stores what is in DIR, without running anything. Without `--out` and `--from`, the page is written
anew from what is stored.
"""

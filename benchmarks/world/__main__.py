"""Parse, run, store."""

from __future__ import annotations

import argparse
from pathlib import Path

import benchmarks.world
from benchmarks.world.page import RESULTS, store, write_page
from eventful.cli import reproduce_run
from eventful.cli.options import Evaluation
from eventful.paper.evaluate.experiment import world_names


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=benchmarks.world.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder to run in")
    parser.add_argument("--from", dest="source", type=Path, help="folder of a run to store")
    parser.add_argument("--only", action="append", choices=world_names(), help="default: all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--videos", type=int)
    parser.add_argument("--frames", type=int)
    parser.add_argument("--weights", action="append", metavar="[NAME=]FILE", default=[])
    parser.add_argument("--no-resume", action="store_true", help="delete what is in --out")
    parser.add_argument("--no-publish", action="store_true", help="run, and store nothing")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.out is not None:
        how = Evaluation(
            videos=arguments.videos,
            workers=arguments.workers,
            device=arguments.device,
            out=arguments.out,
            resume=not arguments.no_resume,
        )
        reproduce_run.run_all(
            None, arguments.weights, how, arguments.frames, only=arguments.only or ()
        )
        if arguments.no_publish:
            return
    source = arguments.source or arguments.out
    for name in arguments.only or world_names():
        if source is not None and (source / name / "results.json").is_file():
            store(source / name, name)
    write_page()
    print(f"wrote docs/results.md from {RESULTS}")


if __name__ == "__main__":
    main()

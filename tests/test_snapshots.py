"""Snapshots that cannot be used, or not made: a typed error that says what to do."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import itertools
import json

import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

import eventful
from eventful import Config, TopR, errors
from eventful.tokens.selection import Selection
from guarding import ENTRY, clip, model, stream  # noqa: F401
from tolerances import assert_near


def parts_of(data):
    """The tensors and the texts of a snapshot."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return load_tensors(data), header["__metadata__"]


def swap(tensors):
    """Exchange two tensors of one shape."""
    names = list(tensors)
    one, two = next(
        (a, b)
        for a, b in itertools.combinations(names, 2)
        if tensors[a].shape == tensors[b].shape and not torch.equal(tensors[a], tensors[b])
    )
    tensors[one], tensors[two] = tensors[two], tensors[one]


class TestSnapshots:
    def test_of_another_model(self, stream, clip):
        stream(clip[0])
        data = stream.snapshot()
        torch.manual_seed(5)
        other = eventful.convert(ENTRY.make(), stream.config)
        with pytest.raises(errors.SnapshotError, match="other weights"):
            eventful.Stream.load(other, data)

    def test_it_is_written_or_returned(self, stream, clip, tmp_path):
        stream(clip[0])
        assert stream.snapshot(tmp_path / "a") is None
        assert len((tmp_path / "a").read_bytes()) == len(stream.snapshot())
        batch = eventful.StreamBatch(stream.model)
        batch.join("old", snapshot=tmp_path / "a")
        assert batch.snapshot("old", tmp_path / "b") is None
        eventful.Stream.load(stream.model, tmp_path / "b")(clip[1])

    def test_of_a_stream_that_is_to_flush(self, stream, clip):
        stream(clip[0])
        stream.flush()
        again = eventful.Stream.load(stream.model, stream.snapshot())
        again(clip[1])
        assert again.last.flushed == [True]

    def test_of_another_rule(self, stream, model, clip):
        stream(clip[0])
        other = eventful.convert(model, Config.fast(TopR(3), pool=2))
        with pytest.raises(errors.SnapshotError, match="another update rule"):
            eventful.Stream.load(other, stream.snapshot())

    @pytest.mark.parametrize("content", [b"", b"not a snapshot at all", b"\x10" + b"\0" * 40])
    def test_that_is_none(self, stream, content, tmp_path):
        with pytest.raises(errors.SnapshotError):
            eventful.Stream.load(stream.model, content)
        path = tmp_path / "bad.safetensors"
        path.write_bytes(content)
        with pytest.raises(errors.SnapshotError):
            eventful.Stream.load(stream.model, path)

    def test_that_is_missing(self, stream, tmp_path):
        with pytest.raises(errors.SnapshotError, match="No snapshot"):
            eventful.Stream.load(stream.model, tmp_path / "none")

    @pytest.mark.parametrize(
        "damage",
        [
            lambda tensors, about: next(iter(tensors.values())).view(-1)[:8].add_(1),
            lambda tensors, about: max(tensors.values(), key=torch.numel).neg_(),
            lambda tensors, about: swap(tensors),
            lambda tensors, about: tensors.update(more=torch.zeros(3)),
            lambda tensors, about: tensors.pop(next(iter(tensors))),
            lambda tensors, about: about.update(frames=[100]),
            lambda tensors, about: about["policies"][0].update(r=1),
        ],
        ids=["part", "all", "swapped", "more", "fewer", "frames", "policy"],
    )
    def test_that_is_damaged(self, stream, clip, damage, tmp_path):
        for frame in clip[:2]:
            stream(frame)
        tensors, header = parts_of(stream.snapshot())
        about = json.loads(header["eventful"])
        damage(tensors, about)
        header["eventful"] = json.dumps(about)
        data = save_tensors(tensors, metadata=header)
        path = tmp_path / "damaged"
        path.write_bytes(data)
        for source in (data, path):
            with pytest.raises(errors.SnapshotError, match=r"damaged.*start a new stream"):
                eventful.Stream.load(stream.model, source)

    @pytest.mark.parametrize("share", [0.0001, 0.01, 0.3, 0.9, 0.9999])
    def test_that_is_cut_off_or_has_a_wrong_byte(self, stream, clip, share, tmp_path):
        stream(clip[0])
        data = stream.snapshot()
        at = int(len(data) * share)
        wrong = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        for spoilt in (data[:at], wrong):
            path = tmp_path / "spoilt"
            path.write_bytes(spoilt)
            for source in (spoilt, path):
                with pytest.raises(errors.SnapshotError):
                    eventful.Stream.load(stream.model, source)
        eventful.Stream.load(stream.model, data)

    @pytest.mark.parametrize(("found", "match"), [(1, "an older version"), (3, "another version")])
    def test_of_another_format(self, stream, clip, found, match):
        stream(clip[0])
        tensors, header = parts_of(stream.snapshot())
        about = json.loads(header["eventful"]) | {"format": found}
        data = save_tensors(tensors, metadata={"eventful": json.dumps(about)})
        with pytest.raises(errors.SnapshotError, match=match):
            eventful.Stream.load(stream.model, data)

    def test_that_is_a_folder(self, stream, tmp_path):
        with pytest.raises(errors.SnapshotError):
            eventful.Stream.load(stream.model, tmp_path)

    def test_before_any_frame(self, stream):
        with pytest.raises(errors.SnapshotError, match="no frame yet"):
            stream.snapshot()

    def test_a_policy_of_ones_own_must_be_registered(self, model, clip):
        class Odd:
            order = 2.0

            def select(self, error, context):
                return Selection.top(error, 3)

        stream = eventful.Stream(eventful.convert(model), Odd())
        stream(clip[0])
        with pytest.raises(errors.SnapshotError, match="register_policy"):
            stream.snapshot()

    def test_frames_are_still_checked_after_loading(self, stream, clip):
        stream(clip[0])
        loaded = eventful.Stream.load(stream.model, stream.snapshot())
        with pytest.raises(errors.FrameError):
            loaded(clip[1].double())

    def test_into_a_batch_and_out_again(self, stream, clip):
        alone = eventful.Stream(stream.model)
        for frame in clip[:2]:
            stream(frame)
            alone(frame)
        batch = eventful.StreamBatch(stream.model)
        batch.join("new")
        batch.join("old", snapshot=stream.snapshot())
        got = batch(torch.cat([clip[0], clip[2]]))[1:]
        expected = alone(clip[2])
        assert_near(got, expected)
        out = eventful.Stream.load(stream.model, batch.snapshot("old"))
        assert_near(out(clip[3]), alone(clip[3]))

"""Comparisons of a stream's outputs with the dense model's."""

from __future__ import annotations

import pytest
import torch

import eventful
from eventful import Config, Stream
from eventful.budget.audit import comparable, compare
from eventful.errors import ConfigError, UnsupportedError
from simulated import Machine, affine, clip_of, large_vit, path

__all__ = ["path"]  # a fixture


@pytest.fixture
def model():
    return eventful.convert(large_vit(), Config.fast(fallback=False))


def outputs(stream, clip):
    return [stream.call("forward_features", frame) for frame in clip]


class TestAudit:
    def test_outputs_stay_as_they_are_and_the_error_is_the_true_one(self, path, model):
        clip = clip_of([0.2] * 9)
        plain, audited = Stream(model), Stream(model)
        audited.audit(every=4)
        for t, frame in enumerate(clip):
            a = plain.call("forward_features", frame)
            b = audited.call("forward_features", frame)
            assert torch.equal(a, b)
            if t in (4, 8):
                with torch.no_grad():
                    dense = model.forward_features(frame)
                error = float((b - dense).norm() / dense.norm())
                assert audited.audits[-1].error == pytest.approx(error, rel=1e-4)
                assert audited.audits[-1].step == t
        assert [audit.step for audit in audited.audits] == [0, 4, 8]
        total = audited.summary()
        assert total.audits == 3
        assert total.worst_audit_error >= total.audit_error
        assert "3 comparisons with dense" in str(total)
        audited.audit(None)
        audited.call("forward_features", clip[0])
        assert len(audited.audits) == 3

    def test_what_it_takes_is_told(self):
        """A dense pass takes 200 ms on this machine."""
        with Machine(affine(601, overhead=10)) as machine:
            stream = Stream(eventful.convert(machine.watch(large_vit())))
            stream.audit(every=2)
            outputs(stream, clip_of([0.1] * 4))
            assert stream.summary().audit_ms == pytest.approx(400)

    @pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "5"])
    def test_wrong_numbers(self, model, wrong):
        with pytest.raises(ConfigError, match="counts steps"):
            Stream(model).audit(wrong)

    def test_measures(self):
        dense = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
        out = dense.clone()
        out[1, 3] = -out[1, 3]
        error, cosine, worst = compare(comparable({"x": out}, {"x": dense}, 2)).tolist()
        expected = 2 * dense[1, 3].norm() / dense[1].norm()
        assert error == pytest.approx(float(expected), rel=1e-5)
        assert cosine == pytest.approx(1.0, abs=1e-5)
        assert worst == pytest.approx(-1.0, abs=1e-5)

    def test_maps_are_compared_by_place(self):
        dense = torch.randn(1, 8, 3, 4, generator=torch.Generator().manual_seed(0))
        out = dense.clone()
        out[0, :, 1, 2] = -out[0, :, 1, 2]
        assert compare(comparable(out, dense, 1))[2] == pytest.approx(-1.0, abs=1e-5)

    def test_nothing_to_compare_says_what_to_do(self):
        assert comparable([1, "a"], [1, "b"], 1) == []
        assert comparable(torch.ones(1, 2), torch.ones(1, 3), 1) == []
        assert comparable([torch.ones(1, 4)], [torch.ones(1, 4)], 1) == []  # boxes, perhaps
        assert comparable(torch.ones(3, 2), torch.ones(3, 2), 1) == []  # no row per stream

    def test_a_call_without_tensors(self, model):
        stream = Stream(model)
        stream.audit(every=1)
        model.boxes = lambda frame: [len(model.forward_features(frame))]
        with pytest.raises(UnsupportedError, match="forward_features"):
            stream.call("boxes", clip_of([0.3])[0])

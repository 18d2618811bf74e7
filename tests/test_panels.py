"""Pictures of boxes and updated tokens, and the frames of a side-by-side video."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")


from eventful.errors import ConfigError
from eventful.pipeline.panels import Found, Panels, PanelStep
from eventful.pipeline.pictures import AMBER, PALETTE, draw_boxes, show_updated
from eventful.pipeline.running_plot import LEFT, RunningPlot, round_up


def grey(height: int = 90, width: int = 160, value: int = 128) -> torch.Tensor:
    return torch.full((3, height, width), value, dtype=torch.uint8)


def rgb(colour: str) -> list[int]:
    return [int(colour[place : place + 2], 16) for place in (1, 3, 5)]


def found(*boxes: tuple[float, float, float, float], label: int = 0) -> Found:
    count = len(boxes)
    return Found(
        torch.tensor(boxes).reshape(-1, 4), torch.full((count,), label), torch.full((count,), 0.9)
    )


def step(share: float = 0.1, ms: float = 10.0, **more) -> PanelStep:
    return PanelStep(more.pop("frame", grey()), share, ms, **more)


class TestBoxes:
    def test_a_box_is_drawn_in_the_colour_of_its_class(self):
        frame = grey(200, 300)
        boxes = torch.tensor([[50.0, 80.0, 120.0, 160.0]])
        made = draw_boxes(frame, boxes, torch.tensor([3]), torch.tensor([0.5]), list("abcd"))
        assert made.dtype == torch.uint8
        assert made.shape == frame.shape
        for y, x in ((120, 50), (120, 120), (160, 90)):
            assert made[:, y, x].tolist() == rgb(PALETTE[3])
        assert made[:, 120, 85].tolist() == [128] * 3, "the inside stays"
        assert bool((frame == 128).all()), "the frame itself stays"

    def test_the_text_has_the_name_and_the_score(self):
        boxes, label = torch.tensor([[50.0, 80.0, 120.0, 160.0]]), torch.tensor([0])
        pictures = [
            draw_boxes(grey(200, 300), boxes, label, score, names)
            for score, names in (
                (None, ["cat"]),
                (torch.tensor([0.5]), ["cat"]),
                (torch.tensor([0.6]), ["cat"]),
                (torch.tensor([0.5]), ["dog"]),
                (torch.tensor([0.5]), []),
            )
        ]
        for place, one in enumerate(pictures):
            assert not any(torch.equal(one, other) for other in pictures[:place])

    @pytest.mark.parametrize(
        "box",
        [(-50.0, -50.0, 400.0, 400.0), (0.0, 0.0, 0.0, 0.0), (290.0, 190.0, 299.0, 199.0)],
    )
    def test_boxes_at_and_beyond_the_border(self, box):
        draw_boxes(grey(200, 300), torch.tensor([box]), torch.tensor([0]), None, ["a long name"])

    @pytest.mark.parametrize(
        "box", [(float("nan"), 0.0, 9.0, 9.0), (9.0, 9.0, 1.0, 1.0), (0.0, 0.0, float("inf"), 9.0)]
    )
    def test_boxes_that_are_none_are_left_out(self, box):
        made = draw_boxes(grey(), torch.tensor([box]), torch.tensor([0]), None, ["x"])
        assert torch.equal(made, grey())

    def test_texts_of_boxes_in_one_place_do_not_cover_each_other(self):
        box = (60.0, 80.0, 200.0, 160.0)
        boxes, labels = torch.tensor([box, box]), torch.tensor([0, 1])
        made = draw_boxes(grey(240, 300), boxes, labels, None, ["first", "second"])
        areas = [
            int((made == torch.tensor(rgb(PALETTE[n]))[:, None, None]).all(0).sum()) for n in (0, 1)
        ]
        assert min(areas) > 200, "both texts have their ground"

    def test_no_boxes(self):
        empty = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(0)
        assert torch.equal(draw_boxes(grey(), *empty, ["x"]), grey())

    @pytest.mark.parametrize(
        "picture", [torch.zeros(3, 9, 9), torch.zeros(9, 9, 3, dtype=torch.uint8), grey()[0]]
    )
    def test_other_pictures_are_refused(self, picture):
        with pytest.raises(ConfigError, match=r"\(3, H, W\) in torch.uint8"):
            show_updated(picture, torch.ones(2, 2))


class TestUpdated:
    def test_the_others_are_about_half_as_bright(self):
        mask = torch.zeros(3, 4, dtype=torch.bool)
        mask[1, 2] = True
        made = show_updated(grey(90, 160, 200), mask)
        assert made[:, 45, 100].tolist() == [200] * 3
        assert all(80 <= value <= 110 for value in made[:, 10, 10].tolist())
        assert made[:, 30, 100].tolist() == list(AMBER), "its first row is an outline"

    def test_all_and_none(self):
        assert torch.equal(show_updated(grey(), torch.ones(9, 16)), grey())
        assert int(show_updated(grey(), torch.zeros(9, 16)).max()) < 70

    def test_a_grid_that_does_not_divide_the_frame(self):
        made = show_updated(grey(91, 163), torch.eye(7))
        assert made.shape == (3, 91, 163)
        assert made[:, -1, -1].tolist() == [128] * 3

    def test_a_mask_of_another_form_is_refused(self):
        with pytest.raises(ConfigError, match=r"must be \(h, w\)"):
            show_updated(grey(), torch.ones(4))


class TestPanels:
    @pytest.mark.parametrize("size", [(90, 160), (91, 161), (288, 512), (160, 90), (1, 700)])
    @pytest.mark.parametrize("width", [640, 641, 1280])
    def test_sizes_are_even(self, size, width):
        made = Panels(width=width).add(step(frame=grey(*size)))
        assert made.dtype == torch.uint8
        assert made.shape[0] == 3
        assert made.shape[1] % 2 == made.shape[2] % 2 == 0
        assert made.shape[2] in (width, width + 1)

    def test_each_panel_shows_its_own(self):
        box, mask = found((40.0, 30.0, 90.0, 70.0)), torch.zeros(3, 4, dtype=torch.bool)
        plain = Panels().add(step())
        third = plain.shape[2] // 3
        changed = {
            "dense": Panels().add(step(dense=box)),
            "eventful": Panels().add(step(eventful=box)),
            "updated": Panels().add(step(updated=mask)),
        }
        for place, made in enumerate(changed.values()):
            differs = (made != plain).any(0)[45:265]
            columns = torch.nonzero(differs.any(0)).flatten()
            assert len(columns)
            assert (
                place * third - 20
                <= int(columns.min())
                <= int(columns.max())
                < (place + 1) * third + 20
            )

    def test_boxes_are_scaled_with_the_frame(self):
        small, large = grey(90, 160), grey(180, 320)
        one = Panels(["x"]).add(step(frame=small, dense=found((40.0, 30.0, 90.0, 70.0))))
        two = Panels(["x"]).add(step(frame=large, dense=found((80.0, 60.0, 180.0, 140.0))))
        assert torch.equal(one, two)

    def test_the_plots_grow(self):
        panels = Panels(frames=10)
        pictures = [
            panels.add(step(share, 10.0 * share, dense_ms=9.0)) for share in (0.9, 0.5, 0.7)
        ]
        assert not torch.equal(pictures[0][:, 300:], pictures[1][:, 300:])
        assert not torch.equal(pictures[1][:, 300:], pictures[2][:, 300:])

    def test_a_narrow_video_is_refused(self):
        with pytest.raises(ConfigError, match="640"):
            Panels(width=320)

    def test_a_mask_on_another_size_than_the_frame(self):
        Panels().add(step(updated=torch.rand(7, 13) > 0.5))


class TestRunningPlot:
    SIZE = (300, 120)

    def drawn(self, values, **settings):
        plot = RunningPlot(self.SIZE, ("#ff0000", "#00ff00"), **settings)
        for value in values:
            plot.add(value)
        return plot

    @pytest.mark.parametrize("settings", [{"frames": 70, "top": 40.0}, {}])
    def test_one_value_at_a_time_is_as_all_at_once(self, settings):
        values = [(float(n % 7), 3.0 + n) for n in range(70)]
        slow = RunningPlot(self.SIZE, ("#ff0000", "#00ff00"), **settings)
        for value in values:
            slow.add(value)
            slow.picture()
        quick = self.drawn(values, **settings)
        assert np.array_equal(np.asarray(slow.picture()), np.asarray(quick.picture()))

    def test_a_higher_value_is_drawn_higher(self):
        rows = []
        for value in (10.0, 50.0, 90.0):
            pixels = np.asarray(self.drawn([(value, None)] * 3, frames=3, top=100.0).picture(), int)
            red = (pixels[..., 0] > 200) & (pixels[..., 1] < 60)
            rows.append(np.nonzero(red.any(1))[0].mean())
        assert rows[0] > rows[1] > rows[2]

    def test_one_slow_step_does_not_set_the_scale(self):
        plot = self.drawn([(3000.0, None)] + [(20.0, 60.0)] * 20)
        assert 60 < plot._top < 200
        assert self.drawn([(3000.0, None)] * 9 + [(20.0, 60.0)] * 5)._top >= 3000

    def test_gaps_and_values_that_are_not_finite(self):
        self.drawn([(None, None), (float("nan"), 1.0), (float("inf"), None), (2.0, 3.0)]).picture()
        self.drawn([]).picture()
        self.drawn([(0.0, 0.0)] * 3).picture()

    def test_a_length_that_is_not_known(self):
        plot = self.drawn([(1.0, 2.0)] * 65)
        assert plot._capacity == 128
        assert plot._x(64) < plot._x(127) <= 2 * self.SIZE[0]
        assert plot._x(0) == 2 * LEFT

    @pytest.mark.parametrize(
        ("value", "rounded"), [(0.0, 1), (7.3, 8), (101, 120), (0.011, 0.012), (1000, 1000)]
    )
    def test_round_up(self, value, rounded):
        assert round_up(value) == pytest.approx(rounded)

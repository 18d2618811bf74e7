"""Vision towers of vision-language models: which blocks, which frames, which results."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import eventful
import zoo_timm
import zoo_towers
from clips import moving_square
from eventful import Config, Stream, StreamBatch, TopFraction, TopR, errors
from eventful.engine.frames import find_frame
from tolerances import assert_near
from zoo_transformers import transformers

ROOT = Path(__file__).parent.parent
ZOO = {**zoo_towers.ZOO, **zoo_towers.WRAPPERS}
STEADY = {"max_age": None, "scene_cut": None, "fallback": False}


@functools.cache
def made(name):
    torch.manual_seed(7)
    return getattr(zoo_towers, name)() if hasattr(zoo_towers, name) else ZOO[name].make()


def run(name, target, frame):
    with torch.no_grad():
        return ZOO[name].call(target, frame)


def clip(name, frames=4, **options):
    return moving_square(frames, ZOO[name].size, noise=0.05, **options)


def vision(name, config=None):
    return eventful.convert(made(name), config, where="vision")


class TestWrappers:
    """Towers that are not in `test_laws.py`: the laws once each, on image features."""

    @pytest.fixture(params=sorted(zoo_towers.WRAPPERS))
    def name(self, request):
        return request.param

    @pytest.mark.parametrize("preset", ["fast", "exact"])
    def test_the_laws(self, name, preset, tmp_path):
        model, output = made(name), ZOO[name].output
        policies = (TopR(10**6), TopFraction(0.3))
        everything, some = (vision(name, Config.preset(preset, policy)) for policy in policies)
        dense, stream, batch = Stream(everything), Stream(some), StreamBatch(some)
        batch.join("a")
        for t, frame in enumerate(clip(name)):
            expected = run(name, model, frame)
            assert torch.equal(output(run(name, some, frame)), output(expected))
            result = run(name, dense, frame)
            assert type(result) is type(expected)
            assert type(result.pooler_output) is type(expected.pooler_output)
            assert_near(output(result), output(expected), note=t)
            got = output(run(name, stream, frame))
            assert_near(output(run(name, functools.partial(batch), frame)), got, note=t)
        stream.snapshot(tmp_path / "tower.safetensors")
        again = Stream.load(some, tmp_path / "tower.safetensors")
        for other in clip(name, 2, seed=1):
            got = output(run(name, stream, other))
            assert torch.equal(output(run(name, again, other)), got)
        stream.reset()
        got = output(run(name, stream, frame))
        for _ in range(2):  # a still video
            assert_near(output(run(name, stream, frame)), got, "step")

    def test_late_streams_of_a_batch(self, name):
        """Some flush, some do not: image tokens come as one tensor, or as one for each frame."""
        model, output = vision(name, Config.fast(TopFraction(0.3))), ZOO[name].output
        clips = {letter: clip(name, 3, seed=i) for i, letter in enumerate("abc")}
        batch, alone = StreamBatch(model), {letter: Stream(model) for letter in "abc"}
        for t, names in enumerate(("a", "ab", "cab")):
            for letter in names:
                if letter not in batch.streams:
                    batch.join(letter)
            frames = torch.cat([clips[letter][t] for letter in names])
            got = output(run(name, functools.partial(batch, streams=tuple(names)), frames))
            for row, letter in enumerate(names):
                expected = output(run(name, alone[letter], clips[letter][t]))
                assert_near(got[row : row + 1], expected, note=(t, letter))


def test_the_mask_of_a_frame_is_looked_at_once(monkeypatch):
    """On a GPU each look waits for the device. Some versions give a mask that allows all."""
    from transformers.models.siglip2 import modeling_siglip2

    from eventful.surgery.adapters import hf_patches

    full = torch.ones(1, 1, 1, 18, dtype=torch.bool)
    monkeypatch.setattr(modeling_siglip2, "create_bidirectional_mask", lambda **_: full)
    looks, own = [], hf_patches._allows_all
    monkeypatch.setattr(hf_patches, "_allows_all", lambda mask: looks.append(1) or own(mask))
    stream = Stream(vision("siglip2_naflex", Config.fast(TopFraction(0.3))))
    for count, frame in enumerate(clip("siglip2_naflex", 3)):
        run("siglip2_naflex", stream, frame)
        assert len(looks) == count + 1


class TestWhere:
    """`where` as a string."""

    @pytest.mark.parametrize("name", sorted(ZOO))
    def test_vision_is_the_tower_and_nothing_else(self, name):
        model = made(name)
        converted = vision(name)
        (trunk,) = converted._eventful.trunks
        assert any(word in trunk for word in ("vision", "visual"))
        before = dict(model.named_modules())
        placed = [n for n, m in converted.named_modules() if "forward" in vars(m)]
        assert placed
        assert all(n.startswith(trunk) for n in placed)
        assert not any("forward" in vars(module) for module in before.values())

    def test_a_part_by_its_name(self):
        blocks = [f"model.vision_tower.encoder.layers.{i}" for i in range(3)]
        for where in ("vision_tower", "model.vision_tower", "encoder.layers", "vision"):
            found = eventful.convert(made("llava"), where=where)._eventful.blocks
            assert list(found.values()) == [blocks]
        found = eventful.convert(made("llava"), where="layers.1")._eventful.blocks
        assert list(found.values()) == [blocks[1:2]]

    def test_a_vit_by_itself_is_a_vision_tower(self):
        tower = made("llava").model.vision_tower
        assert eventful.convert(tower, where="vision")._eventful.blocks[""]

    @pytest.mark.parametrize(
        ("names", "chosen"),
        [
            ({"vision_tower", "language_model"}, {"vision_tower"}),
            ({"image_encoder", "other"}, {"image_encoder"}),
            ({"encoder", "text_decoder"}, {"encoder"}),
            ({"left", "right"}, {"left", "right"}),
        ],
    )
    def test_vision_among_several_trunks(self, names, chosen):
        vits = {name: zoo_timm.make(zoo_timm.ZOO["vit"]) for name in names}
        converted = eventful.convert(nn.ModuleDict(vits), where="vision")
        assert set(converted._eventful.trunks) == chosen

    @pytest.mark.parametrize("where", ["language_model", "tower", "audio", ""])
    def test_a_name_that_fits_nothing(self, where):
        with pytest.raises(errors.NoMatchError, match=r"Trunks found: model\.vision_tower \(trans"):
            eventful.convert(made("llava"), where=where)

    def test_florence_2_is_refused_by_the_part(self):
        model = made("florence2")
        with pytest.raises(errors.NoMatchError, match="attend among channels"):
            eventful.convert(model, where="vision")
        found = eventful.inspect(model)
        assert found.matched == 0
        assert len(found.blocks) == 1

    def test_a_language_model_is_no_trunk(self):
        with pytest.raises(errors.NoMatchError, match=r"found: model\.vision_model") as raised:
            eventful.convert(made("idefics3"), where="text_model")
        assert "text_model (" not in str(raised.value)


class TestLanguageModels:
    """Language models are left as they are."""

    @pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Bert"])
    def test_none_is_converted(self, kind):
        config = getattr(transformers, f"{kind}Config")(
            **zoo_towers.TEXT, head_dim=8, n_embd=16, n_layer=1, n_head=2
        )
        model = getattr(transformers, f"{kind}Model")(config).eval()
        with pytest.raises(errors.NoMatchError):
            eventful.convert(model)
        with pytest.raises(errors.NoMatchError):
            eventful.convert(model, where="vision")

    def test_none_is_converted_beside_an_unknown_tower(self):
        """Structure shows both lists of blocks; the one that takes no frames is left alone."""
        found = eventful.inspect(made("idefics3"), 32)
        assert {block.name.split(".")[1] for block in found.blocks} == {"vision_model"}
        assert all(block.matched for block in found.blocks)

    def test_the_whole_model_in_a_stream(self):
        model = made("llava")
        ids = torch.tensor([[1, *[model.config.image_token_id % 64] * 16, 2, 3]])
        model.config.image_token_id = int(ids[0, 1])
        stream = Stream(eventful.convert(model, Config.fast(TopR(10**6)), where="vision"))
        with torch.no_grad():
            for frame in clip("llava", 2):
                expected = model(input_ids=ids, pixel_values=frame)
                result = stream(input_ids=ids, pixel_values=frame)
                assert type(result) is type(expected)
                assert_near(result.logits, expected.logits)

    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
    def test_a_quantised_one_does_not_matter(self):
        torch.manual_seed(7)
        model = zoo_towers.llava()
        holder = model.model
        holder.language_model = torch.ao.quantization.quantize_dynamic(
            holder.language_model, {nn.Linear}, dtype=torch.qint8
        )
        stream = Stream(eventful.convert(model, Config.fast(TopR(10**6)), where="vision"))
        for frame in clip("llava", 2):
            expected = joined(run("llava", made("llava"), frame))
            assert_near(joined(run("llava", stream, frame)), expected)

    def test_tied_weights_stay_tied(self):
        model = made("paligemma")
        converted = vision("paligemma")
        assert converted.lm_head.weight is model.get_input_embeddings().weight
        assert list(converted.state_dict()) == list(model.state_dict())


joined = zoo_towers.joined


class TestPatches:
    """Frames that come as patches, with their grid."""

    @pytest.fixture
    def stream(self):
        return Stream(vision("qwen2_5_vl", Config.fast(TopR(4))))

    def given(self, *grids):
        count = sum(t * h * w for t, h, w in grids)
        make = torch.Generator().manual_seed(0)
        patches = torch.randn(count, 48, generator=make)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor(grids)}

    @pytest.mark.parametrize(
        ("grids", "match"),
        [
            ([(2, 4, 6)], "a clip of 2 times"),
            ([(1, 4, 6), (1, 6, 4)], "need one grid"),
        ],
    )
    def test_grids_that_are_refused(self, stream, grids, match):
        with pytest.raises(errors.FrameError, match=match):
            stream.call("get_image_features", **self.given(*grids))
        stream.call("get_image_features", **self.given((1, 4, 6)))  # goes on

    def test_arguments_that_do_not_fit(self, stream):
        given = self.given((1, 4, 6))
        with pytest.raises(errors.FrameError, match="with its grid in one of image_grid_thw"):
            stream.call("get_image_features", pixel_values=given["pixel_values"])
        with pytest.raises(errors.FrameError, match="without the patches"):
            stream.call("get_image_features", image_grid_thw=given["image_grid_thw"])
        with pytest.raises(errors.FrameError, match="1 frames of 4 x 6 patches"):
            stream.call("get_image_features", **given | {"pixel_values": torch.zeros(20, 48)})
        with pytest.raises(errors.FrameError, match="passed together"):
            stream.call("forward", **given, video_grid_thw=given["image_grid_thw"])
        with pytest.raises(errors.UnsupportedError, match="window_index was passed"):
            stream.call("get_image_features", **given, window_index=torch.arange(6))

    def test_another_grid_of_as_many_patches_is_another_frame(self, stream):
        stream.call("get_image_features", **self.given((1, 4, 6)))
        with pytest.raises(errors.FrameError, match=r"holds \(1, 4, 6, 48\).* is \(1, 6, 4, 48\)"):
            stream.call("get_image_features", **self.given((1, 6, 4)))
        stream.reset()
        stream.call("get_image_features", **self.given((1, 6, 4)))

    def test_a_grid_that_is_written_anew(self, stream):
        """The numbers of a grid are read again where the tensor has changed."""
        given = self.given((1, 4, 6))
        stream.call("get_image_features", **given)
        given["image_grid_thw"].copy_(torch.tensor([[1, 6, 4]]))
        with pytest.raises(errors.FrameError, match=r"is \(1, 6, 4, 48\)"):
            stream.call("get_image_features", **given)

    def test_a_tower_by_itself_by_place(self):
        tower, given = made("qwen2_5_vl").model.visual, self.given((1, 4, 6))
        stream = Stream(eventful.convert(tower, Config.fast(TopR(10**6))))
        patches, grid = given["pixel_values"], given["image_grid_thw"]
        with torch.no_grad():
            expected = tower(patches, grid).pooler_output
        assert_near(stream(patches, grid).pooler_output, expected)

    def test_videos(self):
        model, given = made("qwen2_5_vl"), self.given((1, 4, 6))
        stream = Stream(vision("qwen2_5_vl", Config.fast(TopR(10**6))))
        named = dict(zip(("pixel_values_videos", "video_grid_thw"), given.values(), strict=True))
        with torch.no_grad():
            expected = model.get_video_features(**named)
        assert_near(joined(stream.call("get_video_features", **named)), joined(expected))

    def test_padding_is_refused(self):
        stream = Stream(vision("siglip2_naflex", Config.fast(TopR(10**6))))
        shapes, patches = torch.tensor([[3, 4]]), torch.randn(1, 16, 192)
        mask = (torch.arange(16) < 12).int()[None]
        given = {"spatial_shapes": shapes, "pixel_attention_mask": mask}
        with pytest.raises(errors.FrameError, match=r"4 are padding.*cut.*\[:, :12\]"):
            stream.call("get_image_features", pixel_values=patches, **given)
        given["pixel_attention_mask"] = mask[:, :12]
        result = stream.call("get_image_features", pixel_values=patches[:, :12], **given)
        with torch.no_grad():
            model = made("siglip2_naflex")
            expected = model.get_image_features(pixel_values=patches[:, :12], **given)
        assert_near(result.pooler_output, expected.pooler_output)
        given["pixel_attention_mask"] = (torch.arange(12) < 10).int()[None]
        with pytest.raises(errors.UnsupportedError, match="attention_mask"):
            stream.call("get_image_features", pixel_values=patches[:, :12], **given)

    def test_positions_are_resized_once(self, monkeypatch):
        model = vision("siglip2_naflex", Config.fast(TopFraction(0.3)))
        stream, frames = Stream(model), clip("siglip2_naflex")
        run("siglip2_naflex", stream, frames[0])
        monkeypatch.setattr(F, "interpolate", lambda *_, **__: pytest.fail("resized"))
        for frame in frames[1:]:
            run("siglip2_naflex", stream, frame)

    @pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "siglip2_naflex", "internvl"])
    def test_as_on_a_device(self, name, monkeypatch):
        """Steps that never ask the host give what steps on the host give."""
        config = Config.fast(TopFraction(0.3), fallback=False)
        host, frames = Stream(vision(name, config)), clip(name, 5)
        expected = [ZOO[name].output(run(name, host, frame)) for frame in frames]
        monkeypatch.setattr("eventful.engine.plan.DEVICES", {"cpu"})
        device = Stream(vision(name, config))
        for t, frame in enumerate(frames):
            assert_near(ZOO[name].output(run(name, device, frame)), expected[t], note=t)
        assert not device._state.reversible


def test_pixels_are_the_frame_whatever_stands_before_them():
    frame, words = torch.zeros(1, 3, 32, 32), torch.zeros(1, 5, 16)
    given = {"inputs_embeds": words, "pixel_values_images": frame}
    assert find_frame(made("llava"), (), given) is frame


class TestTiles:
    """Pictures that come in tiles."""

    @pytest.mark.parametrize("name", ["llava_next", "idefics3"])
    def test_each_tile_is_a_frame(self, name):
        model = made(name)
        options = {"image_sizes": torch.tensor([[32, 64]])} if name == "llava_next" else {}
        stream = Stream(eventful.convert(model, Config.fast(TopR(10**6)), where="vision"))
        with torch.no_grad():
            for frame in moving_square(3, (32, 32), batch=3, noise=0.05):
                given = {"pixel_values": frame[None], **options}  # (1, 3, 3, 32, 32)
                expected = model.get_image_features(**given).pooler_output
                result = stream.call("get_image_features", **given).pooler_output
                assert_near(torch.cat(list(result)), torch.cat(list(expected)))
        assert stream.last.flushed == [False] * 3

    def test_a_batch_is_refused(self):
        batch = StreamBatch(eventful.convert(made("llava_next"), where="vision"))
        batch.join("a")
        with pytest.raises(errors.UnsupportedError, match="Have a Stream for each video"):
            batch.call("get_image_features", pixel_values=torch.zeros(1, 3, 3, 32, 32))


class Definition:
    """The rule of `fast` on a Qwen tower, written out with the library's own modules.

    What each block is called with is taken from calls of the dense model.
    """

    def __init__(self, tower, module):
        self.blocks, self.rotate = tower.blocks, module.apply_rotary_pos_emb_vision
        self.calls, self.memory, self.output = [], {}, None
        for block in tower.blocks:
            block.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, block, args, kwargs):
        self.calls.append((args[0], kwargs["cu_seqlens"], kwargs["position_embeddings"]))

    def step(self, selected):
        """The tokens of the frame that the model saw last, where `selected` (N,) are updated."""
        calls, self.calls = self.calls, []
        x = calls[0][0][selected]
        for i, (block, (_, bounds, (cos, sin))) in enumerate(zip(self.blocks, calls, strict=True)):
            q, k, v = block.attn.qkv(block.norm1(x)).unflatten(1, (3, 2, -1)).unbind(1)
            q, k = self.rotate(q, k, cos[selected], sin[selected])
            if i not in self.memory:
                self.memory[i] = [torch.zeros(len(selected), *k.shape[1:]) for _ in "kv"]
            for held, part in zip(self.memory[i], (k, v), strict=True):
                held[selected] = part
            segment = torch.bucketize(torch.arange(len(selected)), bounds[1:], right=True)
            logits = torch.einsum("qhd,nhd->hqn", q, self.memory[i][0]) * block.attn.scaling
            apart = segment[selected][:, None] != segment
            weights = logits.masked_fill(apart, -torch.inf).softmax(dim=-1)
            attended = torch.einsum("hqn,nhd->qhd", weights, self.memory[i][1])
            x = x + block.attn.proj(attended.flatten(1))
            x = x + block.mlp(block.norm2(x))
        kept = torch.zeros_like(calls[0][0]) if self.output is None else self.output
        self.output = kept.index_put((selected,), x)
        return self.output


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
@torch.no_grad()
def test_thirty_percent_against_the_definition(name):
    torch.manual_seed(7)
    model = getattr(zoo_towers, name)()
    config = Config.fast(TopFraction(0.3), context=None, motion=False, **STEADY)
    stream = Stream(eventful.convert(model, config, where="vision"), maps=True)
    module = __import__(type(model).__module__, fromlist=["*"])
    seen = Definition(model.model.visual, module)
    order = sequence(model.model.visual, ZOO[name].size)
    for t, frame in enumerate(clip(name, 6)):
        result = run(name, stream, frame)
        run(name, model, frame)
        selected = stream.last.mask[0][order]
        assert t == 0 or 0.2 < selected.float().mean() < 0.4
        assert_near(result.last_hidden_state, seen.step(selected), note=t)


def sequence(tower, size):
    """Place in the grid of each token of a tower's sequence, by the library's own functions."""
    from transformers import vision_utils

    merge, side = tower.spatial_merge_size, tower.patch_size
    grid = torch.tensor([[1, size[0] // side, size[1] // side]])
    y, x = vision_utils.get_vision_position_ids(grid, merge).unbind(-1)
    place = y * int(grid[0, 2]) + x
    if not hasattr(tower, "window_size"):
        return place
    windows, _ = vision_utils.get_vision_window_index(grid, merge, tower.window_size, side)
    return place.view(-1, merge * merge)[windows].flatten()


class TestImageTokens:
    """Only the tokens that changed."""

    def test_the_page_runs(self, capsys):
        page = ROOT / "docs" / "towers.md"
        code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
        torch.manual_seed(0)
        names = {}
        exec(compile(code, str(page), "exec"), names)
        shown = capsys.readouterr().out.splitlines()
        assert shown[0] == "TokenChange(196 of 196 tokens)"
        refreshed, appeared = (int(line.split("(")[1].split()[0]) for line in shown[1:3])
        assert refreshed == 2
        assert refreshed + 4 <= appeared < 50  # 2 x 2 patches
        assert torch.equal(names["tokens"].held, names["features"].pooler_output[0])

    @pytest.mark.parametrize("name", ["llava", "paligemma", "internvl", "qwen2_5_vl"])
    def test_places_are_those_of_merged_tokens(self, name):
        """A change in one corner; the tokens given out make up the output, bit for bit."""
        policy = eventful.Threshold(0.01)
        config = Config.fast(policy, context=None, motion=False, protect=False, **STEADY)
        stream, tokens = Stream(vision(name, config)), eventful.ImageTokens()
        first = clip(name, 1)[0]
        second = first.clone()
        second[..., :8, :8] += 1.0  # one patch of 8 x 8, or a cell of 2 x 2 patches of 4 x 4
        whole = tokens.update(run(name, stream, first))
        assert whole.places.tolist() == list(range(whole.tokens))
        assert len(tokens.update(run(name, stream, first))) == 0
        result = run(name, stream, second)
        change = tokens.update(result)
        assert change.places.tolist() == [0]
        assert torch.equal(change.vectors, joined(result)[0][:1])
        assert torch.equal(tokens.held, joined(result)[0])

    def test_small_changes_add_up(self):
        tokens, vector = eventful.ImageTokens(tolerance=0.1), torch.ones(3, 4)
        tokens.update(vector)
        given = []
        for step in range(1, 9):
            moved = vector.clone()
            moved[1] *= 1 + 0.03 * step
            given.append(tokens.update([moved]).places.tolist())
        assert given == [[], [], [], [1], [], [], [], [1]]
        tokens.reset()
        assert len(tokens.update(vector)) == 3
        assert len(tokens.update(torch.ones(1, 5, 4))) == 5  # another grid

    def test_what_is_not_finite_has_changed(self):
        before, after = torch.ones(2, 4), torch.ones(2, 4)
        after[1, 2] = torch.nan
        for tolerance in (0.0, 0.5):
            found = eventful.changed_tokens(before, after, tolerance)
            assert found.places.tolist() == [1]

    def test_messages(self):
        with pytest.raises(errors.ConfigError, match="tolerance is a share"):
            eventful.ImageTokens(-1)
        with pytest.raises(errors.FrameError, match="one by one"):
            eventful.changed_tokens(None, torch.ones(2, 3, 4))
        with pytest.raises(errors.FrameError, match="one ImageTokens for each stream"):
            eventful.ImageTokens().update(torch.ones(2, 3, 4))
        assert repr(eventful.ImageTokens(0.5)) == "ImageTokens(tolerance=0.5: none yet)"


def test_operations_of_windows_that_end_at_the_border():
    """6 x 10 tokens in windows of 4 x 4: 4 x 4 twice, 4 x 2, 2 x 4 twice and 2 x 2."""
    stream = Stream(vision("qwen2_5_vl", Config.fast(TopR(4))))
    run("qwen2_5_vl", stream, clip("qwen2_5_vl", 1)[0])
    windowed = stream.last.blocks["model.visual.blocks.0"]
    pairs = 2 * 16**2 + 8**2 + 2 * 8**2 + 4**2
    assert windowed.shape.window_keys == pytest.approx(pairs / 60)
    linear = 60 * (32 * 96 + 32 * 32 + 3 * 32 * 48)
    (operations,) = stream.last.operations()
    assert operations.matmul == 2 * 32 * (2 * pairs + 60**2)
    assert operations.linear == 3 * linear

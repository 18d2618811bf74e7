"""What a proof of a structure must find: nothing that is not proven gives a wrong result."""

from __future__ import annotations

import inspect
import random
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

import eventful
import structures_odd as odd
from clips import moving_square
from eventful import Config, TopR
from eventful.errors import NoMatchError, UnsupportedError
from eventful.surgery.adapter import Mismatch
from eventful.surgery.conversion import find_session, global_attention
from eventful.surgery.structure import dryrun, proof
from eventful.surgery.structure.fingerprint import Alike, Fingerprint
from eventful.surgery.structure.loop import loop_is_plain
from structures import SIZE, PreNorm, Split, Trunk, torch_layers
from tolerances import assert_near

EVERYTHING = TopR(10**6)
PRESETS = ("fast", "exact")


def frame(seed: int = 0, size: tuple[int, int] = SIZE) -> Tensor:
    return torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(seed))


def near_dense(model: nn.Module, preset: str) -> None:
    stream = eventful.Stream(eventful.convert(model, Config.preset(preset, EVERYTHING)))
    with torch.no_grad():
        for one in moving_square(3, SIZE, noise=0.1):
            assert_near(stream(one), model(one))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    # With as many tokens as the model has.
    "a sliding window": (odd.SlidingWindow, "with 22 tokens, as in the model, it differs"),
    "keys pooled beyond 20": (odd.PooledBeyond, "with 22 tokens, as in the model, it differs"),
    "a mask beyond 20": (odd.MaskedBeyond, "with 22 tokens, as in the model, it differs"),
    "a convolution on the grid": (odd.ConvolvesGrid, r"with 22 tokens.*convolution \(`conv`\)"),
    "an MLP across tokens": (odd.MixesTokens, "with 22 tokens, as in the model, it differs"),
    "a batch of one": (odd.AloneInBatch, "with 22 tokens, as in the model, it differs"),
    # With large values, zeros, in single precision.
    "relu6": (lambda: odd.Block(F.relu6), r"differ .* by \d\.\de"),
    "a clamp": (lambda: odd.Block(lambda x: x.clamp(0, 50)), r"differ .* by \d\.\de"),
    "hard swish": (lambda: odd.Block(F.hardswish), "residual sums"),
    "hard tanh": (lambda: odd.Block(lambda x: F.hardtanh(x, -20, 20)), r"differ .* by \d\.\de"),
    "a soft cap": (odd.SoftCap, r"differ .* by \d\.\de"),
    "clamped scores": (odd.ClampedScores, r"differ .* by \d\.\de"),
    "padding": (odd.PaddingOfZeros, r"differ .* by \d\.\de"),
    "single precision": (odd.SinglePrecision, "in single precision it differs"),
    # Of calls before.
    "a memory": (odd.Remembers, "another result when it is called again"),
    "a counter": (odd.Counts, "`calls` changes with every call"),
    "written input": (odd.WritesInput, "writes into the tokens it gets"),
    "dropout": (odd.DropsInEval, "draws random numbers"),
    "random numbers of Python": (odd.ShakesPython, "differ|residual sums|another result"),
    "left out at random": (odd.LeavesOut, "draws random numbers"),
    # Other arithmetic.
    "cosine attention": (odd.Cosine, r"differ .* by \d\.\de"),
    "a scale read from a weight": (odd.LearnedScale, r"differ .* by \d\.\de"),
    "gates of heads": (odd.HeadGates, "q, k and v do not fit|differ"),
    "alibi": (odd.Alibi, r"differ .* by \d\.\de"),
    "a quiet softmax": (odd.QuietSoftmax, r"differ .* by \d\.\de"),
    "a register": (odd.Register, "attention does not start"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str) -> None:
    build, reason = REFUSED[name]
    torch.manual_seed(5)
    with pytest.raises(NoMatchError, match=reason):
        eventful.convert(odd.trunk(build))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "block", [odd.Block, odd.Sandwich, odd.QueryKeyNorm, odd.KeepsMaps], ids=lambda b: b.__name__
)
def test_it_is_right(block: Callable[[], nn.Module], preset: str) -> None:
    torch.manual_seed(5)
    model = odd.trunk(block)
    model(frame())
    assert eventful.inspect(model).matched == 3
    near_dense(model, preset)


KEPT = [
    odd.keep_private,
    odd.keep_in_dict,
    odd.keep_in_config,
    odd.keep_in_lambda,
    odd.keep_in_buffer,
]


@pytest.mark.parametrize("keep", KEPT, ids=lambda keep: keep.__name__)
def test_a_block_does_not_take_the_proof_of_another(keep: Callable[[Any, float], None]) -> None:
    torch.manual_seed(5)
    model = odd.trunk(lambda: odd.Scaled(keep))
    assert eventful.inspect(model).matched == 3
    keep(model.stages[2], 0.5)
    found = eventful.inspect(model).blocks
    assert [block.matched for block in found] == [True, True, False]
    for preset in PRESETS:
        near_dense(model, preset)


def test_a_buffer_that_is_written_is_proven_again() -> None:
    model = odd.trunk(lambda: odd.Scaled(odd.keep_in_buffer))
    assert eventful.inspect(model).matched == 3
    model.stages[0].table.fill_(2)
    assert eventful.inspect(model).matched == 2


@pytest.mark.parametrize("again", ["reset", "new stream"])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_buffer_that_is_loaded_after_a_stream_ran_is_proven_again(
    preset: str, again: str
) -> None:
    for block, name, value in (
        (lambda: odd.Scaled(odd.keep_in_buffer), "table", 2.0),
        (odd.MaskedLater, "mask", -9.0),  # shows with as many tokens as the model has
    ):
        torch.manual_seed(5)
        model = eventful.convert(odd.trunk(block), Config.preset(preset, EVERYTHING))
        stream = eventful.Stream(model)
        stream(frame())
        weights = {key: kept.clone() for key, kept in model.state_dict().items()}
        weights[f"stages.1.{name}"].view(-1)[-1] = value
        model.load_state_dict(weights)
        if again == "reset":
            stream.reset()
        else:
            stream = eventful.Stream(model)
        with pytest.raises(UnsupportedError, match=r"stages\.[01] was changed since the model was"):
            stream(frame(1))


def test_another_size_of_frames_is_proven_once_in_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Any22(odd.PooledBeyond):
        def keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return super().keys(k, v) if k.shape[-2] > odd.TOKENS else (k, v)

    class Resized(Trunk):
        def embed(self, frame: Tensor) -> Tensor:
            patches = self.stem(frame).flatten(2).mT
            tokens = torch.cat([self.special.expand(len(frame), -1, -1), patches], 1)
            return tokens + self.places.repeat(1, 9, 1)[:, : tokens.shape[1]]

    torch.manual_seed(5)
    for block, wrong in ((odd.Block, False), (Any22, True)):
        model = odd.trunk(block, Resized)
        for preset in PRESETS:
            converted = eventful.convert(model, Config.preset(preset, EVERYTHING))
            stream = eventful.Stream(converted)
            large = frame(size=(64, 80))
            if not wrong:
                assert_near(stream(large), model(large))
                with monkeypatch.context() as patch:  # a new description of the same block
                    patch.setattr(dryrun, "Fingerprint", None)
                    assert global_attention(find_session(converted))
                    stream(large)
                continue
            with pytest.raises(UnsupportedError, match=r"stages\.0 .* with 82 tokens"):
                stream(large)


def test_a_mask_is_named() -> None:
    class Masked(odd.Block):
        def attention(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            mask = odd.apart(x.shape[1]) < 9
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return self.proj(attended.transpose(1, 2).flatten(2))

    with pytest.raises(Mismatch, match="attention gets a mask or a bias"):
        proof.described(Masked())


def test_a_hook_that_changes_a_result_and_would_not_run_is_refused() -> None:
    model = Trunk(*(PreNorm(32, Split(32, 4)) for _ in range(2))).eval()
    seen: list[Tensor] = []
    looks = model.stages[0].mix.register_forward_hook(lambda *call: seen.append(call[2]))
    handle = model.stages[1].mix.register_forward_hook(lambda module, args, result: 2 * result)
    assert [b.reason for b in eventful.inspect(model).blocks] == [
        None,
        "a hook on its `mix` changes its result; a stream does not run it",
    ]
    handle.remove()
    assert eventful.inspect(model).matched == 2
    stream = eventful.Stream(eventful.convert(model, Config.fast(EVERYTHING)))
    with pytest.warns(UserWarning, match=r"stages\.0\.mix has a hook, which a stream does not run"):
        got = stream(frame())
    looks.remove()
    assert_near(got, model(frame()))


@pytest.mark.parametrize(("times", "matched"), [(1, 3), (2, 2)])
def test_hooks_on_the_attention_of_torch(times: float, matched: int) -> None:
    """A hook on a part of torch's own layers makes them compute in another order."""
    model = torch_layers(norm_first=True).eval()
    attention = model.stages[1].self_attn
    attention.register_forward_hook(lambda module, args, result: (times * result[0], None))
    assert eventful.inspect(model).matched == matched


def test_a_hook_that_fails_on_random_tokens_is_named() -> None:
    model = odd.trunk(lambda: PreNorm(32, Split(32, 4)))
    model.stages[1].mix.register_forward_hook(lambda module, args, result: {}["missing"])
    found = [block.reason for block in eventful.inspect(model).blocks]
    assert found == [None, "a hook on its `mix` cannot be tried: KeyError: 'missing'", None]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_hook_ahead_of_a_block_gets_all_tokens(preset: str) -> None:
    torch.manual_seed(5)
    model = odd.trunk()
    model.stages[1].register_forward_pre_hook(lambda module, args: (1.5 * args[0],))
    near_dense(model, preset)


def test_arguments_of_a_class_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = odd.trunk(odd.Switched, odd.Switches)
    stream = eventful.Stream(eventful.convert(model, Config.fast(EVERYTHING)))
    stream(frame())
    monkeypatch.setattr(inspect, "signature", None)
    stream(frame(1))


def test_what_blocks_have_in_common_is_kept_with_a_limit_and_no_tensors() -> None:
    class Slots:
        __slots__ = ("tensor",)

    block = odd.Block()
    known: Alike[int] = Alike()
    for count in range(300):
        block.count = count
        known.put(Fingerprint.of(block), count)
    assert len(known._known) < 300
    assert known.get(Fingerprint.of(block)) == 299
    block.held = Slots()  # it cannot be referred to weakly
    block.held.tensor = torch.zeros(3)
    tensor = weakref.ref(block.held.tensor)
    known.put(Fingerprint.of(block), 1)
    assert known.get(Fingerprint.of(block)) is None
    del block.held
    assert tensor() is None


def test_fingerprints_of_other_lengths_do_not_fit() -> None:
    now = Fingerprint.of(odd.Block())
    kept = now.kept()
    assert kept.fits(now)
    fewer = dict(list(now.tensors.items())[1:])
    assert not kept.fits(replace(now, tensors=fewer))
    assert not kept.fits(replace(now, objects={}))


def test_what_the_model_sets_on_its_blocks_is_refused() -> None:
    torch.manual_seed(5)
    model = odd.trunk(odd.Biased, odd.SetsBias)
    with pytest.raises(NoMatchError, match="the model sets its `bias` when it is called"):
        eventful.convert(model)


@pytest.mark.parametrize("preset", PRESETS)
def test_what_the_model_sets_now_and_then_is_refused_then(preset: str) -> None:
    torch.manual_seed(5)
    model = odd.trunk(odd.Biased, odd.SetsBias)
    model.brightest = 1.0
    stream = eventful.Stream(eventful.convert(model, Config.preset(preset, EVERYTHING)))
    assert_near(stream(frame()), model(frame()))
    with pytest.raises(UnsupportedError, match=r"`bias` of its block stages\.0"):
        stream(frame() + 5)


def test_what_the_model_reads_of_its_blocks_is_refused() -> None:
    """Blocks that keep their attention keep none in a stream: what is there is of earlier calls."""
    torch.manual_seed(5)
    model = odd.trunk(odd.KeepsMaps, odd.ReadsMap)
    model(frame())
    with pytest.raises(NoMatchError, match="reads `map`, which its block sets"):
        eventful.convert(model)


NOTES = {
    odd.note_in_dict: "its forward sets `held.mean`, .* the model may read it",
    odd.note_in_line: "its forward sets `line.0`, .* the model may read it",
    odd.note_in_object: "its forward sets `shared.mean`, .* the model may read it",
    odd.note_in_new: "its forward sets `mean`, .* Run the model once before",
    odd.note_in_none: "its forward sets `found`, .* Run the model once before",
}


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.__name__)
@pytest.mark.parametrize("kind", [odd.ReadsNotes, Trunk])
def test_what_blocks_leave_for_the_model_is_refused(kind: type[Trunk], note: Any) -> None:
    model = odd.trunk(lambda: odd.Notes(note), kind)
    with pytest.raises(NoMatchError, match=NOTES[note]):
        eventful.convert(model)


@pytest.mark.parametrize("note", [odd.note_in_new, odd.note_in_none], ids=lambda n: n.__name__)
def test_a_tensor_that_blocks_leave_may_be_there_before(note: Any) -> None:
    """Then it shows whether the model reads it, whatever it asks first."""
    torch.manual_seed(5)
    model = odd.trunk(lambda: odd.Notes(note), odd.ReadsNotes)
    model(frame())
    with pytest.raises(NoMatchError, match=r"reads `(mean|found)`, which its block sets"):
        eventful.convert(model)
    model = odd.trunk(lambda: odd.Notes(note))
    model(frame())
    for preset in PRESETS:
        near_dense(model, preset)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), None),
        ((True,), None),
        ((True, None, False), None),
        ((False,), "gets `residual` beside"),
        ((None,), "gets `residual` beside"),
        ((True, None, True), "gets `rest` beside"),
    ],
)
def test_arguments_are_those_of_the_proof(arguments: tuple[Any, ...], reason: str | None) -> None:
    torch.manual_seed(5)
    model = odd.trunk(odd.Switched, odd.Switches)
    model.arguments = arguments
    if reason is None:
        near_dense(model, "fast")
    else:
        with pytest.raises(NoMatchError, match=reason):
            eventful.convert(model)


def test_what_the_model_sets_elsewhere_is_refused() -> None:
    shared: dict[str, Tensor] = {}

    class Looks(odd.Block):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return super().scores(q, k) * shared.get("times", torch.ones(())).to(q)

    class Sets(Trunk):
        def forward(self, frame: Tensor, every: bool = False) -> Any:
            shared["times"] = torch.tensor(0.5)
            try:
                return super().forward(frame, every)
            finally:
                shared.clear()

    with pytest.raises(NoMatchError, match="with 22 tokens, as in the model, it differs"):
        eventful.convert(odd.trunk(Looks, Sets))


@pytest.mark.parametrize(
    ("kind", "plain"),
    [
        (odd.Loop, True),
        (odd.ReadsDevice, True),
        (odd.ReadsShape, False),
        (odd.ReadsData, False),
        (odd.ReadsTransposed, False),
    ],
)
def test_what_is_read_between_blocks(kind: type[Trunk], plain: bool) -> None:
    torch.manual_seed(5)
    model = odd.trunk(kind=kind)
    names = [f"stages.{i}" for i in range(3)]
    assert loop_is_plain(model, names, (frame(),), {}) == plain
    near_dense(model, "fast")
    stream = eventful.Stream(eventful.convert(model, Config.fast(TopR(4))))
    for one in moving_square(3, SIZE, noise=0.1):
        assert stream(one).shape == model(one).shape


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (odd.ReadsBright, "used a block's output between its blocks .in `mean`"),
        (odd.StopsBright, "ended before the last converted block"),
        (odd.SkipsBright, r"called its block stages\.2 after block 0"),
    ],
)
def test_another_path_for_some_frames_is_refused(kind: type[Trunk], reason: str) -> None:
    torch.manual_seed(5)
    model = odd.trunk(kind=kind)
    stream = eventful.Stream(eventful.convert(model, Config.fast(EVERYTHING)))
    assert_near(stream(frame()), model(frame()))
    with pytest.raises(UnsupportedError, match=reason):
        stream(frame() + 5)
    assert_near(stream(frame(1)), model(frame(1)))
    each = eventful.Stream(eventful.convert(model, Config.exact(EVERYTHING)))
    for one in (frame(), frame() + 5, frame(1)):
        assert_near(each(one), model(one))


def test_the_path_may_depend_on_the_size() -> None:
    class ByBatch(odd.Loop):
        def after(self, frame: Tensor, at: int, x: Tensor) -> Any:
            return x.mean() if len(frame) > 1 else 0

    torch.manual_seed(5)
    model = odd.trunk(kind=ByBatch)
    converted = eventful.convert(model, Config.fast(TopR(4), max_age=None))
    for size in (1, 2):
        stream = eventful.Stream(converted)
        still = torch.rand(size, 3, *SIZE)
        for _ in range(3):
            assert_near(stream(still), model(still))


def test_another_order_of_blocks_is_refused() -> None:
    model = odd.trunk(kind=odd.OtherOrder)
    with pytest.raises(NoMatchError, match="called in another order than they are listed"):
        eventful.convert(model)


def test_another_order_later_is_refused_in_the_stream() -> None:
    model = odd.trunk(kind=odd.Loop)
    converted = eventful.convert(model, Config.fast(EVERYTHING))
    converted.order = (1, 0, 2)
    with pytest.raises(UnsupportedError, match=r"called its block stages\.1 before the first"):
        eventful.Stream(converted)(frame())


@pytest.mark.parametrize("kind", [odd.ByColumn, odd.FromBelow, odd.Shuffled])
def test_tokens_in_another_order_are_refused(kind: type[Trunk]) -> None:
    torch.manual_seed(5)
    with pytest.raises(NoMatchError, match="do not lie row by row"):
        eventful.convert(odd.trunk(kind=kind))


@pytest.mark.parametrize(
    ("kind", "prefix", "suffix"), [(odd.Arranged, 2, 0), (odd.MeanBehind, 0, 2), (Trunk, 2, 0)]
)
def test_tokens_are_found_where_they_are(kind: type[Trunk], prefix: int, suffix: int) -> None:
    torch.manual_seed(5)
    stream = eventful.Stream(eventful.convert(odd.trunk(kind=kind), Config.fast(TopR(1))))
    stream(frame())
    (layout,) = stream.last.layouts.values()
    assert (layout.prefix, layout.grid, layout.suffix) == (prefix, (4, 5), suffix)


def test_a_grid_that_is_not_the_frames_is_refused() -> None:
    torch.manual_seed(5)
    model = odd.trunk(odd.OnGrid, odd.Resizes)
    converted = eventful.convert(model, Config.fast(EVERYTHING))
    assert_near(eventful.Stream(converted)(frame()), model(frame()))
    with pytest.raises(UnsupportedError, match=r"got 4 x 5 tokens where 2 x 10 were expected"):
        eventful.Stream(converted)(frame(size=(16, 80)))


def test_a_model_may_write_into_its_frames() -> None:
    torch.manual_seed(5)
    model = odd.trunk(kind=odd.WritesFrame)
    stream = eventful.Stream(eventful.convert(model, Config.fast(EVERYTHING)))
    for seed in range(3):
        assert_near(stream(frame(seed)), model(frame(seed)))


def test_the_model_is_afterwards_as_it_was() -> None:
    torch.manual_seed(5)
    model = odd.trunk(kind=odd.Stateful)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    draws = model.draws.get_state()
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    eventful.inspect(model)
    eventful.convert(model)
    assert (model.calls, model.sizes) == (0, [])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(model.draws.get_state(), draws)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (numpy.random.get_state()[1] == states[2]).all()


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(4)], ids=["python", "torch"])
def test_other_threads_may_draw_random_numbers(draw: Callable[[], Any]) -> None:
    class New(odd.Block):
        """A class that was not tried before."""

    stop, drawn = threading.Event(), []

    def draw_on() -> None:
        while not stop.is_set():
            drawn.append(float(torch.as_tensor(draw()).flatten()[0]))
            time.sleep(0)

    thread = threading.Thread(target=draw_on)
    thread.start()
    try:
        assert eventful.inspect(odd.trunk(New)).matched == 3
    finally:
        stop.set()
        thread.join()
    assert len(set(drawn)) >= 0.99 * len(drawn)  # its generator was not put back


def test_a_refusal_for_random_numbers_is_not_kept() -> None:
    class New(odd.Block):
        """Draws random numbers at times."""

        noisy = True

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (torch.rand(()) if New.noisy else 0)

    model = odd.trunk(New)
    found = [block.reason for block in eventful.inspect(model).blocks]
    assert found == ["it draws random numbers, also in evaluation mode"] * 3
    New.noisy = False
    assert eventful.inspect(model).matched == 3
    assert eventful.inspect(odd.trunk(New)).matched == 3


def test_hooks_on_all_modules_of_a_process_count_while_they_are_there() -> None:
    class New(odd.Block):
        """A class that was not tried before."""

    def twice(module: nn.Module, args: Any, result: Any) -> Any:
        return 2 * result if isinstance(module, New) else None

    model = odd.trunk(New)
    handle = register_module_forward_hook(twice)
    assert eventful.inspect(model).matched == 0
    handle.remove()
    assert eventful.inspect(model).matched == 3
    assert eventful.inspect(odd.trunk(New)).matched == 3


@pytest.mark.parametrize("preset", PRESETS)
def test_proofs_do_not_depend_on_autocast(preset: str) -> None:
    class New(odd.Block):
        """A class that was not tried before."""

    torch.manual_seed(5)
    model = odd.trunk(New)
    with torch.autocast("cpu", torch.bfloat16):
        assert eventful.inspect(model).matched == 3
        stream = eventful.Stream(eventful.convert(model, Config.preset(preset, EVERYTHING)))
        with torch.no_grad():
            got, want = stream(frame()).float(), model(frame()).float()
    assert (got - want).abs().max() < 0.05 * want.abs().max()
    near_dense(model, preset)


def test_random_numbers_in_a_block_leave_the_generator_alone() -> None:
    class New(odd.LeavesOut):
        """A class that was not tried before."""

    model = odd.trunk(New, depth=1)
    state = torch.get_rng_state()
    assert eventful.inspect(model).matched == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_a_converted_model_can_be_copied() -> None:
    import copy

    model = odd.trunk()
    twin = copy.deepcopy(eventful.convert(model, Config.fast(EVERYTHING)))
    assert_near(eventful.Stream(twin)(frame()), model(frame()))

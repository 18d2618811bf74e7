"""Every Triton kernel compiles for a GPU (sm_90), on a machine that has none.

The interpreter runs kernels as Python, which forgives what the compiler does not. Here each
launch is caught before it happens, and its kernel compiled for the arguments it would get.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from eventful import ops  # noqa: E402
from eventful.ops.triton import (  # noqa: E402
    attention,
    candidates,
    context,
    exact,
    gates,
    interpreted,
    maps,
    motion,
    nms,
    proposals,
    regions,
    relative,
    rows,
    scores,
    tiles,
    windows,
)

pytestmark = pytest.mark.skipif(interpreted(), reason="kernels are interpreted in this process")

# Products of fp32 compile for many seconds; the default run has one case of them.
slow_kind = pytest.param(torch.float32, marks=pytest.mark.slow)

KINDS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.bool: "*i1",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


def compile_only(compiled: list[str], limit: int, kernel: JITFunction, *args, **kwargs) -> None:
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    signature, constants = {}, {}
    for parameter in kernel.params:
        value = given[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = KINDS[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(kernel, signature, constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.asm["cubin"]
    if made.metadata.shared > limit:  # as a launch does
        raise OutOfResources(made.metadata.shared, limit, "shared memory")
    compiled.append(kernel.fn.__name__)


@pytest.fixture
def limit() -> int:
    """Bytes of shared memory a program may have: those of an H200."""
    return 232448


@pytest.fixture
def compiled(monkeypatch, limit):
    names: list[str] = []
    launch = lambda kernel, grid: partial(compile_only, names, limit, kernel)  # noqa: E731
    monkeypatch.setattr(tiles, "_found", {})
    monkeypatch.setattr(JITFunction, "__getitem__", launch)
    monkeypatch.setattr(attention, "multiprocessors", lambda device: 132)
    return names


def make(*shape: int, kind: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=kind)


SLOTS = torch.zeros(1, dtype=torch.int64)
INDEX = torch.zeros(1, 512, dtype=torch.int64)
COUNT = torch.zeros(1, dtype=torch.int64)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("form", ["plain", "leading", "scene", "floor"])
def test_pick(compiled, form):
    more = {"leading": form != "plain"}
    if form == "scene":
        more |= {"scene": torch.zeros(1), "cut": (4.0, 0.5, 0.9), "slots": SLOTS}
        more |= {"period": 59, "turn": COUNT, "prefix": 1}
    if form == "floor":
        more |= {"low": torch.zeros(1), "floor": COUNT}
    report = torch.zeros(1, ops.REPORT, dtype=torch.int32)
    gates.pick(torch.zeros(1, 4097), ops.PickRule(torch.zeros(1), COUNT, **more), 512, report)
    assert compiled == ["_pick"]


def test_gates_and_rows(compiled):
    tokens, width = make(1, 4097, 768), make(768)
    selected, norm = make(1, 512, 768), ops.LayerNorm(width, width, 1e-6)
    gates.error_norm(tokens, tokens, 2.0, SLOTS)
    exact.gate_error(tokens, tokens, SLOTS, norm, tokens)
    exact.gate_error(tokens.float(), tokens, SLOTS, stored=True)
    exact.gate_rows(tokens, tokens, INDEX, COUNT, SLOTS, norm)
    exact.gate_rows(tokens.float(), tokens, INDEX, COUNT, SLOTS, stored=True)
    exact.add_held(tokens, tokens, SLOTS)
    rows.add_norm(selected, selected, width, width, width, 1e-6)
    rows.write_rows_((tokens, tokens), (selected, selected), INDEX, COUNT, SLOTS)
    rows.swap_rows_((tokens, tokens), (selected, selected), INDEX, COUNT, SLOTS)
    rows.take_slots(tokens, SLOTS)
    assert len(compiled) == 10


@pytest.mark.parametrize("form", ["plain", "slots", "hint"])
def test_motion(compiled, form):
    picture = torch.zeros(1, 512, 512)
    slots = None if form == "plain" else SLOTS
    moves = torch.zeros(1, 64, 64, 2)
    motion.match_blocks(picture, picture, slots, moves if form == "hint" else None)
    motion.carry(make(1, 4097, 768), moves, 1, slots)
    assert compiled == ["_prepare_pictures", "_match_blocks", "_carry"]


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("layers", [0, 3, 8])
@pytest.mark.parametrize("slots", [SLOTS, None], ids=["slots", "rows"])
def test_frame_score(compiled, layers, slots):
    error, changes = torch.zeros(1, 4097), (make(1, 4097, 768),) * layers
    sizes, moves = (torch.zeros(1),) * layers, torch.zeros(1, 64, 64, 2)
    scores.frame_score(error, torch.zeros(1), changes, sizes, 3.0, moves, 1, slots)
    if layers:
        scores.frame_score(error, torch.zeros(1), changes, sizes, 3.0, None, 1, slots)
    assert compiled == ["_frame_score"] * (2 if layers else 1)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("slots", [SLOTS, None], ids=["slots", "rows"])
@pytest.mark.parametrize("count", [COUNT, None], ids=["counts", "all"])
def test_estimate(compiled, slots, count):
    picked = ops.Picked(INDEX, COUNT, torch.zeros(1, 4097, dtype=torch.int32))
    report, one = torch.zeros(1, ops.REPORT, dtype=torch.int32), torch.zeros(1)
    scores.estimate_error_(torch.zeros(1, 4097), one, picked, one, COUNT, one, slots, report)
    memory = make(1, 4097, 768)
    scores.follow_change_(one, make(1, 512, 768), memory, INDEX, count, slots)
    scores.follow_change_(one, make(1, 1, 768), memory, INDEX[:, :1], count, slots)
    assert compiled == ["_estimate_error", *["_change_of_rows", "_follow_change"] * 2]


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (torch.bfloat16, 4096),
        (torch.bfloat16, 4097),
        (torch.float32, 4096),
        pytest.param(torch.float32, 4097, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_attention(compiled, kind, keys):
    q, k = (ops.split_heads(make(1, n, 768, kind=kind), 12) for n in (512, keys))
    attention.attend(q, k, k, 0.125, slots=SLOTS)
    attention.attend_partial(k, k, k, 0.125)
    assert compiled == ["_attend", "_combine", "_attend"]


def test_attention_with_its_log_sum_exp(compiled):
    q, k = (ops.split_heads(make(1, n, 768), 12) for n in (512, 4097))
    assert attention.attend_lse(q, k, k, 0.125, slots=SLOTS)[0].dtype == torch.bfloat16
    assert compiled == ["_attend", "_combine"]


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("grid", [(64, 64), (42, 42), (14, 14)])
def test_relative_position(compiled, grid):
    q, k = (ops.split_heads(make(1, n, 768), 12) for n in (512, grid[0] * grid[1]))
    tables = [make(side, side, 64) for side in grid]
    parts = relative.relative_logits(q, *tables, INDEX)
    attention.attend(q, k, k, 0.125, relative=parts, slots=SLOTS)
    assert "_relative_logits" in compiled
    assert "_attend" in compiled


@pytest.mark.parametrize("padded", [True, False])
def test_windows(compiled, padded):
    grid = (64, 64) if padded else (42, 42)
    q, k = (ops.split_heads(make(1, n, 768), 12) for n in (512, grid[0] * grid[1]))
    parts = tuple(make(1, 512, 12, 14) for _ in range(2))
    pad = (make(768), make(768)) if padded else None
    places = torch.zeros(1, grid[0] * grid[1], dtype=torch.int32)
    shape = ops.WindowGrid(grid, (14, 14))
    windows.attend_windows(q, k, k, 0.125, shape, INDEX, parts, pad, SLOTS, places)
    assert compiled == ["_attend_windows"]


@pytest.mark.parametrize("kind", [torch.bfloat16, slow_kind], ids=str)
def test_exact(compiled, kind):
    tokens, out = make(1, 4097, 768, kind=kind), torch.zeros(1, 4097, 768)
    small, new = torch.zeros(1, 4097, 12), make(1, 512, 768, kind=kind)
    memory = ops.ExactMemory(tokens, tokens, tokens, out, small, small)
    picked = ops.Picked(INDEX, COUNT, torch.zeros(1, 4097, dtype=torch.int32))
    exact.exchange_(memory, (new, new), (new, new), picked, 0.125, 100.0, SLOTS, 64)
    exact.recompute_(memory, ((INDEX, COUNT), (INDEX[:, :64], COUNT)), 0.125, SLOTS)
    assert compiled == ["_exchange", "_attend_rows", "_settle_rows"]


@pytest.mark.parametrize("kind", [torch.bfloat16, slow_kind], ids=str)
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("taken", [512, 56])
def test_context(compiled, kind, relative, taken):
    tokens, new = make(1, 4096, 768, kind=kind), make(1, taken, 768, kind=kind)
    memory = ops.ContextMemory(tokens, torch.zeros(1, 4096, 12), tokens)
    parts = tuple(make(1, 4096, 12, 64, kind=kind) for _ in range(2)) if relative else None
    context.add_context_(memory, (new, new), (new, new), COUNT, 0.125, SLOTS, parts, INDEX)
    assert compiled == ["_add_context"]


@pytest.mark.parametrize("kept", [100, pytest.param(512, marks=pytest.mark.slow)])
def test_nms(compiled, kept):
    boxes = torch.zeros(5, 1000, 4)
    nms.suppress(boxes, torch.ones(5, 1000, dtype=torch.bool), 0.7)
    nms.keep_apart(boxes, torch.zeros(5, 1000, dtype=torch.int64), COUNT.expand(5), 0.5, kept)
    assert compiled == ["_suppressed", "_settle", "_keep_apart"]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32], ids=str)
def test_regions(compiled, kind):
    maps = tuple(make(1, side, side, 256, kind=kind) for side in (256, 128, 64, 32))
    level = torch.zeros(1, 300, dtype=torch.int64)
    regions.align_regions(maps, (1 / 4, 1 / 8, 1 / 16, 1 / 32), torch.zeros(1, 300, 4), level, 7)
    regions.align_regions(maps[:2], (1 / 4, 1 / 8), torch.zeros(1, 300, 4), level, 14)
    assert compiled == ["_align_regions"] * 2


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("slots", [SLOTS, None], ids=["slots", "rows"])
def test_proposals(compiled, kind, slots):
    levels = ops.MapLevels(((256, 256), (128, 128), (64, 64), (32, 32), (16, 16)))
    rows, sizes = make(1, levels.pixels, 15, kind=kind), torch.zeros(1, 2)
    proposals.level_logits(rows, levels, slots)
    top, index = torch.zeros(1, 5, 1000), torch.zeros(1, 5, 1000, dtype=torch.int64)
    anchors = torch.zeros(3 * levels.pixels, 4)
    proposals.proposal_boxes(rows, top, index, anchors, levels, sizes, slots)
    kept = torch.zeros(1, 5000, dtype=torch.bool)
    proposals.best_boxes(torch.zeros(1, 5000, 4), torch.zeros(1, 5000), kept, 1000)
    assert compiled == ["_level_logits", "_proposal_boxes", "_best_boxes"]


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("classes", [30, 80])
def test_candidates(compiled, stages, classes):
    boxes, valid = torch.zeros(1, 1000, 4), torch.zeros(1, 1000, dtype=torch.bool)
    sizes, weights = torch.zeros(1, 2), (10.0, 10.0, 5.0, 5.0)
    candidates.region_levels(boxes, valid, 2, 5)
    codes = torch.zeros(1000, classes if stages == 1 else 1, 4)
    candidates.refine_boxes(boxes, codes, weights, sizes)
    logits = (torch.zeros(1000, classes + 1),) * stages
    scores, found = candidates.region_scores(logits, codes, (boxes, valid), weights, sizes, 0.05)
    order = torch.zeros(scores.shape, dtype=torch.int64)
    taken = candidates.take_candidates(scores, order, found, classes, stages > 1)
    candidates.take_found(order[:, :100].contiguous(), COUNT, taken[0], scores, taken[1])
    names = ["_region_levels", "_refine_boxes", "_region_scores", "_take_candidates", "_take_found"]
    assert compiled == names


@pytest.mark.parametrize("kind", [torch.bfloat16, slow_kind], ids=str)
def test_maps(compiled, kind):
    levels = ops.MapLevels(((256, 256), (64, 64)))
    x, changed = make(1, levels.pixels, 256, kind=kind), make(1, levels.pixels, kind=torch.bool)
    norm = (make(2, 256, kind=kind), make(2, 256, kind=kind), 1e-6)
    layer = ops.MapLayer(make(2, 9, 256, 256, kind=kind), norm=norm, relu=True)
    changed = maps.list_changed(changed, levels.sizes)
    maps.update_maps_(x, x, layer, changed, levels, SLOTS)
    last = ops.MapLayer(make(1, 1, 256, 15, kind=kind), make(1, 15, kind=kind))
    maps.update_maps_(make(1, levels.pixels, 15, kind=kind), x, last, changed, levels)
    tokens, one = make(1, 4096, 768, kind=kind), make(384, kind=kind)
    lift = ops.Lift(make(768, 4 * 384, kind=kind), one, (one, one, 1e-6), True, 2)
    out, some = make(1, 4 * 4096, 384, kind=kind), make(1, 4096, kind=torch.bool)
    maps.lift_tokens_(out, tokens, lift, maps.list_changed(some, ((64, 64),)), (64, 64), 0)
    maps.changed_pixels(some.view(1, 64, 64), levels, (4.0, 1.0), 3)
    expected = {"_list_changed", "_update_maps", "_lift", "_changed_pixels"}
    assert set(compiled) == expected


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_memory_in_slots(compiled, kind):
    memory, values = make(4, 4096, 768, kind=kind), make(2, 4096, 768, kind=kind)
    good = make(2, kind=torch.bool)
    rows.fill_slots_(memory, values, SLOTS, good)
    rows.renew_rows_(memory, values, SLOTS, good)
    rows.norm_relu(values[0], make(768, kind=kind), make(768, kind=kind), 1e-6)
    assert compiled == ["_fill_slots", "_renew_rows", "_norm_relu"]


@pytest.mark.parametrize("kind", [torch.bfloat16, slow_kind], ids=str)
def test_relative_position_of_all_queries(compiled, kind):
    table = make(64, 64, 64, kind=kind)
    relative.relative_logits_all(make(4, 4096, 768, kind=kind), 12, table, table, SLOTS)
    assert compiled == ["_relative_line"] * 2


def test_contrast_and_probe(compiled):
    scores.contrast(make(2, 4096, 768))
    rows.differs((), make(1200, kind=torch.int16), make(1200, kind=torch.int64))
    assert compiled == ["_contrast", "_differs"]


def test_the_largest_tiles_that_fit_are_found_once(monkeypatch):
    monkeypatch.setattr(tiles, "_found", {})
    tried = []

    def launch(side):
        tried.append(side)
        if side > 32:
            raise OutOfResources(side, 32, "shared memory")
        return side

    sizes = [{"side": side} for side in (128, 64, 32, 16)]
    assert [tiles.fitting("key", sizes, launch) for _ in range(2)] == [32, 32]
    assert tried == [128, 64, 32, 32]
    with pytest.raises(OutOfResources):
        tiles.fitting("other", sizes[:2], launch)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [101376], ids=["desktop"])
def test_wide_heads_fit_a_small_device(compiled):
    """Tiles shrink until they fit: 99 KiB are what the cards of a desktop have."""
    wide, new = make(1, 300, 512), make(1, 64, 512)
    q = ops.split_heads(wide, 2)
    attention.attend(q, q, q, 0.1, slots=SLOTS)
    small, out = torch.zeros(1, 300, 2), torch.zeros(1, 300, 512)
    memory = ops.ExactMemory(wide, wide, wide, out, small, small)
    picked = ops.Picked(INDEX[:, :64], COUNT, torch.zeros(1, 300, dtype=torch.int32))
    exact.exchange_(memory, (new, new), (new, new), picked, 0.125, 100.0, SLOTS, 16)
    assert compiled[0] == "_attend"
    assert compiled[-1] == "_exchange"
    kept = ops.ContextMemory(wide, small, wide)
    context.add_context_(kept, (new, new), (new, new), COUNT, 0.125, SLOTS)
    assert compiled[-1] == "_add_context"
    assert any(place > 0 for place in tiles._found.values())

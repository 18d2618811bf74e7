"""What stands around a model: adapters (LoRA), quantised weights, device maps, sharding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import eventful
import zoo_timm
from eventful import Config, Stream, TopR, convert
from eventful.engine.probe import Probe, plain_parts
from eventful.errors import ConfigError, WeightsChangedError
from guarding import PeftLike

EVERYTHING = TopR(10**6)
RULES = {
    "fast": Config.fast(EVERYTHING),
    "exact": Config.exact(EVERYTHING),
    "paper": Config.paper(EVERYTHING),
}
SIZE = 64


def vit() -> Any:
    torch.manual_seed(0)
    return zoo_timm.plain(img_size=SIZE)()


def frames(count: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.rand(1, 3, SIZE, SIZE, generator=made) for _ in range(count)]


def check(stream: Stream, shown: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    """With every token selected, a stream gives what the converted model gives."""
    for frame in shown:
        got = stream(frame)
        with torch.no_grad():
            torch.testing.assert_close(got, stream.model(frame), atol=tolerance, rtol=tolerance)


# LoRA by peft, and a layer laid out as its own, where peft is not installed.


def peft_model() -> Any:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["qkv", "fc1"], r=4, lora_alpha=8)
    made = peft.get_peft_model(vit(), settings).eval()
    for name, weight in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.5)
    return made


SWITCHES: dict[str, Callable[[Any], Any]] = {
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "merged": lambda model: model.merge_adapter(),
    "scaled": lambda model: [
        module.scaling.update(default=0.1)
        for module in model.modules()
        if hasattr(module, "lora_A")
    ],
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("switch", SWITCHES)
def test_adapters_switched_between_frames_are_noticed(switch: str, rule: str) -> None:
    model = convert(peft_model(), RULES[rule])
    stream = Stream(model)
    shown = frames(5)
    check(stream, shown[:2])
    before = stream(shown[2])
    SWITCHES[switch](model)
    with pytest.raises(WeightsChangedError, match=r"stream\.reset\(\)"):
        stream(shown[2])
    stream.reset()
    check(stream, shown[2:])
    same = torch.allclose(before, stream(shown[2]), atol=1e-4)
    assert same == (switch == "merged")  # else nothing was switched


def test_adapters_switched_in_the_original_are_not_passed_over() -> None:
    """The converted model has switches of its own; the weights are shared."""
    model = peft_model()
    stream = Stream(convert(model, RULES["fast"]))
    check(stream, frames(2))
    model.base_model.disable_adapter_layers()
    with pytest.raises(WeightsChangedError, match="Switch them in the converted model"):
        stream(frames(1)[0])
    stream.model.base_model.disable_adapter_layers()
    stream.reset()
    check(stream, frames(2))


def test_a_switch_in_the_original_is_noticed_without_peft() -> None:
    model = vit()
    for block in model.blocks:
        block.mlp.fc1 = PeftLike(block.mlp.fc1)
    stream = Stream(convert(model.eval(), RULES["fast"]))
    check(stream, frames(2))
    model.blocks[1].mlp.fc1._disable_adapters = True
    with pytest.raises(WeightsChangedError, match="Switch them in the converted model"):
        stream(frames(1)[0])
    model.blocks[1].mlp.fc1._disable_adapters = False
    check(stream, frames(2))


# Quantised weights.


def int8() -> Any:
    torchao = pytest.importorskip("torchao.quantization")
    model = vit()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    assert type(model.blocks[0].attn.qkv.weight) is not nn.Parameter
    return model


@pytest.mark.parametrize("rule", RULES)
def test_int8_weights_of_torchao_are_right(rule: str) -> None:
    model = int8()
    stream = Stream(convert(model, RULES[rule]))
    shown = frames(3)
    with torch.no_grad():
        assert stream.model(shown[0]).equal(model(shown[0]))
    check(stream, shown)


def test_int8_weights_of_torchao_are_watched_and_saved(tmp_path: Path) -> None:
    model = convert(int8(), RULES["fast"])
    stream = Stream(model)
    check(stream, frames(2))
    stream.snapshot(tmp_path / "s")
    again = eventful.Stream.load(model, tmp_path / "s")
    assert again(frames(3)[2]).equal(stream(frames(3)[2]))
    weight: Any = model.blocks[0].attn.qkv.weight
    for part in plain_parts(weight):
        part.zero_()
    with pytest.raises(WeightsChangedError):
        stream(frames(1)[0])


def test_values_inside_a_tensor_of_another_type_are_watched() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    first, second = torch.rand(40), torch.rand(40)
    held = TwoTensor(first, second)
    assert [part.data_ptr() for part in plain_parts(held)] == [first.data_ptr(), second.data_ptr()]
    probe = Probe([held])
    before = probe.values()
    assert not probe.changed(before)
    second[-1] = 7.0
    assert probe.changed(before)


# Hooks that move weights, and shards.


def fully_sharded(module: nn.Module) -> None:
    """What fully_shard does to the class of a module; it also needs a process group."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    module.__class__ = type(f"FSDP{type(module).__name__}", (fsdp.FSDPModule, type(module)), {})


@pytest.mark.parametrize("where", ["", "blocks.1", "blocks.1.mlp.fc1"])
def test_sharded_models_are_refused(where: str) -> None:
    model = vit()
    fully_sharded(model.get_submodule(where))
    for use in (convert, eventful.inspect):
        with pytest.raises(ConfigError, match=r"fully_shard \(FSDP\)"):
            use(model)


def test_a_model_under_the_older_fsdp_is_refused() -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp").FullyShardedDataParallel
    wrapper = fsdp.__new__(fsdp)
    nn.Module.__init__(wrapper)
    wrapper._modules["_fsdp_wrapped_module"] = vit()
    with pytest.raises(ConfigError, match="wrapped in FullyShardedDataParallel"):
        convert(wrapper)


@pytest.mark.parametrize("where", ["", "blocks.1", "blocks.1.attn.qkv"])
def test_hooks_of_accelerate_are_refused(where: str) -> None:
    model = vit()
    model.get_submodule(where)._hf_hook = object()
    with pytest.raises(ConfigError, match="hooks of accelerate"):
        convert(model)


def test_a_part_outside_of_the_trunk_may_be_moved() -> None:
    model = vit()
    head = nn.Sequential(model, nn.Identity())
    head[1]._hf_hook = object()
    check(Stream(convert(head.eval(), RULES["fast"])), frames(2))


def test_a_method_of_the_class_on_the_object_is_no_replacement() -> None:
    """accelerate leaves these when its hooks are removed."""
    model = vit()
    for module in model.modules():
        module.forward = module.forward
    check(Stream(convert(model, RULES["fast"])), frames(2))
    model.forward = vit().forward
    with pytest.raises(ConfigError, match="was replaced on the object"):
        convert(model)


def test_device_maps_of_accelerate(tmp_path: Path) -> None:
    """One device needs no hooks; offloaded weights are refused until that is undone."""
    accelerate = pytest.importorskip("accelerate")
    stream = Stream(convert(accelerate.dispatch_model(vit(), {"": "cpu"}), RULES["fast"]))
    check(stream, frames(2))
    offloaded = vit()
    accelerate.cpu_offload(offloaded, execution_device=torch.device("cpu"))
    for inplace in (False, True):
        with pytest.raises(ConfigError, match="remove_hook_from_module"):
            convert(offloaded, inplace=inplace)
    accelerate.hooks.remove_hook_from_module(offloaded, recurse=True)
    check(Stream(convert(offloaded, RULES["fast"])), frames(2))

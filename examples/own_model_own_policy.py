"""A ViT and a policy of your own: an adapter describes its blocks, and the policy chooses tokens.

    python examples/own_model_own_policy.py --frames 50

Needs nothing but eventful itself: the video is a generated street.
"""

import argparse
from dataclasses import dataclass

import eventful
import torch
from eventful.cost.counting import LinearCost
from eventful.policies import select_above
from eventful.rules.spec import BlockSpec, linear_cost
from eventful.tokens.layout import TokenLayout
from eventful.video.world import World
from torch import nn
from torch.nn import functional as F


class SmallViT(nn.Module):
    def __init__(self, size=128, patch=16, dim=96, depth=4):
        super().__init__()
        self.patch, self.embed = patch, nn.Conv2d(3, dim, patch, patch)
        self.positions = nn.Parameter(0.1 * torch.randn(1, (size // patch) ** 2, dim))
        like = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        layers = (nn.TransformerEncoderLayer(dim, 3, 4 * dim, **like) for _ in range(depth))
        self.layers = nn.ModuleList(layers)

    def forward(self, pixels):
        x = self.embed(pixels).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return x


class SmallViTAdapter(eventful.Adapter):  # see docs/adapters.md
    name = "small ViT"

    def matches(self, module):
        return isinstance(module, SmallViT)

    def blocks(self, trunk):
        return [(f"layers.{i}", layer) for i, layer in enumerate(trunk.layers)]

    def spec(self, trunk, block):
        attention, dim = block.self_attn, block.self_attn.embed_dim
        weight, bias = attention.in_proj_weight, attention.in_proj_bias
        return BlockSpec(
            module=block, dim=dim, heads=attention.num_heads, head_dim=attention.head_dim,
            scale=attention.head_dim**-0.5, norm1=block.norm1, norm2=block.norm2,
            # Each map must treat every token by itself.
            qkv=lambda x, index, positions: F.linear(x, weight, bias).chunk(3, dim=-1),
            project=attention.out_proj, mlp=lambda x: block.linear2(F.gelu(block.linear1(x))),
            qkv_cost=LinearCost(3 * dim * dim, 3 * dim), project_cost=linear_cost(attention),
            mlp_cost=linear_cost(block.linear1, block.linear2),
        )  # fmt: skip

    def layout(self, trunk, size):
        return TokenLayout((size[0] // trunk.patch, size[1] // trunk.patch))


@eventful.register_policy  # so that config files and snapshots can name it
@dataclass(frozen=True)
class AboveMedian:
    """Tokens whose error is so many times that of the median token, at most r of them."""

    times: float
    r: int = 32
    order: float = 2.0

    def select(self, error, context):  # error: (streams, tokens)
        return select_above(error, self.times * error.median(dim=1).values, self.r, context)


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--frames", type=int, default=50)
parser.add_argument("--seed", type=int, default=7, help="of the street")
arguments = parser.parse_args()

eventful.register_adapter(SmallViTAdapter())
torch.manual_seed(0)
config = eventful.Config.fast(AboveMedian(times=3))
stream = eventful.Stream(eventful.convert(SmallViT().eval(), config))
for pixels in World(seed=arguments.seed, frames=arguments.frames, size=(128, 128)):
    tokens = stream((pixels[None] / 255 - 0.45) / 0.225)  # what the model returns
    print(stream.last)
print(stream.summary())
assert eventful.Config.from_dict(config.to_dict()) == config

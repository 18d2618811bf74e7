"""The example of CONTRIBUTING.md runs as it stands; its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from eventful import config
from eventful.cost.counting import BlockShape, BlockWork, LinearCost
from eventful.policies import registry
from eventful.rules import attention
from eventful.surgery import adapters
from test_readme import anchors

PAGE = Path(__file__).parent.parent / "CONTRIBUTING.md"
SECTIONS = {"An update rule": "weights"}


@pytest.fixture
def undone(monkeypatch):
    """Examples register what they define; other tests must not see it."""
    monkeypatch.setattr(adapters, "_ADAPTERS", list(adapters._ADAPTERS))
    known = (registry._REGISTRY, attention.RULES, config._CHOICES)
    with patch.dict(known[0]), patch.dict(known[1]), patch.dict(known[2]):
        yield


def run(section: str) -> dict[str, object]:
    """Run the example of a section; returns its names."""
    text = PAGE.read_text().partition(f"### {section}\n")[2]
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    names: dict[str, object] = {"__name__": "example"}
    torch.manual_seed(0)
    exec(compile(code, f"{PAGE} ({section})", "exec", dont_inherit=True), names)
    return names


@pytest.mark.parametrize("section", SECTIONS)
def test_the_example_runs(undone, section):
    assert SECTIONS[section] in run(section)


def test_nothing_else_is_an_example():
    assert PAGE.read_text().count("```python\n") == len(SECTIONS)


def test_the_examples_rule_counts_the_dense_products_at_all_tokens(undone):
    cost = LinearCost()
    shape = BlockShape(tokens=10, heads=2, head_dim=4, dim=8, qkv=cost, projection=cost, mlp=cost)
    counted = run("An update rule")["count_weights"](shape, BlockWork.uniform(10))
    assert counted.matmul == 2 * 10 * 10 * 8


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)]+)\)", PAGE.read_text()):
        path, _, anchor = link.partition("#")
        assert (PAGE.parent / path).exists(), link
        assert not anchor or anchor in anchors(PAGE.parent / path), link


def test_names_in_the_steps_exist():
    """`file.py` names a file of the package, a folder ends in `/`."""
    source = PAGE.parent / "src" / "eventful"
    adding = re.sub(r"```.*?```", "", PAGE.read_text().partition("## Adding")[2], flags=re.DOTALL)
    named = re.findall(r"`([\w/]+(?:\.py|/))`", adding)
    assert len(named) > 10
    missing = [name for name in named if not (source / name).exists()]
    assert [name for name in missing if not (PAGE.parent / name).exists()] == []

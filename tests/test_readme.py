"""The README's lines run as they stand, on smaller frames."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_ten_lines_run(capsys):
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL).group(1)
    assert "518" in code
    exec(compile(code.replace("518", "70"), str(README), "exec"), {})
    assert capsys.readouterr().out.count("of the operations") == 8


def test_links_lead_somewhere():
    for page in (README, *README.parent.glob("docs/**/*.md")):
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name}: {link}"

"""The faults that are put in on purpose still fit the code, and their tests are there."""

from __future__ import annotations

import shutil

import pytest

from mutants import MUTANTS, ROOT, apply, survives


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_fault_fits_the_code(mutant, tmp_path):
    source = ROOT / "src" / "eventful" / mutant.file
    copy = tmp_path / "src" / "eventful" / mutant.file
    copy.parent.mkdir(parents=True)
    shutil.copy(source, copy)
    apply(mutant, tmp_path)
    compile(copy.read_text(), str(copy), "exec")
    assert copy.read_text() != source.read_text()
    assert all((ROOT / name).exists() for name in mutant.tests)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_fault_is_found(mutant):
    assert not survives(mutant)

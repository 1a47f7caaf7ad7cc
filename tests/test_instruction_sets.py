from __future__ import annotations

import pytest

from mosaic_kernels._backend import extension
from mosaic_kernels.testing import instruction_set, instruction_sets


def test_the_sets_are_listed_from_the_plainest_to_the_best():
    names = instruction_sets()
    every = list(extension.InstructionSet.__members__)
    assert names[0] == "portable" and names == every[: len(names)]
    assert names[-1] == extension.best_instruction_set().name


def test_a_set_is_in_use_inside_and_the_former_one_afterwards():
    before = extension.instruction_set()
    for name in instruction_sets():
        with instruction_set(name):
            assert extension.instruction_set().name == name
            with instruction_set("portable"):
                assert extension.instruction_set().name == "portable"
            assert extension.instruction_set().name == name
    with pytest.raises(RuntimeError, match="inside"), instruction_set("portable"):
        raise RuntimeError("inside")
    assert extension.instruction_set() == before


@pytest.mark.parametrize("name", ["sse9", "", "AVX2"])
def test_an_unknown_set_is_refused(name):
    before = extension.instruction_set()
    with pytest.raises(ValueError, match=f"name must be one of {', '.join(instruction_sets())}, got '{name}'"):
        with instruction_set(name):
            pass
    assert extension.instruction_set() == before


def test_a_set_that_this_machine_lacks_is_refused(monkeypatch):
    monkeypatch.setattr("mosaic_kernels.testing.instruction_sets", lambda: ["portable"])
    with pytest.raises(ValueError, match="name must be one of portable, got 'avx2'"):
        with instruction_set("avx2"):
            pass

"""tools/mutants.py: the code that each mutant breaks is still there, exactly once."""

from __future__ import annotations

import pytest

import mutants
from mutants import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_place_of_a_mutant_is_there(mutant: Mutant) -> None:
    mutants.place(mutant, mutants.ROOT)
    for test in mutant.tests:
        assert (mutants.ROOT / test.partition("::")[0]).exists(), test

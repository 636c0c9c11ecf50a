"""Systems as models of mteb: a pair, each side with its own encoder, and BM25."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ModelMeta, ScoringFunction
from mteb.types import PromptType

from core.types import Document, Encoder, EncoderSpec, FloatArray, Pair
from models.encoders.cached import encode_cached
from models.encoders.loading import load_encoder
from models.evaluation.bm25 import Bm25Index

BM25 = "bm25"
_INSTRUCTION = re.compile(r"(?<=Instruct: )[^\n]*(?=\n)")

Load = Callable[[EncoderSpec, Path], Encoder]


def with_instruction(spec: EncoderSpec, instruction: str) -> EncoderSpec:
    r"""Returns the spec with a task's instruction in a prompt that has a place for one.

    A prompt of the form "Instruct: …\nQuery:" has one; others stay as they are.
    """
    prompt = _INSTRUCTION.sub(lambda _: instruction, spec.prompt)
    return spec.model_copy(update={"prompt": prompt})


class PairModel(AbsEncoder):
    """A pair of the registry. STS, which has no sides, is encoded by the query side.

    Args:
        pair: The pair.
        cache: Folder of its vectors.
        batch_size: Texts in a batch.
        load: What loads one side.
    """

    def __init__(
        self, pair: Pair, cache: Path, *, batch_size: int = 32, load: Load = load_encoder
    ) -> None:
        self.name = pair.name
        self.pair = pair
        self._cache = cache
        self._batch_size = batch_size
        self._load = load
        self._loaded: dict[str, Encoder] = {}
        self.mteb_model_meta = _meta(pair.name, pair.query.dimension)

    def encode(
        self,
        inputs: Any,
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: PromptType | None = None,
        **kwargs: Any,
    ) -> FloatArray:
        """Encodes the texts of a data loader; returns float32 [n, dimension]."""
        texts = [text for batch in inputs for text in batch["text"]]
        if prompt_type == PromptType.document:
            spec = self.pair.document
        else:
            spec = with_instruction(self.pair.query, task_metadata.prompt)
        return encode_cached(
            lambda: self._encoder(spec),
            spec,
            texts,
            self._cache,
            batch_size=self._batch_size,
            label=f"{self.pair.name} {spec.role}",
        )

    def _encoder(self, spec: EncoderSpec) -> Encoder:
        key = spec.model_dump_json()
        if key not in self._loaded:
            # One encoder of each role at a time: a large one fills a GPU.
            self._loaded = {
                other: encoder
                for other, encoder in self._loaded.items()
                if encoder.spec.role != spec.role
            }
            self._loaded[key] = self._load(spec, self.pair.folder)
        return self._loaded[key]


class Bm25Model:
    """BM25 over words, as the baseline; it has no answer to STS."""

    name = BM25

    def __init__(self) -> None:
        self.mteb_model_meta = _meta(BM25, None)

    def index(self, corpus: Any, **kwargs: Any) -> None:
        """Indexes the corpus."""
        self._index = Bm25Index(Document(row["id"], row["text"]) for row in corpus)

    def search(
        self, queries: Any, *, top_k: int, top_ranked: Any = None, **kwargs: Any
    ) -> dict[str, dict[str, float]]:
        """Ranks the corpus, or the candidates of each query."""
        ids, texts = queries["id"], queries["text"]
        if top_ranked:
            return {
                id_: self._index.score(text, top_ranked[id_])
                for id_, text in zip(ids, texts, strict=True)
            }
        return dict(zip(ids, self._index.search(texts, top_k), strict=True))


def _meta(name: str, dimension: int | None) -> ModelMeta:
    return ModelMeta(
        loader=None,
        name=f"care/{name}",
        revision="1",
        release_date=None,
        languages=["cmn-Hans"],
        n_parameters=None,
        memory_usage_mb=None,
        max_tokens=None,
        embed_dim=dimension,
        license=None,
        open_weights=None,
        public_training_code=None,
        public_training_data=None,
        framework=[],
        similarity_fn_name=ScoringFunction.COSINE,
        use_instructions=None,
        training_datasets=None,
    )

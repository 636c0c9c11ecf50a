"""A new encoder from layers of a trained one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from core.encoders import Role
from training.schema import DataEntry, EncoderInit, Layers, Positive
from training.stages.base import Context, Outcome, Stage


class PruneLayers(Stage):
    """An encoder pruned from one that an earlier stage has trained.

    KALE and Wang and Lyu begin with layers of the trained document encoder (arXiv 2304.01016,
    2306.11550); a linear layer behind a trained query encoder is what HotelMatch-LLM puts
    between a small and a large encoder (ACL 2025, long paper 30).

    No data are read. `layers` and `projection` are as for an encoder's initial checkpoint.
    """

    kind: Literal["prune_layers"]
    data: list[DataEntry] = Field(default=[], max_length=0)
    side: Role = "query"  # that comes out; prompts, pooling and length stay as they were
    source: Role = "document"  # that it is pruned from
    layers: Layers | None = None
    projection: Positive | None = None

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if self.layers is None and self.projection is None:
            raise ValueError("name layers or projection")
        return self

    def sides(self) -> Sequence[Role]:
        """Returns the side that comes out and the one that it is pruned from."""
        return sorted({self.side, self.source})

    def run(self, context: Context, folder: Path) -> Outcome:
        """Writes the encoder."""
        from training.init import prepare

        source, before = context.encoders[self.source], context.encoders[self.side]
        if source.adapter:
            raise self.error("source", f"{self.source} has an adapter", "has_adapter")
        init = EncoderInit(
            **before.init.model_dump(exclude={"start", "pair", "revision", "layers", "projection"}),
            start=str(source.folder),
            layers=self.layers,
            projection=self.projection,
        )
        made = prepare(init, f"stages.{self.label}", folder)
        made.folder.rename(folder / self.side)
        update = {"folder": folder / self.side, "init": before.init}
        return Outcome({self.side: made.model_copy(update=update)})

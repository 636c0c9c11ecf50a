"""Pruning of a trained encoder to some of its layers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from core.encoders import Role
from training.schema import DataEntry, EncoderInit, Layers, Positive
from training.stages.base import Context, Outcome, Stage


class PruneLayers(Stage):
    """Replaces an encoder by a pruned copy of an encoder that earlier stages trained.

    KALE (arXiv 2304.01016) and Wang and Lyu (arXiv 2306.11550) initialise the query encoder with
    layers of the trained document encoder. HotelMatch-LLM (ACL 2025, long paper 30) adds a linear
    layer after the small query encoder. `layers` and `projection` are those of an encoder's
    initial checkpoint. The stage reads no data.
    """

    kind: Literal["prune_layers"]
    data: list[DataEntry] = Field(default=[], max_length=0)
    side: Role = "query"  # side to replace; its prompts, pooling and max_length are kept
    source: Role = "document"  # side to prune
    layers: Layers | None = None
    projection: Positive | None = None

    @model_validator(mode="after")
    def _check_changes(self) -> Self:
        if self.layers is None and self.projection is None:
            raise ValueError("set layers or projection")
        return self

    def sides(self) -> Sequence[Role]:
        """Returns the side to replace and the side to prune."""
        return sorted({self.side, self.source})

    def run(self, context: Context, folder: Path) -> Outcome:
        """Writes the pruned encoder; an adapter of its source is merged."""
        from training.distributed import processes
        from training.init import prepare

        if not processes().is_main_process:
            return Outcome({})
        source, before = context.encoders[self.source], context.encoders[self.side]
        changed = {"start", "pair", "revision", "layers", "projection", "config"}
        init = EncoderInit(
            **before.init.model_dump(exclude=changed),
            start=str(source.folder),
            config=source.config,
            layers=self.layers,
            projection=self.projection,
        )
        made = prepare(init, f"stages.{self.label}", folder, source.adapter)
        made.folder.rename(folder / self.side)
        update = {"folder": folder / self.side, "init": before.init}
        return Outcome({self.side: made.model_copy(update=update)})

"""The processes that train together: one, or those that torchrun or accelerate started."""

import torch
from accelerate import PartialState


def processes() -> PartialState:
    """Returns this process's place among them; on processors they talk by gloo."""
    # Without being told, accelerate takes processes without a GPU for strangers.
    return PartialState(cpu=not torch.cuda.is_available())

"""Training loop of a stage: transformers' Trainer with checkpoints of the trained weights only."""

import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from core.files import sync
from core.terminal import on_terminal
from training.batches import Batch, BatchPlan, Item
from training.distributed import gather, local, processes, whole_state
from training.errors import TrainingError
from training.objectives import Objective
from training.stages.base import Context, TrainingStage

CHECKPOINTS = "checkpoints"
_WEIGHTS = "trained.safetensors"
# Written last: a checkpoint without it is incomplete.
_COMPLETE = "complete"


class StageTrainer(Trainer):
    """Trains an objective; a run resumed from a checkpoint has the same result.

    `folder` gets checkpoints and TensorBoard logs; `measure` computes dev metrics.
    """

    def __init__(
        self,
        stage: TrainingStage,
        context: Context,
        folder: Path,
        objective: Objective,
        plan: BatchPlan,
        collate: Callable[[Sequence[Item]], Batch],
        measure: Callable[[], dict[str, float]] | None,
    ) -> None:
        self._before = {
            name: value.detach().clone()
            for name, value in objective.named_parameters()
            if value.requires_grad and stage.interpolation < 1
        }
        # This version of transformers reads the folder from the environment only.
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "tensorboard")
        self._stage = stage
        self._folder = folder / CHECKPOINTS
        self._objective = objective
        self._plan, self._collate, self._measure = plan, collate, measure
        self._parts: dict[str, torch.Tensor] = {}
        self._part_steps = 0
        self.sharded = stage.sharded and processes().num_processes > 1
        if self.sharded:
            for encoder in objective.trained.values():
                encoder.shard()
        super().__init__(
            model=objective,
            args=_arguments(stage, context, self._folder, plan, measured=measure is not None),
            train_dataset=plan,
            eval_dataset=plan if measure else None,
        )
        # transformers then keeps weights and gradients as they are sharded, and averages the
        # gradients of other parameters over processes.
        self.is_distributed_loading_by_transformers = self.sharded

    def fit(self) -> None:
        """Trains from the last complete checkpoint or from the start."""
        checkpoint = last_checkpoint(self._folder)
        if checkpoint and _step(checkpoint) >= self.args.max_steps:
            # The Trainer would run one more step.
            self._load_from_checkpoint(str(checkpoint))
            self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        else:
            self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        # The loss is computed before each step, so it does not cover the last update.
        weights = (local(value) for value in self._objective.parameters())
        finite = all(value.isfinite().all() for value in weights)
        if not all(gather(int(finite))):
            raise self._not_finite("weights are not finite", self.state.global_step)
        if len(set(gather(_digest(self._objective)))) > 1:
            reason = "processes hold different weights: use the same data and versions everywhere"
            raise self._stage.error("", reason, "weights_differ")
        with torch.no_grad():
            for name, value in self._objective.named_parameters():
                if name in self._before:
                    value.lerp_(self._before[name], 1 - self._stage.interpolation)
        steps = [entry["step"] for entry in self.state.log_history if "dev_nDCG@10" in entry]
        if self._measure and (self._before or self.state.global_step not in steps):
            self.evaluate()

    def _not_finite(self, reason: str, step: int) -> TrainingError:
        reason += f" at step {step}: lower learning_rate, or set precision to bf16 or fp32"
        return self._stage.error("", reason, "not_finite", step=step)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Returns the optimizer with the learning rate of each side."""
        optimizer = super().create_optimizer(model)
        rates = self._stage.learning_rate
        if isinstance(rates, dict):
            # Objectives that train both encoders have no other parameters.
            optimizer.param_groups = [
                group | {"params": values, "lr": rates[side]}
                for side, encoder in self._objective.trained.items()
                for group in optimizer.param_groups
                if (values := _shared(group["params"], encoder))
            ]
        return optimizer

    def get_train_dataloader(self) -> Any:
        """Returns a loader of the plan's batches, distributed over processes."""
        plan, gpu = self._plan, torch.cuda.is_available()
        workers = self.args.dataloader_num_workers
        settings: dict[str, Any] = {"num_workers": workers, "pin_memory": gpu}
        loader = DataLoader(plan, batch_sampler=plan, collate_fn=self._collate, **settings)
        return self.accelerator.prepare(loader)

    def compute_loss(self, model: nn.Module, inputs: Batch, *_: Any, **__: Any) -> Any:
        """Returns the loss of a batch; means of its parts are added to the next log entry."""
        losses = model(**inputs)
        loss = losses["loss"]
        if not torch.isfinite(loss):
            raise self._not_finite(f"the loss is {loss.item()}", self.state.global_step + 1)
        for name, value in losses.items():
            if name != "loss":
                self._parts[name] = self._parts.get(name, 0) + value.detach()
        self._part_steps += 1
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds means of the loss's parts since the last log entry, over all processes."""
        if "loss" in logs:
            parts = self.accelerator.reduce(self._parts, reduction="mean")
            logs |= {n: float(value) / self._part_steps for n, value in parts.items()}
            self._parts, self._part_steps = {}, 0
        super().log(logs, start_time)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        assert self._measure
        metrics = {f"dev_{name}": value for name, value in self._measure().items()}
        self.log(metrics)
        # Callbacks record that this step has been evaluated.
        handler = self.callback_handler
        self.control = handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir) if output_dir else self._folder
        state = whole_state(self._objective, trained=True)
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(state, folder / _WEIGHTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        try:
            state: dict[str, Any] = dict(load_file(folder / _WEIGHTS))
        except (OSError, SafetensorError) as error:
            reason = "the checkpoint is damaged: delete it and resume from the one before"
            raise TrainingError.at(folder, reason, "bad_checkpoint") from error
        if set(state) != _trained(self._objective):
            reason = "the checkpoint belongs to another model: delete it"
            raise TrainingError.at(folder, reason, "other_model")
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(self._objective, state, options=options)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.sharded:
            return super()._save_optimizer_and_scheduler(output_dir)
        assert self.optimizer and self.lr_scheduler
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_optimizer_state_dict(self._objective, self.optimizer, options=options)
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.sharded or checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        assert self.optimizer and self.lr_scheduler
        state = torch.load(Path(checkpoint) / OPTIMIZER_NAME, weights_only=True)
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(self._objective, self.optimizer, state, options=options)
        schedule = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = self._folder / f"checkpoint-{self.state.global_step}"
        try:
            super()._save_checkpoint(model, trial)
            processes().wait_for_everyone()
            if self.args.should_save:
                for path in folder.rglob("*"):
                    sync(path)
                (folder / _COMPLETE).touch()
                sync(folder)
        except (OSError, SafetensorError, RuntimeError) as error:  # torch.save raises the last
            reason = getattr(error, "strerror", None) or str(error)
            reason = f"the checkpoint cannot be written: {reason}"
            raise TrainingError.at(folder, reason, "input_output") from error


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _digest(objective: nn.Module) -> int:
    """Returns a checksum of the weights that each process holds whole."""
    digest = 0
    for value in objective.parameters():
        if value.requires_grad and not isinstance(value, DTensor):
            held = value.detach().cpu().flatten().view(torch.uint8).numpy()
            digest = crc32(held.tobytes(), digest)
    return digest


def _trained(objective: nn.Module) -> set[str]:
    return {name for name, value in objective.named_parameters() if value.requires_grad}


def _shared(values: Sequence[nn.Parameter], encoder: nn.Module) -> list[nn.Parameter]:
    owned = {id(value) for value in encoder.parameters()}
    return [value for value in values if id(value) in owned]


def last_checkpoint(folder: Path) -> Path | None:
    """Returns the last complete checkpoint, and deletes incomplete ones."""
    complete = []
    for path in folder.glob("checkpoint-*"):
        if (path / _COMPLETE).is_file():
            complete.append(path)
        elif processes().is_main_process:
            shutil.rmtree(path)
    return max(complete, key=_step, default=None)


def _arguments(
    stage: TrainingStage, context: Context, folder: Path, plan: BatchPlan, *, measured: bool
) -> TrainingArguments:
    dev = context.dev if measured else None
    world = processes().num_processes
    accumulated = int(stage.trainer.get("gradient_accumulation_steps", 1))
    steps = math.ceil(len(plan) / world / accumulated)
    steps = steps if stage.max_steps is None else min(stage.max_steps, steps)
    gpu = torch.cuda.is_available()
    if stage.precision == "fp16" and not gpu:
        reason = "fp16 needs a GPU: use bf16 or fp32 on this machine"
        raise stage.error("precision", reason, "needs_gpu")
    arguments = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": plan.batch_size,
        **stage.model_dump(include={"weight_decay", "max_grad_norm"}),
        "learning_rate": rate if isinstance(rate := stage.learning_rate, float) else 0.0,
        "warmup_steps": math.ceil(stage.warmup * steps),
        "optim": "adamw_torch",
        "bf16": stage.precision == "bf16",
        "fp16": stage.precision == "fp16",
        "use_cpu": not gpu,
        "seed": stage.run_seed(context),
        "save_steps": stage.checkpoint_every,
        "save_total_limit": 2,
        "logging_steps": stage.log_every,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "eval_strategy": "steps" if dev and dev.every else "no",
        "eval_steps": dev and dev.every,
        "eval_on_start": bool(dev and dev.start),
        "report_to": ["tensorboard"],
        # The default disables progress bars if the library's logging is silenced.
        "disable_tqdm": not on_terminal(),
        "remove_unused_columns": False,
        "ddp_find_unused_parameters": False,
        # Each process makes whole batches; they are neither split nor sent to other processes.
        "accelerator_config": {"split_batches": False, "dispatch_batches": False},
    }
    try:
        made = TrainingArguments(**arguments | stage.trainer)
    except (TypeError, ValueError, ImportError) as error:
        raise stage.error("trainer", str(error), "invalid_value") from error
    if world == 1:
        # DataParallel would split a batch over GPUs and lose its in-batch negatives.
        made._n_gpu = min(made.n_gpu, 1)
    return made

"""Training pairs by recipes."""

from collections.abc import Callable, Sequence
from pathlib import Path

from care.extras import require

DEFAULT_OUT = Path("builds/training")


def train(
    recipe: str | Path,
    *,
    out: str | Path = DEFAULT_OUT,
    changes: Sequence[str] = (),
    report: Callable[[str], None] | None = None,
) -> Path:
    """Trains a pair by a recipe, or resumes an interrupted run.

    Example:
        >>> folder = care.train("training/recipes/sample.yaml", changes=["seeds=[0]"])
        >>> pair = care.load_pair(str(folder / "pair.toml"))

    Args:
        recipe: YAML file: see docs/train-a-pair.md.
        out: Folder of stages and runs; recipes share finished stages in it.
        changes: Changes of keys of the recipe, such as "stages.align.epochs=2".
        report: Called with each line of progress, in the main process only; None for no progress.

    Returns:
        The folder of the run, with `pair.toml` if the recipe trains both sides. A recipe with
        several seeds is run with each; the folder is that of the first.

    Raises:
        TrainingError: If the recipe or its data are wrong.
        CareError: If the packages of training are not installed.
    """
    return train_seeds(recipe, out=out, changes=changes, report=report)[0]


def train_seeds(
    recipe: str | Path,
    *,
    out: str | Path,
    changes: Sequence[str] = (),
    report: Callable[[str], None] | None = None,
) -> list[Path]:
    """Trains as `train` does and returns the folders of all runs, in the order of the seeds."""
    require("train", make="train")
    from training.recipe import load_recipe

    loaded = load_recipe(Path(recipe), list(changes))
    # A wrong recipe is reported before these imports, which take seconds.
    from training.distributed import processes
    from training.run import run, silence_transformers_logging

    silence_transformers_logging()
    shown = report if report and processes().is_main_process else lambda line: None
    return [run(loaded, Path(out), seed, shown) for seed in loaded.seeds]

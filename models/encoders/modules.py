"""Reading and writing the module files of sentence-transformers in a checkpoint folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from core.encoders import Pooling
from core.errors import PairError
from core.files import read_small
from core.records import parse_json, write_json

# All versions of sentence-transformers and vLLM read these names of modules and pooling modes.
TYPES = "sentence_transformers.models."
_MODES: dict[Pooling, str] = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "last_token": "pooling_mode_lasttoken",
}
_POOLING: dict[str, Pooling] = {mode: pooling for pooling, mode in _MODES.items()} | {
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last_token",
}
_KINDS = ("Transformer", "Pooling", "Dense", "Normalize")


def read_modules(checkpoint: Path, pooling: Pooling) -> tuple[Path, list[Path]]:
    """Returns the folders of the transformer and of the Dense modules after pooling."""
    folders = _folders(checkpoint)
    for folder in folders["Pooling"]:
        _check_pooling(folder / "config.json", pooling)
    return folders["Transformer"][0], folders["Dense"]


def read_pooling(checkpoint: Path) -> Pooling:
    """Returns the pooling of a checkpoint: the mean if it states none, as in the library."""
    for folder in _folders(checkpoint)["Pooling"]:
        file = folder / "config.json"
        stated = _stated_pooling(file) if file.is_file() else "mean"
        for pooling in _MODES:
            if pooling == stated:
                return pooling
        reason = f"has the pooling {stated}: supported are {', '.join(_MODES)}"
        raise PairError.at(file, reason, "unsupported_module", module=stated)
    return "mean"


def _folders(checkpoint: Path) -> dict[str, list[Path]]:
    """Returns the folders of the modules, by kind; there is one Transformer."""
    file = checkpoint / "modules.json"
    folders: dict[str, list[Path]] = {kind: [] for kind in _KINDS}
    if not file.is_file():
        return folders | {"Transformer": [checkpoint]}
    for module in read_config(file):
        kind = module["type"].rpartition(".")[2]
        if kind not in folders:
            reason = f"has the unsupported module {kind}: supported are {', '.join(_KINDS)}"
            raise PairError.at(file, reason, "unsupported_module", module=kind)
        path = PurePosixPath(module["path"])
        if path.is_absolute() or ".." in path.parts:
            reason = f"names the folder {path} outside of the checkpoint"
            raise PairError.at(file, reason, "bad_module", folder=path)
        folders[kind].append(checkpoint / path)
    if (count := len(folders["Transformer"])) != 1:
        reason = f"has {count} Transformer modules instead of one"
        raise PairError.at(file, reason, "unsupported_module", module="Transformer")
    return folders


def read_config(file: Path) -> Any:
    """Returns the JSON value of a file of a checkpoint; PairError if it cannot be read."""
    try:
        return parse_json(read_small(file))
    except (OSError, ValueError) as error:
        raise PairError.at(file, f"is not readable JSON: {error}", "bad_module") from error


def _check_pooling(file: Path, pooling: Pooling) -> None:
    if file.is_file() and (found := _stated_pooling(file)) != pooling:
        reason = f"has pooling {found} instead of the pair's pooling {pooling}"
        raise PairError.at(file, reason, "other_pooling", found=found, expected=pooling)


def _stated_pooling(file: Path) -> str:
    """Returns the pooling of a Pooling module, by our name if there is one."""
    config = read_config(file)
    names = [key for key, value in config.items() if value is True and key != "include_prompt"]
    return "+".join(str(_POOLING.get(name, name)) for name in names or [config.get("pooling_mode")])


def write_modules(
    folder: Path,
    pooling: Pooling,
    *,
    max_length: int,
    prompts: Mapping[str, str],
    dense: Sequence[str] = (),
    default_prompt: str | None = None,
) -> None:
    """Writes the files that make a checkpoint a sentence-transformers model with unit norm.

    `max_length` counts special tokens [tokens]; `dense` are folders relative to `folder`, in order.
    """
    modules = [
        ("Transformer", ""),
        ("Pooling", "1_Pooling"),
        *(("Dense", path) for path in dense),
        ("Normalize", "2_Normalize"),
    ]
    for _, path in modules:
        (folder / path).mkdir(exist_ok=True)
    width = read_config(folder / "config.json")["hidden_size"]
    modes = dict.fromkeys(_MODES.values(), False) | {_MODES[pooling]: True}
    rows = [
        {"idx": i, "name": str(i), "path": path, "type": f"{TYPES}{kind}"}
        for i, (kind, path) in enumerate(modules)
    ]
    write_json(folder / "modules.json", rows)
    config = {"word_embedding_dimension": width, **modes, "include_prompt": True}
    write_json(folder / "1_Pooling" / "config.json", config)
    config = {"max_seq_length": max_length, "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", config)
    write_prompts(folder, prompts, default_prompt)


def write_prompts(folder: Path, prompts: Mapping[str, str], default: str | None) -> None:
    """Writes the prompts of a sentence-transformers model; see `write_modules`."""
    facts = {"default_prompt_name": default, "similarity_fn_name": "cosine"}
    config = {"prompts": dict(prompts), **facts}
    write_json(folder / "config_sentence_transformers.json", config)

"""What a run of a system on a task leaves: run file, scores, intervals."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from core.errors import CareError
from core.files import write_text
from models.evaluation.cmedteb.tasks import TASKS


class TaskScore(BaseModel):
    """A system's score on a task.

    Attributes:
        system: Name of the system.
        task: Name of the task.
        measure: What the score is.
        value: The score, 0 to 1 (Pearson: -1 to 1).
        low: Lower end of its 95 % bootstrap interval.
        high: Upper end.
        items: Score of each query; of STS, similarity of each pair.
        labels: Of STS, the label of each pair.
        data_sha256: Checksum of the texts and judgements that it was scored on.
        libraries: Versions of the libraries that matter.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    system: str
    task: str
    measure: str
    value: float
    low: float
    high: float
    items: dict[str, float]
    labels: list[float] | None = None
    data_sha256: str
    libraries: dict[str, str]


def score_path(out: Path, system: str, task: str) -> Path:
    """Returns where a score lies."""
    return out / system / f"{task}.json"


def run_path(out: Path, system: str, task: str) -> Path:
    """Returns where the TREC run file of a score lies."""
    return out / system / f"{task}.trec"


def write_score(out: Path, score: TaskScore) -> None:
    """Writes a score whole."""
    path = score_path(out, score.system, score.task)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, score.model_dump_json(indent=1) + "\n")


def read_score(path: Path) -> TaskScore:
    """Reads a score.

    Raises:
        CareError: If the file is missing or is no score.
    """
    try:
        return TaskScore.model_validate_json(path.read_text("utf-8"))
    except OSError as error:
        raise CareError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise CareError(f"{path} is no score of this benchmark") from error


def read_scores(out: Path) -> dict[str, dict[str, TaskScore]]:
    """Returns all scores of a folder, by task, by system.

    Raises:
        CareError: If there is none, or two were scored on different data.
    """
    scores: dict[str, dict[str, TaskScore]] = {}
    for path in sorted(out.glob("*/*.json")):
        score = read_score(path)
        scores.setdefault(score.system, {})[score.task] = score
    if not scores:
        raise CareError(f"{out} holds no scores: run some systems first")
    for task in TASKS:
        checksums = {s[task.name].data_sha256 for s in scores.values() if task.name in s}
        if len(checksums) > 1:
            raise CareError(f"{out}: systems were scored on different data of '{task.name}'")
    return scores

"""Run files in TREC's format: query-id Q0 document-id rank score system."""

from pathlib import Path

from core.errors import CareError
from core.files import write_text
from models.evaluation.beir import Run


def write_run(path: Path, run: Run, system: str) -> None:
    """Writes a run, each query's documents by descending score, then by descending id.

    Raises:
        CareError: If an id or the system's name holds white space, which the format cannot carry.
    """
    lines = []
    for query, scores in run.items():
        ranked = sorted(scores, key=lambda id_: (scores[id_], id_), reverse=True)
        if broken := [word for word in (query, *ranked, system) if len(word.split()) != 1]:
            raise CareError(f"'{broken[0]}' cannot stand in a TREC run: it holds white space")
        lines += [
            f"{query} Q0 {id_} {rank} {scores[id_]!r} {system}\n"
            for rank, id_ in enumerate(ranked, start=1)
        ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(lines))


def read_run(path: Path) -> Run:
    """Reads a run.

    Raises:
        CareError: If the file cannot be read or a line has not six columns with a score.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise CareError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CareError(f"{path} is not UTF-8") from error
    run: Run = {}
    for number, line in enumerate(lines, start=1):
        try:
            query, _, document, _, score, _ = line.split()
            run.setdefault(query, {})[document] = float(score)
        except ValueError as error:
            raise CareError(f"{path} line {number} is no line of a TREC run") from error
    return run

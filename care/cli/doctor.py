"""`care doctor` checks this machine and installation, and says what to do."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from care.cli.options import Json, Served, takes_fields
from care.cli.output import show
from care.options import Builds
from core.choices import DEFAULT_BUILDS, DEFAULT_INDEXES

if TYPE_CHECKING:
    from care.diagnosis.finding import Finding


@takes_fields
def doctor(served: Served, builds: Builds = DEFAULT_BUILDS, json_: Json = False) -> None:
    """Check processors, GPU, packages, settings, pair, index, Redis, Milvus, port and disk.

    The exit status is 1 if a check finds an error.
    """
    given = {name.upper(): str(value) for name, value in asdict(served).items() if value}
    os.environ.update({f"CARE_{name}": value for name, value in given.items()})
    from care.diagnosis.machine import check_machine
    from care.diagnosis.packages import check_packages
    from care.diagnosis.serving import check_serving

    root = Path(os.environ.get("CARE_INDEXES") or DEFAULT_INDEXES)
    findings = [
        *check_machine([root, builds]),
        *check_packages(),
        *check_serving(index_required="CARE_INDEX" in os.environ),
    ]
    errors = sum(finding.status == "error" for finding in findings)
    result = {"errors": errors, "findings": [asdict(finding) for finding in findings]}
    show(result, _lines(findings), as_json=json_)
    if errors:
        raise typer.Exit(1)


def _lines(findings: "Sequence[Finding]") -> Iterator[str]:
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        yield f"{finding.status:<8} {finding.check:<{width}}  {finding.message}"
        if finding.advice:
            yield f"{'':8} {'':{width}}  {finding.advice}"
    number = {s: sum(f.status == s for f in findings) for s in ("error", "warning")}
    yield ", ".join(f"{count} {status}{'s' * (count != 1)}" for status, count in number.items())

"""The `care` command: its subcommands by task, and what a failed one prints and returns."""

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from care.cli import (
    bench,
    cmedteb,
    curate,
    doctor,
    evaluate,
    export,
    index,
    indexes,
    late_interaction,
    search,
    serve,
    train,
    versions,
)
from care.cli.output import print_lines
from core.terminal import run, shown

# Typer keeps the line breaks of a paragraph, so each paragraph is one line.
_HELP = (
    "Index and search Chinese medical text.\n\n"
    "A large encoder encodes documents offline. A small encoder, which shares its vector space, "
    "encodes queries online. To begin with a sample, then with documents of your own:\n\n"
    "    care demo\n\n"
    "    care index corpus.jsonl --index mine\n\n"
    '    care search "高血压能喝咖啡吗" --index mine'
)
_INTERRUPTED = "interrupted; index, update, train and curate resume if you run the command again"


# Not every release of Typer exports it.
_UsageError: Any = typer.BadParameter.__base__


def _print_version(asked: bool) -> None:
    if not asked:
        return
    try:
        found = version("care-retrieval")
    except PackageNotFoundError:
        found = "of a checkout that is not installed"
    print_lines([f"care-retrieval {found}"])
    raise typer.Exit


class _Commands(TyperGroup):
    """A group that prints an error of the user's as one line, `error: message [code]`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns name, command and arguments; raises `CareError` for an unknown variable."""
        name, command, rest = super().resolve_command(ctx, args)
        # The doctor reports it among other findings; help is printed in any case.
        unchecked = name == "doctor" or ctx.resilient_parsing or {*ctx.help_option_names} & {*rest}
        if not unchecked and any(variable.upper().startswith("CARE_") for variable in os.environ):
            from service.settings import check_variables

            check_variables()
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Runs a subcommand; exits with status 1 after a `CareError`, with 130 after Ctrl-C."""

        def command() -> None:
            try:
                super(_Commands, self).invoke(ctx)
            except _UsageError as error:
                error.message = shown(error.message)
                raise

        if status := run(command, interrupted=_INTERRUPTED):
            raise typer.Exit(status)


app = typer.Typer(
    cls=_Commands,
    help=_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _care(
    version: Annotated[
        bool,
        Option("--version", help="Print the version.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Takes the options of `care` itself."""


INDEXES, SEARCH, EVALUATION = "Indexes", "Search", "Evaluation"
TRAINING, DIAGNOSIS, MAINTENANCE = "Training and data", "Diagnosis", "Maintenance"
app.command("index", rich_help_panel=INDEXES)(index.index)
app.command("update", rich_help_panel=INDEXES)(index.update)
app.command("merge", rich_help_panel=INDEXES)(index.merge)
app.add_typer(versions.app, name="versions", rich_help_panel=INDEXES)
app.add_typer(indexes.app, name="indexes", rich_help_panel=INDEXES)
app.add_typer(indexes.aliases, name="alias", rich_help_panel=INDEXES)
app.command("search", rich_help_panel=SEARCH)(search.search)
app.command("demo", rich_help_panel=SEARCH)(serve.demo)
app.command("serve", rich_help_panel=SEARCH)(serve.serve)
app.command("key", rich_help_panel=SEARCH)(serve.key)
app.command("evaluate", rich_help_panel=EVALUATION)(evaluate.evaluate)
app.command("answerable", rich_help_panel=EVALUATION)(evaluate.answerable)
app.command("evidence", rich_help_panel=EVALUATION)(evaluate.evidence)
app.add_typer(cmedteb.app, name="cmedteb", rich_help_panel=EVALUATION)
app.add_typer(late_interaction.app, name="late-interaction", rich_help_panel=EVALUATION)
app.command("train", rich_help_panel=TRAINING)(train.train)
app.command("export", rich_help_panel=TRAINING)(export.export)
app.add_typer(curate.app, name="curate", rich_help_panel=TRAINING)
app.command("doctor", rich_help_panel=DIAGNOSIS)(doctor.doctor)
app.add_typer(bench.app, name="bench", rich_help_panel=MAINTENANCE)
app.command("ablations", rich_help_panel=MAINTENANCE)(train.ablations)
app.command("phrases", rich_help_panel=MAINTENANCE)(train.phrases)
app.command("splits", rich_help_panel=MAINTENANCE)(train.splits)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    The status is 0, 1 for an error that a user can act on, 2 for wrong usage, 130 after Ctrl-C.
    """

    def command() -> int:
        try:
            app(arguments, prog_name="care")
        except SystemExit as exit_:
            return exit_.code if isinstance(exit_.code, int) else 1
        return 0

    return run(command)

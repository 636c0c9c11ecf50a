import re

from tests.deploy.tools import DEPLOY, ROOT

README = (DEPLOY / "README.md").read_text("utf-8")
# Files that the reader writes.
WRITTEN = {"deploy/.env", "secrets.env"}


def test_the_files_in_commands_exist() -> None:
    commands = "\n".join(re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL))
    paths = set(re.findall(r"\bdeploy/[\w./*-]+", commands))
    assert len(paths) > 10
    for path in sorted(paths):
        if not any(path.endswith(name) for name in WRITTEN):
            assert list(ROOT.glob(path.replace("overlays/mine", "overlays/example"))), path


def test_the_files_in_the_table_exist_and_are_all_of_deploy() -> None:
    rows = re.findall(r"^\| (`.*?) \|", README, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    for name in named:
        assert list(DEPLOY.glob(name)) or list((DEPLOY / "kubernetes").glob(name)), name
    roots = {name.split("/")[0] for name in named} | {"README.md", "hadolint.yaml"}
    missing = {path.name for path in DEPLOY.iterdir()} - roots - {".env", "service.env"}
    assert {name for name in missing if not name.startswith(("install-", "__pycache__"))} == set()

"""deploy/README.md: its links lead somewhere, and it names what can be set."""

import re

from tests.deploy.files import DEPLOY, REFERENCE, ROOT

PAGE = (DEPLOY / "README.md").read_text()


def test_links_of_the_page_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:\s]+)\)", PAGE)
    assert links
    assert [link for link in links if not (DEPLOY / link).exists()] == []


def test_page_names_every_variable_of_the_compose_files() -> None:
    text = "".join((ROOT / name).read_text() for name in ("compose.yaml", "compose.gpu.yaml"))
    assert {found["name"] for found in REFERENCE.finditer(text) if f"`{found['name']}`" not in PAGE} == set()


def test_page_says_which_files_there_are() -> None:
    folders = {path.name for path in DEPLOY.iterdir() if path.is_dir()}
    assert {name for name in folders if f"]({name}" not in PAGE} == set()

"""Prints the requirements of one optional group of pyproject.toml, one word each, for pip on the command line."""

import pathlib
import sys
import tomllib

project = tomllib.loads((pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
print(*(requirement.replace(" ", "") for requirement in project["optional-dependencies"][sys.argv[1]]))

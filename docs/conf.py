"""How Sphinx builds the documentation:  python -m sphinx -W -b html docs docs/_build/html"""

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_extensions"))

import hookgraph  # noqa: E402  the installed package, after the path of our own extension

project = "hookgraph"
author = "the hookgraph contributors"
copyright = author
version = release = hookgraph.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_nb",
    "from_code",
]
exclude_patterns = ["_build", "results"]

# Sphinx reads only what lies below this folder. The copies are ignored by git, so each notebook has one source.
shutil.rmtree(HERE / "notebooks", ignore_errors=True)
shutil.copytree(HERE.parent / "notebooks", HERE / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))

# The tests run every notebook; the documentation shows what is committed.
nb_execution_mode = "off"
myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"hookgraph {release}"
html_show_sourcelink = False

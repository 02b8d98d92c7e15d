"""Sphinx configuration.  `make docs` builds the pages into build/docs."""

import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # folder of directives.py and site_files.py

from sphinx.search.en import SearchEnglish

import cupyconv

settings = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())

project = "cupyconv"
author = "the cupyconv authors"
version = release = cupyconv.__version__
copyright = f"the cupyconv authors. cupyconv {release}, license Apache-2.0"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "directives",
    "site_files",
]

# The notebooks are committed with their outputs, which tests/pages/test_notebooks.py compares with
# those of a run.  A build does not run them: comparing frameworks and timing layers takes minutes.
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "none"  # docstrings describe arguments; overloads would repeat them
autodoc_member_order = "bysource"
autodoc_default_options = {"show-inheritance": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_baseurl = settings["project"]["urls"]["Documentation"]
html_title = f"cupyconv {release}"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
SearchEnglish.stopwords -= {"same", "out"}  # names of arguments and values

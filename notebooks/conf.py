"""Sphinx configuration.  `make docs` builds the pages into build/docs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # folder of directives.py

import cupyconv

project = "cupyconv"
author = "the cupyconv authors"
copyright = "the cupyconv authors, Apache-2.0"
version = release = cupyconv.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "directives",
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
html_title = f"cupyconv {release}"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}

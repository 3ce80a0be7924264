"""`run_pytest.py ARGUMENTS` is `python -m pytest ARGUMENTS`, in a fork of tests/zygote.py."""

import os
import sys

import pytest

sys.path.insert(0, os.getcwd())
sys.exit(pytest.main(sys.argv[1:]))

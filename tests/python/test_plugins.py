# SPDX-License-Identifier: Apache-2.0
"""Plug-ins: loaded by path, and brought by installed packages. tests/python_test.sh builds examples/plugin over the
library of the wheel, and names it."""

import os
import subprocess
import sys

import pytest

import kvkeep

PLUGIN = os.environ.get("KVKEEP_TEST_PLUGIN")
pytestmark = pytest.mark.skipif(PLUGIN is None, reason="KVKEEP_TEST_PLUGIN names no plug-in")

NAMES = "import kvkeep; print('ams-vmax' in {one['name'] for one in kvkeep.policies()})"


def run(*words, installed=None, warnings="error"):
    """This Python with these words, in a process of its own; `installed`: a folder with packages."""
    environment = {**os.environ, "PYTHONPATH": str(installed or ""), "PYTHONWARNINGS": warnings}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)


def package(folder, code, points_to="vmax_plugin:plugin"):
    """An installed package with one entry point."""
    (folder / "vmax_plugin.py").write_text(code)
    about = folder / "vmax_plugin-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vmax-plugin\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[kvkeep.plugins]\nvmax = {points_to}\n")
    return folder


def test_a_plugin_is_loaded_by_its_path():
    load = f"import kvkeep; kvkeep.load_plugin({PLUGIN!r}); kvkeep.load_plugin({PLUGIN!r}); "
    check = "assert [str(file) for file in kvkeep.loaded_plugins()] == [" + repr(PLUGIN) + "]; "
    out = run("-c", load + check + NAMES)
    assert out.stdout == "True\n", out.stderr
    assert run("-c", NAMES).stdout == "False\n"


def test_what_is_no_plugin_is_refused(tmp_path):
    with pytest.raises(kvkeep.InvalidArgument, match="there is no file"):
        kvkeep.load_plugin(tmp_path / "none.so")
    (tmp_path / "notes.txt").write_text("milk")
    with pytest.raises(kvkeep.InvalidArgument, match="is no plug-in of kvkeep"):
        kvkeep.load_plugin(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize(
    "code",
    [
        f"plugin = {PLUGIN!r}",
        f"import pathlib\nplugin = pathlib.Path({PLUGIN!r})",
        f"def plugin():\n    return {PLUGIN!r}",
        f"def plugin():\n    import kvkeep\n    kvkeep.load_plugin({PLUGIN!r})",
    ],
)
def test_installed_packages_bring_plugins(tmp_path, code):
    installed = package(tmp_path, code)
    out = run("-c", NAMES, installed=installed)
    assert out.stdout == "True\n", out.stderr
    out = run("-m", "kvkeep", "policies", "ams-vmax", installed=installed)
    assert out.returncode == 0 and "scorer.floor" in out.stdout, out.stderr


@pytest.mark.parametrize(
    "code, why",
    [
        ("plugin = '/nowhere/none.so'", "there is no file '/nowhere/none.so'"),
        ("raise OSError('no license')", "no license"),
    ],
)
def test_a_package_whose_plugin_fails_is_left_out_with_a_warning(tmp_path, code, why):
    out = run("-c", NAMES, installed=package(tmp_path, code), warnings="default")
    assert out.stdout == "False\n"
    assert "RuntimeWarning: kvkeep: the plug-in vmax = vmax_plugin:plugin is left out: " in out.stderr
    assert why in out.stderr

"""The wheel: what is in it, and that the package finds its files from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
POCKET = ROOT / "models" / "pocket"
MAX_POCKET_BYTES = 30_000_000


def python(*arguments: str, cwd: Path, path: Path | None = None) -> str:
    """Run Python in `cwd`, with `path` before all that is installed, and give what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    run = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    python("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=ROOT)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel, without what it needs, into a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    python(
        *("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile"),
        *("--disable-pip-version-check", "--target", str(folder), str(wheel)),
        cwd=folder,
    )
    return folder


def test_wheel_contains_kernels_and_the_whole_pocket_pair(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "dflash_mlx/data/metal/README.md" in names
    shipped = {path.relative_to(ROOT).as_posix() for path in POCKET.rglob("*") if path.is_file()}
    shipped |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "metal").rglob("*.metal")}
    assert {f"dflash_mlx/data/{name}" for name in shipped} - names == set()
    assert any(name.endswith("target/model.safetensors") for name in shipped)
    assert any(name.endswith("drafter/model.safetensors") for name in shipped)


def test_wheel_contains_nothing_else(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"dflash_mlx"}
    assert [name for name in zipfile.ZipFile(wheel).namelist() if "recipe" in name or name.endswith(".pyc")] == []


def test_wheel_names_distribution_command_and_licence(wheel: Path) -> None:
    assert wheel.name.startswith("dflash_mlx_muse-")
    with zipfile.ZipFile(wheel) as archive:
        texts = {
            name.split("/", 1)[1]: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name
        }
    assert "dflash-mlx = dflash_mlx.__main__:main" in texts["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in texts["METADATA"]
    assert "mlx[cpu]>=0.32.2; sys_platform == 'linux'" in texts["METADATA"]
    assert "mlx>=0.32.2; sys_platform == 'darwin'" in texts["METADATA"]
    assert "licenses/LICENSE" in texts


def test_pocket_pair_stays_small() -> None:
    assert sum(path.stat().st_size for path in POCKET.rglob("*") if path.is_file()) <= MAX_POCKET_BYTES


def test_installed_package_finds_its_files_in_itself(site: Path, tmp_path: Path) -> None:
    code = "from dflash_mlx.resources import find; print(find('metal')); print(find('models/pocket'))"
    found = python("-c", code, cwd=tmp_path, path=site).splitlines()
    data = site.resolve() / "dflash_mlx" / "data"
    assert found == [str(data / "metal"), str(data / "models" / "pocket")]


def test_installed_package_generates_with_its_own_pocket_pair(site: Path, tmp_path: Path) -> None:
    arguments = ("-m", "dflash_mlx", "generate", "import os", "--max-tokens", "4", "--json", "--quiet")
    result = json.loads(python(*arguments, cwd=tmp_path, path=site))
    assert result["stats"]["generated_tokens"] == len(result["tokens"]) <= 4
    assert result["stats"]["speculation"] == "on"


def test_checkout_finds_its_files_at_the_top_of_the_tree() -> None:
    from dflash_mlx.resources import find

    assert find("metal") == ROOT / "metal"
    assert find("models/pocket") == POCKET


def test_a_file_that_is_not_shipped_is_named_with_the_places_that_were_searched() -> None:
    from dflash_mlx.errors import DFlashError
    from dflash_mlx.resources import find

    with pytest.raises(DFlashError) as caught:
        find("models/absent")
    message = str(caught.value)
    assert message.startswith("[resources] models/absent must be a file or folder that comes with the package")
    assert f"{ROOT / 'models' / 'absent'}" in message
    assert message.endswith("Install dflash-mlx-muse again, or run from a complete clone.")

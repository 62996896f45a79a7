"""One gradient on one device or eight, on any mesh; checkpoints move between meshes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(600)
def test_eight_devices_give_the_gradient_of_one(tmp_path: Path) -> None:
    child = Path(__file__).with_name("mesh_child.py")
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, str(child), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=580,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["devices"] == 8
    assert len(report["meshes"]) == 2
    for name, mesh in report["meshes"].items():
        assert mesh["gradient"] < 1e-5, (name, mesh)
        assert mesh["params"] < 1e-5, (name, mesh)
        assert mesh["metrics"] < 1e-5, (name, mesh)
        # The state comes back sharded as it went in: the second update compiles nothing.
        assert mesh["programs"] == 1, (name, mesh)
        assert mesh["spec"] == mesh["moment_spec"]
    assert "fsdp" in report["meshes"]["(2, 2, 2) cut 2"]["spec"]
    assert report["scorer"] < 1e-5
    assert report["teacher"] < 1e-5
    assert report["restored"] == [0.0, 0.0]
    assert "'data': 4" in report["restored_spec"] and "tensor" in report["restored_spec"]

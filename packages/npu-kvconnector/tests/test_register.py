"""Registration: once, by name alone, and harmless where vLLM is not what it should be."""

from __future__ import annotations

import subprocess
import sys

import pytest

import npu_kvconnector
from tests.support.vllm_process import run_program


def python(code: str) -> str:
    """Run code in a process of its own and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_cheap() -> None:
    heavy = "[name for name in ('torch', 'numpy', 'vllm') if name in sys.modules]"
    assert python(f"import sys, npu_kvconnector; print({heavy})") == "[]"


@pytest.mark.parametrize("broken", ["vllm", "vllm.distributed.kv_transfer.kv_connector.factory"])
def test_no_usable_vllm_is_one_warning(broken: str) -> None:
    code = f"""
import sys, logging
logging.basicConfig(stream=sys.stdout, format='%(message)s')
sys.modules[{broken!r}] = None
import npu_kvconnector
npu_kvconnector.register(); npu_kvconnector.register()
"""
    if broken != "vllm":
        pytest.importorskip("vllm")
    lines = [line for line in python(code).splitlines() if npu_kvconnector.CONNECTOR in line]
    assert len(lines) == 1
    assert "not available" in lines[0]


def test_vllm_finds_the_connector_by_name() -> None:
    pytest.importorskip("vllm")
    code = """
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
import npu_kvconnector
npu_kvconnector.register()
early = [name for name in sys.modules if name.startswith('npu_kvconnector.')]
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as factory
config = KVTransferConfig(kv_connector=npu_kvconnector.CONNECTOR, kv_role='kv_both')
print(early, factory.get_connector_class(config).__module__, factory.supports_hma_config(config))
"""
    done = run_program(code)  # where vLLM is imported, and nothing of ours
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[] npu_kvconnector.connector True"

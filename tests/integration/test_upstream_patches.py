"""The patches that docs/developer_guide/upstream.md writes out for vLLM apply to it, and make its V2 runner npu's."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import types
from pathlib import Path

import pytest
import torch
import vllm

PATCHES = sorted((Path(__file__).parents[2] / "docs" / "developer_guide" / "upstream").glob("*.patch"))
NAMES_CUDA_STILL = {"ubatch_utils.py"}  # dual-batch overlap, which npu refuses

pytestmark = pytest.mark.skipif(not vllm.__version__.startswith("0.32"), reason="the patches are of vLLM 0.32")


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of vLLM that the patches change, changed."""
    folder, package = tmp_path_factory.mktemp("patched"), Path(vllm.__file__).parent
    for patch in PATCHES:
        for name in re.findall(r"^\+\+\+ b/vllm/(.*)$", patch.read_text(), re.MULTILINE):
            (folder / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(package / name, folder / "vllm" / name)
    subprocess.run(["git", "apply", "--verbose", *PATCHES], cwd=folder, check=True, timeout=60)
    return folder / "vllm"


def names_cuda(file: Path) -> bool:
    nodes = ast.walk(ast.parse(file.read_text()))
    return any(isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda" for node in nodes)


def test_nothing_of_the_v2_runner_names_cuda_once_they_are_applied(patched: Path) -> None:
    place = Path("v1/worker/gpu")
    original = Path(vllm.__file__).parent / place
    naming = {file.relative_to(original) for file in original.rglob("*.py") if names_cuda(file)}
    assert len(PATCHES) == 2
    assert len(naming) > len(NAMES_CUDA_STILL)
    left = {name for name in naming if not (patched / place / name).exists() or names_cuda(patched / place / name)}
    assert {str(name) for name in left} == NAMES_CUDA_STILL


def test_what_they_change_runs_on_npu(patched: Path) -> None:
    """vLLM's own handler of drafts makes a stream and an event of the device, and copies on them."""
    spec = importlib.util.spec_from_file_location("patched_utils", patched / "v1/worker/gpu/spec_decode/utils.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    handler = module.DraftTokensHandler(torch.device("npu"))
    assert handler.copy_stream.device.type == "npu"
    drafts = torch.tensor([[3, 4], [5, 6]], device="npu")
    batch = types.SimpleNamespace(req_ids=["a", "b"], has_structured_output_reqs=True, num_draft_tokens=2)
    handler.set_draft_tokens(batch, drafts)
    assert handler.get_draft_tokens().draft_token_ids == [[3, 4], [5, 6]]

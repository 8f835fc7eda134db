"""TTIR's text as typed operations, and what of it becomes arrays; without a device or a compiler."""

from __future__ import annotations

import re

import pytest

from npu_platform.errors import UnsupportedFeatureError
from npu_platform.triton.codegen.module import generate
from npu_platform.triton.ir.operations import walk
from npu_platform.triton.ir.text import parse_module, split
from npu_platform.triton.ir.types import Type, parse_type

MODULE = """
module {
  tt.func public @kernel(%arg0: !tt.ptr<f32> {tt.divisibility = 16 : i32}, %arg1: i32) attributes {noinline = false} {
    %c0_i32 = arith.constant 0 : i32
    %c1_i32 = arith.constant 1 : i32
    %cst = arith.constant dense<0xFF800000> : tensor<64xf32>
    %0 = tt.make_range {end = 64 : i32, start = 0 : i32} : tensor<64xi32>
    %1 = tt.splat %arg1 : i32 -> tensor<64xi32>
    %2 = arith.cmpi slt, %0, %1 : tensor<64xi32>
    %3 = tt.splat %arg0 : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>>
    %4 = tt.addptr %3, %0 : tensor<64x!tt.ptr<f32>>, tensor<64xi32>
    %5 = tt.load %4, %2, %cst cacheModifier = cg : tensor<64x!tt.ptr<f32>>
    tt.print " a: b {c}, %d: " {hex = false, isSigned = array<i32: 0>} : %5 : tensor<64xf32>
    %6:2 = scf.for %arg2 = %c0_i32 to %arg1 step %c1_i32 iter_args(%arg3 = %5, %arg4 = %4) -> (tensor<64xf32>, tensor<64x!tt.ptr<f32>>)  : i32 {
      %8 = arith.addf %arg3, %5 : tensor<64xf32>
      %9 = tt.addptr %arg4, %1 : tensor<64x!tt.ptr<f32>>, tensor<64xi32>
      scf.yield %8, %9 : tensor<64xf32>, tensor<64x!tt.ptr<f32>>
    }
    %7 = "tt.reduce"(%6#0) <{axis = 0 : i32}> ({
    ^bb0(%arg2: f32, %arg3: f32):
      %8 = arith.addf %arg2, %arg3 : f32
      tt.reduce.return %8 : f32
    }) : (tensor<64xf32>) -> f32
    %low, %high = tt.split %cst : tensor<64xf32> -> tensor<32xf32>
    tt.store %arg0, %7 : !tt.ptr<f32>
    cf.cond_br %2, ^bb1(%7 : f32), ^bb2
  ^bb1(%10: f32):  // pred: ^bb0
    tt.return
  ^bb2:  // pred: ^bb0
    tt.return
  }
}
"""


def test_operations_are_read_with_types_attributes_and_regions():
    (kernel,) = parse_module(MODULE)
    assert (kernel.name, kernel.is_kernel) == ("kernel", True)
    assert kernel.arguments == [("%arg0", Type("!tt.ptr<f32>")), ("%arg1", Type("i32"))]
    assert [block.label for block in kernel.body] == ["", "bb1", "bb2"]
    assert kernel.body[1].arguments == [("%10", Type("f32"))]
    found = {operation.name: operation for operation in walk(kernel.body)}
    assert found["tt.make_range"].integer("end") == 64
    assert found["tt.load"].operands == ["%4", "%2", "%cst"]
    assert found["tt.load"].result_types == [Type("f32", (64,))]
    assert found["arith.cmpi"].result_types == [Type("i1", (64,))]
    assert found["tt.print"].strings == [" a: b {c}, %d: "]
    assert found["scf.for"].operands == ["%c0_i32", "%arg1", "%c1_i32"]
    assert found["scf.for"].captures == [("%arg3", "%5"), ("%arg4", "%4")]
    assert found["scf.for"].results == ["%6#0", "%6#1"]
    assert found["scf.for"].result_types[1].pointee == "f32"
    assert found["tt.reduce"].operands == ["%6#0"]
    assert [name for name, _ in found["tt.reduce"].regions[0][0].arguments] == ["%arg2", "%arg3"]
    assert found["tt.split"].result_types == [Type("f32", (32,))] * 2
    assert found["cf.cond_br"].successors == [("bb1", ["%7"]), ("bb2", [])]


def test_types():
    assert parse_type("tensor<16x64x!tt.ptr<!tt.ptr<i8>, 1>>") == Type("!tt.ptr<!tt.ptr<i8>, 1>", (16, 64))
    assert parse_type("tensor<4xf8E4M3FN>").c == "f8E4M3FN"
    assert parse_type("!tt.ptr<!tt.ptr<bf16>>").c == "bf16**"
    assert split("a<b, c>, (d, e) -> f, g") == ["a<b, c>", "(d, e) -> f", "g"]
    with pytest.raises(UnsupportedFeatureError, match="i128"):
        _ = Type("i128").c


def test_what_is_not_read_again_is_no_array_and_pointers_move_by_a_number():
    source = generate(
        MODULE.replace("cf.cond_br %2, ^bb1(%7 : f32), ^bb2", "tt.return").partition("  ^bb1")[0] + "  }\n}"
    )
    # the loaded tensor, in whose memory the sum's lanes are afterwards, and the carried one; no mask, no address
    assert len(re.findall(r"^alignas\(64\)", source, flags=re.MULTILINE)) == 2
    assert "float*" not in "".join(re.findall(r"^alignas.*", source, flags=re.MULTILINE))


def test_unknown_operations_are_refused_by_name():
    with pytest.raises(UnsupportedFeatureError, match=r"ttng\.tmem_alloc"):
        generate(MODULE.replace('tt.print " a: b {c}, %d: "', 'ttng.tmem_alloc " a: b {c}, %d: "'))
    with pytest.raises(UnsupportedFeatureError, match=r"no tt\.func"):
        generate("module {\n}")

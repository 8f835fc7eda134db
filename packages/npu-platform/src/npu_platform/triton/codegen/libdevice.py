"""Owns the names of NVIDIA's libdevice, under which Triton's ``libdevice`` calls mathematical functions."""

from __future__ import annotations

from npu_platform.errors import UnsupportedFeatureError

_SAME_NAME = """
    acos acosh asin asinh atan atan2 atanh brev byte_perm cbrt ceil clz copysign cos cosh cospi erf erfc exp exp10 exp2
    expm1 fabs fdim ffs floor fma fmod hypot ilogb isnan j0 j1 ldexp lgamma llrint llround log log10 log1p log2 logb
    mul24 nextafter normcdf popc pow powi rcbrt remainder rhypot rint round rsqrt signbit sin sinh sinpi sqrt tan tanh
    tgamma trunc y0 y1
"""
_FUNCTIONS = {
    **{name: f"m_{name}" for name in _SAME_NAME.split()},
    "abs": "m_absi",
    "llabs": "m_absi",
    "brevll": "m_brev",
    "clzll": "m_clz",
    "ffsll": "m_ffs",
    "popcll": "m_popc",
    "nearbyint": "m_rint",
    "saturate": "m_saturate",
    "scalbn": "m_ldexp",
    "fdivide": "m_div",
    "finite": "m_isfinite",
    "isfinited": "m_isfinite",
    "isinf": "m_isinf",
    "isinfd": "m_isinf",
    "isnand": "m_isnan",
    "signbitd": "m_signbit",
    "mulhi": "mulhisi",
    "umulhi": "mulhiui",
    "mul64hi": "mulhisi",
    "umul64hi": "mulhiui",
    "umul24": "m_mul24",
    "float_as_int": "bits<int32_t>",
    "float_as_uint": "bits<int32_t>",
    "int_as_float": "bits<float>",
    "uint_as_float": "bits<float>",
    "double_as_longlong": "bits<int64_t>",
    "longlong_as_double": "bits<double>",
    "fadd_rn": "m_add",
    "fsub_rn": "m_sub",
    "fmul_rn": "m_mul",
    "fdiv_rn": "m_div",
    "frcp_rn": "m_reciprocal",
    "fsqrt_rn": "m_sqrt",
    "frsqrt_rn": "m_rsqrt",
    "fmaf_rn": "m_fma",
    "fma_rn": "m_fma",
    "dadd_rn": "m_add",
    "dsub_rn": "m_sub",
    "dmul_rn": "m_mul",
    "ddiv_rn": "m_div",
    "drcp_rn": "m_reciprocal",
    "dsqrt_rn": "m_sqrt",
}


def c_function(symbol: str) -> str:
    """Return the function of `runtime` for a symbol such as ``__nv_expf``.

    Raises UnsupportedFeatureError for one that is not there: roundings other than to nearest, some special functions.
    """
    name = symbol.removeprefix("__nv_").removeprefix("fast_")
    function = _FUNCTIONS.get(name) or _FUNCTIONS.get(name.removesuffix("f"))
    if function is None:
        msg = f"libdevice's {symbol} is not there on npu: use one of {', '.join(sorted(_FUNCTIONS))}."
        raise UnsupportedFeatureError(msg)
    return function

"""The element types of safetensors files, and their exact conversion to float32.

NumPy has no bfloat16 and no float8, so arrays hold their bits: uint16 for BF16, uint8 for F8_*.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F32 = NDArray[np.float32]

ITEM_BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits per element of every type safetensors 0.5+ defines."""

VIEWS: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind).newbyteorder("<")
    for name, kind in {
        "BOOL": "u1", "U8": "u1", "I8": "i1", "F8_E5M2": "u1", "F8_E4M3": "u1", "F8_E8M0": "u1",
        "F8_E4M3FNUZ": "u1", "F8_E5M2FNUZ": "u1",
        "I16": "i2", "U16": "u2", "F16": "f2", "BF16": "u2", "I32": "i4", "U32": "u4", "F32": "f4", "F64": "f8",
        "I64": "i8", "U64": "u8", "C64": "c8",
    }.items()
}  # fmt: skip
"""The NumPy type that holds an element's bits."""

FLOATS = ("BF16", "F16", "F32")
"""Plain float types an encoder takes as they are."""


def _e4m3_values() -> F32:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    magnitude[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)


E4M3_VALUES = _e4m3_values()
"""The value of every E4M3FN code: float32 [256]; 0x7F and 0xFF are NaN."""


def item_size(dtype: str) -> int:
    """Bytes of one element; `ValueError` for types that are no whole bytes."""
    bits = ITEM_BITS[dtype]
    if bits % 8:
        raise ValueError(f"a type of whole bytes expected, found {dtype}")
    return bits // 8


def bf16_to_f32(bits: Array) -> F32:
    """Exact values of BF16 bit patterns (uint16, any shape) as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: F32) -> NDArray[np.uint16]:
    """BF16 bit patterns of float32 values, rounded half to even; NaN stays a quiet NaN of the same sign."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(nan, quiet, rounded).astype(np.uint16)


def to_f32(array: Array, dtype: str) -> F32:
    """Exact float32 values of an array that holds `dtype` (BF16, F16 or F32)."""
    if dtype == "BF16":
        return bf16_to_f32(array)
    if dtype in ("F16", "F32"):
        return np.asarray(array, dtype=np.float32)
    raise TypeError(f"no exact float32 for {dtype}")
